"""A captured step with convolutions by direct kernels, which need no scratch and may be faster than the library's.

A concatenation along the channels that only such convolutions read is not computed: they read its parts, and the
gradient of each part is a convolution of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.fx_nodes import stand_for_slice
from shoal.capture.op_counts import flops
from shoal.capture.step_writer import StepWriter
from shoal.core.step import StepGraph
from shoal.core.variant import Pieces
from shoal.kernels import direct_convolution
from shoal.kernels.convolution import input_gradient
from shoal.kernels.pieces import are_sizes_known

_aten = torch.ops.aten
_TENSORS = 3  # the first arguments of a convolution and of its gradients
_WORTH_BYTES = 4 << 20  # of scratch
_SLOWER = 1.25  # by how much a kernel that needs less scratch may be slower where that sets the peak
_NEAR_WHAT_STAYS = 0.5
_CHANNELS = 1

_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
DIRECT: Mapping[Any, Callable[..., Any]] = {
    _FORWARD: direct_convolution.forward,
    input_gradient: direct_convolution.input_gradient,
    _BACKWARD: direct_convolution.weight_gradient,
}
"""What computes each without scratch."""


def choose_direct(captured: Captured, graph: StepGraph, costed: Callable[[Captured], StepGraph]) -> tuple[Pieces, ...]:
    """Which convolutions of a step to compute by direct kernels, in the order of the step.

    Those that are no slower by it, and those whose scratch is near what sets the step's smallest peak and that are not
    slower by more than a quarter.

    Args:
        captured: the step, to be run on this machine.
        graph: the same with times and workspaces.
        costed: measures those.
    """
    able = [Pieces(name, direct=True) for name, node in captured.node_of.items() if _can_be(node)]
    if not able or captured.largest_nodes:
        return ()
    direct = costed(computed_directly(captured, able))
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
        if _parts_of(node) is None or not all(name in names for name in readers):
            continue
        before, after = (sum(each[name].longer_seconds for name in readers if name in each) for each in (theirs, ours))
        if after <= _SLOWER * (before + theirs[node.name].longer_seconds):
            found.update(readers)
            found.update(name for name in _input_gradients_of(captured, node) if name in names)
    return tuple(one for one in able if one.op in found)


def _input_gradients_of(captured: Captured, node: fx.Node) -> list[str]:
    weights = {user.args[1] for user in node.users if user.target is _FORWARD}
    gradients = captured.joint.graph.find_nodes(op="call_function", target=input_gradient)
    return [one.name for one in gradients if one.args[1] in weights]


def computed_directly(captured: Captured, chosen: Collection[Pieces]) -> Captured:
    """The step with these convolutions by direct kernels; `captured` stays as it is."""
    writer = StepWriter(captured)
    graph, node_called = writer.graph, writer.called()
    for one in chosen:
        node = node_called[one.op]
        node.meta["flops"] = flops(node)
        arguments: tuple[Any, ...] = node.args
        if node.target is input_gradient:
            arguments = (*arguments[:3], *arguments[4:])  # without the strides
        elif node.target is _BACKWARD:
            arguments = (*arguments, list(node.meta["val"][1].stride()))
        node.target, node.args = DIRECT[node.target], arguments
    for node in list(graph.find_nodes(op="call_function", target=_aten.cat.default)):
        _read_parts(graph, node)
    gradients = graph.find_nodes(op="call_function", target=direct_convolution.input_gradient)
    for node in reversed(list(gradients)):
        _give_parts(writer, node)
    return writer.read()


def _can_be(node: fx.Node) -> bool:
    """Whether a direct kernel can compute a node, with a result of the same layout."""
    if node.target not in DIRECT:
        return False
    arguments: Any = fx.node.map_arg(node.args, lambda operand: operand.meta["val"])
    result = node.meta["val"]
    tensors = [one for one in arguments[:_TENSORS] if isinstance(one, torch.Tensor)]
    if node.target is _BACKWARD:
        wanted, groups = arguments[10], arguments[9]
        if wanted[0] or not wanted[1] or not _is_plain(arguments[2]):
            return False
    else:
        groups = arguments[8 if node.target is _FORWARD else 9]
        if not _is_plain(result):
            return False
    return bool(groups == 1 and are_sizes_known(*tensors) and direct_convolution.applies(*tensors))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 5 and tensor.is_contiguous()


def _parts_of(node: fx.Node) -> list[fx.Node] | None:
    """The tensors that a node puts side by side along the channels, each once."""
    arguments: Any = node.args
    dim = arguments[1] if len(arguments) > 1 else 0
    parts = list(arguments[0])
    alone = len(set(parts)) == len(parts) and all(isinstance(part, fx.Node) for part in parts)
    same = alone and all(part.meta["val"].dim() == 5 for part in parts)
    return parts if same and dim in (_CHANNELS, -4) and 0 not in [part.meta["val"].shape[1] for part in parts] else None


def _read_parts(graph: fx.Graph, node: fx.Node) -> None:
    parts = _parts_of(node)
    if parts is None or not all(user.target in DIRECT.values() for user in node.users):
        return
    for user in list(node.users):
        arguments: Any = user.args
        place = 1 if user.target is direct_convolution.weight_gradient else 0
        if arguments[place] is not node or sum(one is node for one in user.all_input_nodes) != 1:
            return
        user.args = tuple(parts if at == place else one for at, one in enumerate(arguments))
    graph.erase_node(node)


def _give_parts(writer: StepWriter, node: fx.Node) -> None:
    """A gradient of which only slices along the channels are read, as one op each."""
    slices = list(node.users)
    if not slices or not all(_is_of_channels(one) for one in slices):
        return
    arguments: Any = node.args
    shape, *options = arguments[2:]
    for one in slices:
        first = one.args[2]
        own_shape = [*shape]
        own_shape[1] = int(one.meta["val"].shape[1])
        call = (*arguments[:2], own_shape, *options, first)
        value = torch.empty_like(one.meta["val"], memory_format=torch.contiguous_format)
        part = writer.call(one, direct_convolution.input_gradient, call, value, one, f"{node.name}_of_{first}")
        part.meta["flops"] = node.meta["flops"] * own_shape[1] // int(shape[1])
        stand_for_slice(writer.graph, one, part)
    writer.graph.erase_node(node)


def _is_of_channels(node: fx.Node) -> bool:
    if node.target is not _aten.slice.Tensor or len(node.args) < 4 or len(node.args) > 4:
        return False
    dim, first = node.args[1:3]
    return bool(dim == _CHANNELS and isinstance(first, int) and not node.kwargs)
