"""Sums of gradients of concatenations, one op for all parts.

Each layer of a DenseNet reads all earlier ones side by side, and hands a gradient to each of them. Autograd cuts each
concatenation's gradient into parts and adds these up one by one: a layer's 1,024 channels are 17 sums. What is added
part by part is added here as a whole, in the same order, so that each element has the same bits: 535 sums and 597
slices of DenseNet-121 are 60 and 122. A part that a kernel reads, rather than the next sum, is copied out dense (52).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import fx

from shoal.capture.fx_nodes import describe_as

_aten = torch.ops.aten
_ADD, _SLICE = _aten.add.Tensor, _aten.slice.Tensor
_MOST_COPIED = 0.25  # of a sum's channels: as long as the sum is alive, those exist twice


@dataclass(frozen=True)
class _Part:
    """A sum of two slices: of which tensors, along which dimension, where in the first, and how far on in the other."""

    sum: fx.Node
    of: tuple[fx.Node, fx.Node]
    dim: int
    begin: int
    apart: int
    size: int


def add_gradients_whole(graph: fx.Graph, backward: set[fx.Node]) -> None:
    """Put one sum in place of those of neighbouring parts of the same two tensors.

    Args:
        graph: the joint graph; edited.
        backward: its backward nodes; new ones are added.
    """
    for node in list(graph.find_nodes(op="call_function", target=_ADD, sort=True)):
        part = _part(node) if node in backward and node.users else None
        if part is not None:
            group = _neighbours(part)
            if len(group) > 1:
                _add_together(graph, node, group, backward)


def _part(node: fx.Node) -> _Part | None:
    if node.target is not _ADD or len(node.args) != 2 or node.kwargs:
        return None
    slices = node.args
    if not all(isinstance(one, fx.Node) and one.target is _SLICE and len(one.args) == 4 for one in slices):
        return None
    (first, dim, begin, _), (second, its_dim, its_begin, _) = (one.args for one in slices)  # type: ignore[union-attr]
    values = [one.meta["val"] for one in (node, *slices, first, second)]  # type: ignore[union-attr]
    numbers = (dim, its_dim, begin, its_begin, *(value.shape[dim] for value in values))
    if first is second or dim != its_dim or not all(type(one) is int and one >= 0 for one in numbers):
        return None
    if len({value.dtype for value in values}) > 1 or values[1].shape != values[2].shape:
        return None
    return _Part(node, (first, second), dim, begin, its_begin - begin, values[0].shape[dim])  # type: ignore[arg-type, operator]


def _neighbours(part: _Part) -> list[_Part]:
    """This part and its neighbours, sums of the same two tensors, in the order of their places."""
    found: dict[int, _Part] = {}
    for reader in [user for taken in part.of[0].users if taken.target is _SLICE for user in taken.users]:
        other = _part(reader) if reader.users else None
        if other is not None and (other.of, other.dim, other.apart) == (part.of, part.dim, part.apart):
            found.setdefault(other.begin, other)
    group = [found[begin] for begin in sorted(found)]
    in_a_row = all(one.begin + one.size == after.begin for one, after in pairwise(group))
    return group if in_a_row else []


def _add_together(graph: fx.Graph, first: fx.Node, group: Sequence[_Part], backward: set[fx.Node]) -> None:
    """Put their one sum before the first of them, unless much of it would be copied."""
    dim, size = group[0].dim, sum(part.size for part in group)
    begins = (group[0].begin, group[0].begin + group[0].apart)
    values = [whole.meta["val"].narrow(dim, begin, size) for whole, begin in zip(group[0].of, begins, strict=True)]
    total_value = values[0] + values[1]
    bounds = list(accumulate((part.size for part in group), initial=0))
    views = [total_value.narrow(dim, begin, part.size) for begin, part in zip(bounds, group, strict=False)]
    is_copied = [not _may_be_slice(part.sum, view) for part, view in zip(group, views, strict=True)]
    copied = [(part, view) for part, view, copies in zip(group, views, is_copied, strict=True) if copies]
    if sum(part.size for part, _ in copied) > _MOST_COPIED * size:
        return
    if any(view.clone().stride() != part.sum.meta["val"].stride() for part, view in copied):
        return
    with graph.inserting_before(first):
        operands = []
        for whole, begin, value in zip(group[0].of, begins, values, strict=True):
            if value.shape != whole.meta["val"].shape:
                whole = graph.call_function(_SLICE, (whole, dim, begin, begin + size))
                describe_as(whole, value, first)
                backward.add(whole)
            operands.append(whole)
        total = graph.call_function(_ADD, tuple(operands))
        describe_as(total, total_value, first)
        backward.add(total)
        for part, begin, view, copies in zip(group, bounds, views, is_copied, strict=False):
            taken = graph.call_function(_SLICE, (total, dim, begin, begin + part.size))
            describe_as(taken, view, part.sum)
            backward.add(taken)
            if copies:
                taken = graph.call_function(_aten.clone.default, (taken,))
                describe_as(taken, part.sum.meta["val"], part.sum)
                backward.add(taken)
            part.sum.replace_all_uses_with(taken)
    for part in group:
        slices = part.sum.all_input_nodes
        graph.erase_node(part.sum)
        for one in slices:
            if not one.users:
                graph.erase_node(one)


def _may_be_slice(node: fx.Node, view: torch.Tensor) -> bool:
    """Whether only further sums read this one, and are laid out alike where it is a slice."""
    for user in node.users:
        if user.target is not _ADD or len(user.args) != 2 or user.kwargs:
            return False
        values = [view if one is node else one.meta["val"] for one in user.args if isinstance(one, fx.Node)]
        if len(values) != 2 or (values[0] + values[1]).stride() != user.meta["val"].stride():
            return False
    return True
