"""A captured step with attention in pieces, where its scores are large: window attention, as Swin writes it out.

Scores are a product of queries and keys, with biases; their softmax weights values. All that lies in between, in both
passes, becomes two ops that compute some windows at a time (`kernels.attention_pieces`). Weights are saved no more: the
backward pass computes them again from queries and keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.step_writer import StepWriter
from shoal.core.step import StepGraph
from shoal.core.variant import Pieces
from shoal.errors import PlanError
from shoal.graph.fx_nodes import args_of, is_view
from shoal.graph.op_counts import flops, moved_bytes
from shoal.kernels import attention_pieces
from shoal.kernels.attention_pieces import AttentionLayout
from shoal.kernels.pieces import Cut, are_sizes_known

_aten = torch.ops.aten
SOFTMAX = _aten._softmax.default
_BACKWARD = _aten._softmax_backward_data.default
_BMM = _aten.bmm.default
_TRANSPOSED = ((1, 2), (2, 1), (-1, -2), (-2, -1))
_NEAR_WHAT_STAYS = 0.5
_HELD = 2  # tensors as large as the scores while the softmax's gradient is computed over the incoming one
Choice = Callable[..., Cut | None]


@dataclass
class _Attention:
    """One of a joint graph, by its nodes.

    Attributes:
        softmax: of the scores.
        q, k, v, grad: what goes in; `grad`, of the result.
        biases: what is added to the scores, in that order.
        out, of_q, of_k, of_v, sums: what comes out: the result, gradients, sums of the scores' gradient.
        layout: as the kernels take it.
        wanted: shapes of the sums.
        inside: what lies in between.
    """

    softmax: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    grad: fx.Node
    biases: list[fx.Node]
    out: fx.Node
    of_q: fx.Node
    of_k: fx.Node
    of_v: fx.Node
    sums: list[fx.Node]
    layout: AttentionLayout
    wanted: list[tuple[int, ...]]
    inside: set[fx.Node] = field(default_factory=set)

    @property
    def made(self) -> list[fx.Node]:
        return [self.out, self.of_q, self.of_k, self.of_v, *self.sums]

    def cut(self, choice: Choice) -> Cut | None:
        q, k, v, *biases = (node.meta["val"] for node in (self.q, self.k, self.v, *self.biases))
        return choice(q, k, v, biases, self.layout, bool(self.sums))


def choose_attentions(
    captured: Captured, graph: StepGraph, means: Collection[str], *, runs_here: bool
) -> tuple[Pieces, ...]:
    """Which attentions to compute in pieces: those whose scores are near the most that other ops hold.

    Args:
        captured: the step.
        graph: the same, with workspaces.
        means: what may be used: "pieces", and "direct" where sums may be in another order.
        runs_here: whether it is for this machine, so that pieces can be tried.
    """
    choice = attention_pieces.choose if runs_here else attention_pieces.cut_elsewhere
    found = {node.name: one for node in _softmaxes(captured.joint.graph) if (one := _attention(node)) is not None}
    theirs = {node.name for one in found.values() for node in (*one.inside, *one.made)}
    others_bytes = max((_held_bytes(op.name, graph) for op in graph.ops if op.name not in theirs), default=0)
    chosen = []
    for name, one in found.items():
        if _HELD * one.softmax.meta["val"].nbytes < _NEAR_WHAT_STAYS * others_bytes:
            continue
        cut = one.cut(choice)
        if cut is not None and (not cut.reordered or "direct" in means):
            chosen.append(Pieces(name, cut.dim, cut.count, reordered=cut.reordered))
    return tuple(chosen)


def attended_in_pieces(captured: Captured, chosen: Collection[Pieces]) -> Captured:
    """The step with these attentions in pieces; `captured` stays as it is.

    Raises:
        PlanError: one of them is no attention of this step.
    """
    writer = StepWriter(captured)
    node_called = {node.name: node for node in _softmaxes(writer.graph)}
    for one in chosen:
        node = node_called.get(one.op)
        found = _attention(node) if node is not None else None
        if found is None:
            raise PlanError(
                f"the plan cuts the attention {one.op!r} into pieces, which is not here; plan this step again"
            )
        _put_pieces(writer, found, one.count)
    return writer.read()


def _softmaxes(graph: fx.Graph) -> Sequence[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=SOFTMAX))


def _held_bytes(name: str, graph: StepGraph) -> int:
    op = graph.op_called[name]
    return op.workspace_bytes + sum(graph.storages[one].nbytes for one in {*op.reads, *op.writes})


def _attention(softmax: fx.Node) -> _Attention | None:
    """What a softmax is part of; None where that is no attention, or somebody else reads something of it."""
    scores, dim, half_to_float = args_of(softmax)
    value = softmax.meta["val"]
    if not are_sizes_known(value) or not value.is_contiguous() or half_to_float:
        return None
    if dim not in (-1, value.dim() - 1):
        return None
    upward = _scores_from(scores)
    backward = [user for user in softmax.users if user.target is _BACKWARD and user.args[1] is softmax]
    if upward is None or len(backward) != 1:
        return None
    product, added, casts, inside = upward
    (of_softmax,) = backward
    groups = _groups(product.meta["val"], [value, *(node.meta["val"] for node, _ in added)])
    weighing, passed = _readers(softmax, without=of_softmax)
    weights = _cast_of(passed)
    out = next((node for node in weighing if node.target is _BMM and _is_as_made(node.args[0], passed)), None)
    grads = _incoming(of_softmax)
    if groups is None or out is None or grads is None or weights is False:
        return None
    of_weights, between = grads
    (q, k), v, (grad, turned_v) = args_of(product), args_of(out)[1], args_of(of_weights)
    of_v = next((node for node in weighing if node.target is _BMM and _is_transposed(node.args[0], passed)), None)
    reading, scored = _readers(of_softmax)
    of_k = next((one for one in reading if one.target is _BMM and _is_as_made(one.args[1], scored)), None)
    of_q = next((one for one in reading if one.target is _BMM and _is_as_made(one.args[0], scored)), None)
    sums = [one for one in reading if one.target is _aten.sum.dim_IntList]
    if any(args_of(one)[0].meta["val"].dtype != of_softmax.meta["val"].dtype for one in sums):
        return None
    if of_v is None or of_k is None or of_q is None or args_of(of_v)[1] is not grad:
        return None
    turned = {turned_v: v, args_of(of_k)[0]: q, args_of(of_q)[1]: k}
    if not all(_is_transposed(side, {of}) for side, of in turned.items()):
        return None
    shapes = [_in_windows(bias.meta["val"].shape, node.meta["val"].dim(), groups) for node, bias in added]
    wanted = [_sum_shape(one, groups) for one in sums]
    if any(shape is None for shape in (*shapes, *wanted)):
        return None
    found = _Attention(
        softmax, q, k, v, grad, [bias for _, bias in added], out, of_q, of_k, of_v, sums,
        AttentionLayout(*groups, tuple(shapes), tuple(casts), weights or None), wanted,  # type: ignore[arg-type]
    )  # fmt: skip
    alone = [side for side in turned if len(side.users) == 1]
    found.inside = {*inside, *passed, *between, *scored, *alone}
    readers = {user for node in found.inside for user in node.users}
    known = all(user in found.inside or user in found.made for user in readers)
    return found if known and readers >= set(found.made) - {found.out} else None


def _scores_from(scores: fx.Node) -> tuple[fx.Node, list[tuple[fx.Node, fx.Node]], list[Any], set[fx.Node]] | None:
    """Of the scores the product, each addition with its bias, dtypes to which they are converted, all nodes."""
    node, added, inside = scores, list[tuple[fx.Node, fx.Node]](), set[fx.Node]()
    casts: list[Any] = [None]
    while len(node.users) == 1:
        inside.add(node)
        arguments = args_of(node)
        if node.target is _BMM:
            return node, added[::-1], casts[::-1], inside
        if node.target is _aten.add.Tensor and not node.kwargs and isinstance(arguments[1], fx.Node):
            place = next((n for n in (0, 1) if _leads_to_product(arguments[n], node)), None)
            if place is None:
                return None
            added.append((node, arguments[1 - place]))
            casts.append(None)
            node = arguments[place]
        elif _only_looks(node):
            node = arguments[0]
        elif _is_cast(node) and casts[-1] is None:
            casts[-1] = node.kwargs["dtype"]
            node = arguments[0]
        else:
            return None
    return None


def _leads_to_product(node: fx.Node, result: fx.Node) -> bool:
    if node.meta["val"].numel() != result.meta["val"].numel():
        return False
    while len(node.users) == 1 and node.target is not _BMM:
        if not (_only_looks(node) or _is_cast(node) or node.target is _aten.add.Tensor):
            return False
        node = args_of(node)[0]
    return node.target is _BMM


def _readers(node: fx.Node, without: fx.Node | None = None) -> tuple[list[fx.Node], set[fx.Node]]:
    """Who reads what a node makes, through views and casts; and these, the node too."""
    passed, found, left = {node}, list[fx.Node](), [node]
    while left:
        for user in left.pop().users:
            if user is without or user in passed or user in found:
                continue
            if _only_looks(user) or _is_cast(user) or user.target is _aten.transpose.int:
                passed.add(user)
                left.append(user)
            else:
                found.append(user)
    return found, passed


def _incoming(of_softmax: fx.Node) -> tuple[fx.Node, set[fx.Node]] | None:
    """The product that is a softmax's incoming gradient, and what lies between."""
    arguments = args_of(of_softmax)
    node, between = arguments[0], set[fx.Node]()
    while len(node.users) == 1:
        between.add(node)
        if node.target is _BMM:
            return node, between
        if not _only_looks(node) and not _is_cast(node):
            return None
        node = node.args[0]
    return None


def _only_looks(node: fx.Node) -> bool:
    """Whether a node is a dense view of all its operand, in the same order."""
    if not is_view(node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    arguments = args_of(node)
    value, operand = node.meta["val"], arguments[0].meta["val"]
    return bool(value.numel() == operand.numel() and value.is_contiguous() and operand.is_contiguous())


def _is_cast(node: fx.Node) -> bool:
    """Whether a node only converts to another dtype; the backward pass names layout and device besides."""
    if node.target is not _aten._to_copy.default or not {"dtype"} <= node.kwargs.keys() <= {
        "dtype",
        "layout",
        "device",
    }:
        return False
    value, operand = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(value.device == operand.device and value.is_contiguous() and operand.is_contiguous())


def _cast_of(passed: Collection[fx.Node]) -> Any:
    """To which dtype weights are converted; None for not at all, False where to several."""
    dtypes = {node.kwargs["dtype"] for node in passed if _is_cast(node)}
    return False if len(dtypes) > 1 else next(iter(dtypes), None)


def _is_transposed(node: Any, of: Collection[Any]) -> bool:
    if not isinstance(node, fx.Node) or node.target is not _aten.transpose.int:
        return False
    return node.args[1:] in _TRANSPOSED and node.args[0] in of


def _is_as_made(node: Any, passed: Collection[Any]) -> bool:
    return node in passed and node.target is not _aten.transpose.int


def _groups(product: torch.Tensor, values: Sequence[torch.Tensor]) -> tuple[int, int, int] | None:
    """Images, windows and heads, of which the batch of the product is made."""
    shape = max((value.shape for value in values), key=len)
    lead = [int(size) for size in shape[:-2]]
    batch = int(product.shape[0])
    groups = {1: (1, batch, 1), 2: (1, *lead), 3: tuple(lead)}.get(len(lead))
    return groups if groups is not None and prod(groups) == batch else None  # type: ignore[return-value]


def _in_windows(shape: Sequence[int], dims: int, groups: tuple[int, int, int]) -> tuple[int, ...] | None:
    """The shape of what is added to scores of that many dimensions, as (images, windows, heads, queries, keys)."""
    images, windows, heads = groups
    sizes = [1] * (dims - len(shape)) + [int(size) for size in shape]
    if len(sizes) == 3:
        of_all = {1: [1, 1, 1], images * windows * heads: [*groups]}.get(sizes[0])
        sizes = [*of_all, *sizes[1:]] if of_all else []
    elif len(sizes) == 4:
        of_all = {1: [1, 1], images * windows: [images, windows]}.get(sizes[0])
        sizes = [*of_all, *sizes[1:]] if of_all else []
    fits = len(sizes) == 5 and all(size in (1, whole) for size, whole in zip(sizes, groups, strict=False))
    return tuple(sizes) if fits else None


def _sum_shape(node: fx.Node, groups: tuple[int, int, int]) -> tuple[int, ...] | None:
    """What a sum of the scores' gradient leaves, as `_in_windows`."""
    arguments = args_of(node)
    value = arguments[0].meta["val"]
    if node.kwargs or value.dtype != node.meta["val"].dtype:
        return None
    summed = {axis % value.dim() for axis in arguments[1]}
    kept = [1 if axis in summed else int(size) for axis, size in enumerate(value.shape)]
    return _in_windows(kept, value.dim(), groups)


def _put_pieces(writer: StepWriter, found: _Attention, pieces: int) -> None:
    order = {node: place for place, node in enumerate(writer.graph.nodes)}
    name, layout = found.softmax.name, tuple(found.layout)
    operands = (found.q, found.k, found.v, found.biases, layout)
    ran_back = [node for node in (*found.inside, *found.made) if node in writer.backward and not is_view(node)]
    again = [node for node in found.inside if node not in writer.backward and not is_view(node)]
    q, k, *biases = (node.meta["val"] for node in (found.q, found.k, *found.biases))
    scratch = attention_pieces.scratch_bytes(q, k, biases, found.layout, pieces)
    forward = (*operands, pieces)
    made = writer.call(
        found.out, attention_pieces.forward, forward, found.out.meta["val"], found.out, f"{name}_attention"
    )
    _count(made, [*again, found.out], scratch)
    first = min(ran_back, key=order.__getitem__)
    sources = [found.of_q, found.of_k, found.of_v, *found.sums]
    values = [torch.empty_like(one.meta["val"], memory_format=torch.contiguous_format) for one in sources[:3]]
    values += [one.meta["val"].new_empty(shape) for one, shape in zip(found.sums, found.wanted, strict=True)]
    call = (found.grad, *operands, found.wanted, pieces)
    back = f"{name}_attention_backward"
    grads = writer.call(first, attention_pieces.backward, call, tuple(values), found.of_v, back)
    _count(grads, [*again, *ran_back], scratch)
    for place, (source, value) in enumerate(zip(sources, values, strict=True)):
        item = writer.call(first, operator.getitem, (grads, place), value, source, f"{back}_{place}")
        if source in found.sums:
            shape = [int(size) for size in source.meta["val"].shape]
            item = writer.call(first, _aten.view.default, (item, shape), value.view(shape), source)
        source.replace_all_uses_with(item)
    found.out.replace_all_uses_with(made)
    for node in sorted({*found.inside, *found.made}, key=order.__getitem__, reverse=True):
        writer.graph.erase_node(node)


def _count(node: fx.Node, instead_of: Collection[fx.Node], scratch: int) -> None:
    node.meta["flops"] = sum(map(flops, instead_of))
    node.meta["moved_bytes"] = sum(map(moved_bytes, instead_of))
    node.meta["workspace_bytes"] = scratch
