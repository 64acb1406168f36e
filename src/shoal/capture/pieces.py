"""A captured step with some of its ops in pieces, where they make the peak, or convolutions by direct kernels.

On the CPU those are convolutions, for their scratch; on CUDA gradients of batch and group norms (and instance norms,
which are batch norms to it), which then take the block of the incoming gradient. Gradients of PReLUs, and attention,
are on both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from shoal.capture.attention import SOFTMAX, attended_in_pieces, choose_attentions
from shoal.capture.captured import Captured
from shoal.capture.step_writer import StepWriter, with_technique
from shoal.core.step import Op, StepGraph
from shoal.core.variant import Pieces
from shoal.errors import PlanError
from shoal.graph.fx_nodes import values_of
from shoal.graph.op_counts import flops
from shoal.kernels import convolution_pieces, norm_pieces, prelu
from shoal.kernels.convolution import input_gradient
from shoal.kernels.pieces import WORTH_PIECES_BYTES, Cut
from shoal.rewrites.activations import add_up_slopes, slopes_gradient
from shoal.rewrites.concatenations import can_be_left_out
from shoal.rewrites.convolutions import can_be_native, parts_of

_aten = torch.ops.aten
_OF_PRELU = _aten._prelu_kernel_backward.default
_KINDS = (norm_pieces, prelu)
_OF_GRADIENTS = {_OF_PRELU: prelu} | {target: kind for kind in _KINDS for target in kind.IN_PIECES}
_IN_PIECES = {target: pieces for kind in (convolution_pieces, *_KINDS) for target, pieces in kind.IN_PIECES.items()}
_NEAR_WHAT_STAYS = 0.5  # what else is held while an op runs differs about that much
_NEAR_OF_CONCATENATIONS = 0.2  # what else is held while an op other than a convolution runs differs by much
_WORTH_BYTES = 4 << 20  # of scratch, or of a concatenation
_SLOWER = 1.25  # by how much a kernel that needs less scratch may be slower if that sets the peak


def choose_pieces(
    captured: Captured, graph: StepGraph, means: Collection[str], costed: Callable[[Captured], StepGraph]
) -> tuple[Pieces, ...]:
    """Which convolutions of a step to compute by direct kernels, or else which concatenations not, and which in pieces.

    In pieces are those that set the smallest peak then: from the op that needs the most bytes, with operands, results
    and scratch, down to where the others need half of what stays at most: the fewer are cut, the less time that takes.

    Args:
        captured: the step, to be run on this machine.
        graph: the same with times and workspaces.
        means: what may be used: "direct", "pieces".
        costed: measures those of another form of the step.

    Returns:
        The direct ones or the concatenations, then attentions, then the others that are cut, each in the order of the
        step.
    """
    changed = choose_direct(captured, graph, costed) if "direct" in means else ()
    if not changed and "direct" in means:
        changed = choose_concatenations(captured, graph)
    return _with_pieces(captured, graph, means, costed, changed, runs_here=True)


def choose_faster(
    captured: Captured, graph: StepGraph, means: Collection[str], costed: Callable[[Captured], StepGraph]
) -> tuple[Pieces, ...]:
    """Which convolutions of a step to compute by direct kernels where everything fits: they may be faster.

    The direct ones only of `choose_pieces`: pieces only take less memory.
    """
    return choose_direct(captured, graph, costed) if "direct" in means else ()


def choose_elsewhere(
    captured: Captured, graph: StepGraph, means: Collection[str], costed: Callable[[Captured], StepGraph]
) -> tuple[Pieces, ...]:
    """`choose_pieces` for a GPU that is not here: concatenations, attentions, and gradients of norms and PReLUs.

    What a convolution's kernel takes there cannot be tried here; that pieces repeat the bits is tried when the plan is
    made there.
    """
    changed = choose_concatenations(captured, graph) if "direct" in means else ()
    return _with_pieces(captured, graph, means, costed, changed, runs_here=False)


def choose_direct(captured: Captured, graph: StepGraph, costed: Callable[[Captured], StepGraph]) -> tuple[Pieces, ...]:
    """Which convolutions of a step to compute by direct kernels, in the order of the step.

    Those that are no slower by it, and those whose scratch is near what sets the step's smallest peak and that are not
    slower by more than a quarter.

    Args:
        captured: the step, to be run on this machine.
        graph: the same with times and workspaces.
        costed: measures those.
    """
    able = [Pieces(name, direct=True) for name, node in captured.node_of.items() if can_be_native(node)]
    if not able or captured.largest_nodes:
        return ()
    direct = costed(with_technique(captured, "direct", [one.op for one in able]))
    theirs, ours = ({op.name: op for op in each.ops} for each in (graph, direct))
    held = {op.name: sum(graph.storages[one].nbytes for one in {*op.reads, *op.writes}) for op in graph.ops}
    stays_bytes = max(held.values())
    chosen = []
    for one in able:
        before, after = theirs[one.op], ours.get(one.op)
        if after is None:
            continue  # a gradient that falls into parts
        saved_bytes = before.workspace_bytes - after.workspace_bytes
        near = before.workspace_bytes + held[one.op] > _NEAR_WHAT_STAYS * stays_bytes
        faster = after.longer_seconds <= before.longer_seconds
        if faster or (near and saved_bytes > _WORTH_BYTES and after.longer_seconds <= _SLOWER * before.longer_seconds):
            chosen.append(one)
    return _with_concatenations(captured, able, chosen, theirs, ours)


def _with_concatenations(
    captured: Captured, able: Collection[Pieces], chosen: list[Pieces], theirs: Any, ours: Any
) -> tuple[Pieces, ...]:
    """With the other readers of concatenations that then need not be computed."""
    found = {one.op for one in chosen}
    names = {one.op for one in able}
    for node in captured.joint.graph.find_nodes(op="call_function", target=_aten.cat.default):
        readers = [user.name for user in node.users]
        if parts_of(node) is None or not all(name in names for name in readers):
            continue
        before, after = (sum(each[name].longer_seconds for name in readers if name in each) for each in (theirs, ours))
        if after <= _SLOWER * (before + theirs[node.name].longer_seconds):
            found.update(readers)
            found.update(name for name in _input_gradients_of(captured, node) if name in names)
    return tuple(one for one in able if one.op in found)


def _input_gradients_of(captured: Captured, node: fx.Node) -> list[str]:
    weights = {user.args[1] for user in node.users if user.target is _aten.convolution.default}
    gradients = captured.joint.graph.find_nodes(op="call_function", target=input_gradient)
    return [one.name for one in gradients if one.args[1] in weights]


def choose_concatenations(captured: Captured, graph: StepGraph) -> tuple[Pieces, ...]:
    """Which concatenations not to compute: those that are large, and near the most that any op holds.

    Args:
        captured: the step.
        graph: the same.
    """
    held = {op.name: sum(graph.storages[one].nbytes for one in {*op.reads, *op.writes}) for op in graph.ops}
    most_bytes = max(held.values(), default=0)
    cats = captured.joint.graph.find_nodes(op="call_function", target=_aten.cat.default)
    able = [node.name for node in cats if can_be_left_out(node)]
    near = [name for name in able if held.get(name, 0) > max(_WORTH_BYTES, _NEAR_OF_CONCATENATIONS * most_bytes)]
    return tuple(Pieces(name, parts=True) for name in near)


def _with_pieces(
    captured: Captured,
    graph: StepGraph,
    means: Collection[str],
    costed: Callable[[Captured], StepGraph],
    changed: tuple[Pieces, ...],
    *,
    runs_here: bool,
) -> tuple[Pieces, ...]:
    if "pieces" not in means:
        return changed
    changed = (*changed, *choose_attentions(captured, graph, means, runs_here=runs_here))
    if changed:
        captured = in_pieces(captured, changed)
        graph = costed(captured)
    return (*changed, *_cut_pieces(captured, graph, means, _cut if runs_here else _cut_elsewhere))


def _cut_pieces(
    captured: Captured,
    graph: StepGraph,
    means: Collection[str],
    cut_of: Callable[[Op, Captured, StepGraph], Cut | None],
) -> tuple[Pieces, ...]:
    needed_bytes = {op.name: _needed_bytes(op, graph) for op in graph.ops}
    found: dict[str, Pieces] = {}
    stays_bytes = 0
    for op in sorted(graph.ops, key=lambda op: needed_bytes[op.name], reverse=True):
        if needed_bytes[op.name] < _NEAR_WHAT_STAYS * stays_bytes:
            break
        cut = cut_of(op, captured, graph)
        if cut is not None and cut.reordered and "direct" not in means:
            cut = None
        if cut is not None:
            found[op.name] = Pieces(op.name, cut.dim, cut.count, reordered=cut.reordered)
        stays_bytes = max(stays_bytes, needed_bytes[op.name] - (cut.saved_bytes if cut is not None else 0))
    return tuple(found[op.name] for op in graph.ops if op.name in found)


def _cut(op: Op, captured: Captured, graph: StepGraph) -> Cut | None:
    node = captured.node_of.get(op.name)
    if node is not None and node.target in _OF_GRADIENTS:
        return _of_gradient(node, _OF_GRADIENTS[node.target].choose)
    result_bytes = sum(graph.storages[storage].nbytes for storage in op.writes)
    if (
        node is None
        or node.target not in convolution_pieces.IN_PIECES
        or op.workspace_bytes < max(result_bytes, WORTH_PIECES_BYTES)
    ):
        return None
    return convolution_pieces.choose(node.target, values_of(node))  # type: ignore[arg-type]


def _cut_elsewhere(op: Op, captured: Captured, graph: StepGraph) -> Cut | None:
    node = captured.node_of.get(op.name)
    if node is None or node.target not in _OF_GRADIENTS:
        return None
    return _of_gradient(node, _OF_GRADIENTS[node.target].cut_elsewhere)


def _of_gradient(node: fx.Node, cut_of: Callable[..., Cut | None]) -> Cut | None:
    if node.target is _OF_PRELU and slopes_gradient(node) is None:
        return None
    return cut_of(node.target, values_of(node))


def in_pieces(captured: Captured, chosen: Collection[Pieces]) -> Captured:
    """The step with these ops in pieces, by direct kernels or left out; `captured` stays as it is.

    Raises:
        PlanError: one of them is no op of this step that can be.
    """
    if not chosen:
        return captured
    rewritten = [one.op for one in chosen if one.direct or one.parts]
    if rewritten:
        captured = with_technique(captured, "direct", rewritten)
    softmaxes = {node.name for node in captured.joint.graph.find_nodes(op="call_function", target=SOFTMAX)}
    attended = [one for one in chosen if one.op in softmaxes]
    if attended:
        captured = attended_in_pieces(captured, attended)
    writer = StepWriter(captured)
    node_called = writer.called()
    for cut in chosen:
        if cut.direct or cut.parts or cut in attended:
            continue
        node = node_called.get(cut.op)
        if node is not None and node.target is _OF_PRELU and slopes_gradient(node) is not None:
            add_up_slopes(writer, node)
        if node is None or node.target not in _IN_PIECES:
            raise PlanError(f"the plan cuts {cut.op!r} into pieces, which cannot be here; plan this step again")
        node.meta["flops"] = flops(node)
        node.target, node.args = _IN_PIECES[node.target], (*node.args, cut.dim, cut.count)
    return writer.read()


def _needed_bytes(op: Op, graph: StepGraph) -> int:
    held = {*op.reads, *op.writes}
    return op.workspace_bytes + sum(graph.storages[storage].nbytes for storage in held)
