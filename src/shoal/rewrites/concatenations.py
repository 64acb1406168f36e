"""Concatenations: gradients of their parts added up as a whole, copied where they wait long; large ones left out.

- Each layer of a DenseNet reads all earlier ones side by side, and hands a gradient to each of them. Autograd cuts each
  concatenation's gradient into parts and adds these up one by one: a layer's 1,024 channels are 17 sums. What is added
  part by part is added here as a whole, in the same order, so that each element has the same bits: 535 sums and 597
  slices of DenseNet-121 are 60 and 122. A part that a kernel reads, rather than the next sum, is copied out dense (52).
- The part of a concatenation's gradient that waits long for its reader (a U-Net's skip) can wait as a copy of its own,
  so that it does not hold the whole gradient, at the cost of an op.
- A U-Net's skip and what was upsampled lie side by side in a tensor as large as both, and so do their gradients. A
  convolution of them is the sum of convolutions of each, by its channels of the weight; the gradients are of each by
  itself. They are ops of PyTorch, for any device. Native kernels read the parts themselves (`convolutions`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import args_of, held_bytes
from shoal.graph.joint import Joint
from shoal.graph.symbolic_sizes import usual
from shoal.kernels.convolution import input_gradient
from shoal.kernels.pieces import are_sizes_known

_aten = torch.ops.aten
_ADD, _SLICE, _CLONE = _aten.add.Tensor, _aten.slice.Tensor, _aten.clone.default
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_MOST_COPIED = 0.25  # of a sum's channels: as long as the sum is alive, those exist twice
_LONG_WAIT_NODES = 24
_PART_OF_WHOLE = 0.75
_CHANNELS = 1


@dataclass(frozen=True)
class _Part:
    """A sum of two slices: of which tensors, along which dimension, where in the first, and how far on in the other."""

    sum: fx.Node
    of: tuple[fx.Node, fx.Node]
    dim: int
    begin: int
    apart: int
    size: int


@dataclass(frozen=True)
class _WholeSum:
    """Neighbouring parts of the same two tensors: the first in the graph, all by place, the sum, and slices of it."""

    first: fx.Node
    parts: Sequence[_Part]
    operands: Sequence[torch.Tensor]
    value: torch.Tensor
    slices: Sequence[torch.Tensor]
    copied: Sequence[bool]


def sums_of_parts(joint: Joint) -> Iterator[_WholeSum]:
    """Sums of neighbouring parts of the same two tensors, unless much of them would be copied."""
    for node in joint.find(_ADD):
        part = _part(node) if node in joint.backward and node.users else None
        if part is not None and (group := _neighbours(part)) and (whole := _whole_sum(node, group)) is not None:
            yield whole


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
    """This part and its neighbours, sums of the same two tensors, by place; none if there are gaps, or no others."""
    found: dict[int, _Part] = {}
    for reader in [user for taken in part.of[0].users if taken.target is _SLICE for user in taken.users]:
        other = _part(reader) if reader.users else None
        if other is not None and (other.of, other.dim, other.apart) == (part.of, part.dim, part.apart):
            found.setdefault(other.begin, other)
    group = [found[begin] for begin in sorted(found)]
    in_a_row = all(one.begin + one.size == after.begin for one, after in pairwise(group))
    return group if in_a_row and len(group) > 1 else []


def _whole_sum(first: fx.Node, group: Sequence[_Part]) -> _WholeSum | None:
    dim, size = group[0].dim, sum(part.size for part in group)
    begins = (group[0].begin, group[0].begin + group[0].apart)
    operands = [whole.meta["val"].narrow(dim, begin, size) for whole, begin in zip(group[0].of, begins, strict=True)]
    value = operands[0] + operands[1]
    bounds = list(accumulate((part.size for part in group), initial=0))
    slices = [value.narrow(dim, begin, part.size) for begin, part in zip(bounds, group, strict=False)]
    copied = [not _may_be_slice(part.sum, view) for part, view in zip(group, slices, strict=True)]
    dense = [(part, view) for part, view, copies in zip(group, slices, copied, strict=True) if copies]
    if sum(part.size for part, _ in dense) > _MOST_COPIED * size:
        return None
    if any(view.clone().stride() != part.sum.meta["val"].stride() for part, view in dense):
        return None
    return _WholeSum(first, group, operands, value, slices, copied)


def _may_be_slice(node: fx.Node, view: torch.Tensor) -> bool:
    """Whether only further sums read this one, and are laid out alike if it is a slice."""
    for user in node.users:
        if user.target is not _ADD or len(user.args) != 2 or user.kwargs:
            return False
        values = [view if one is node else one.meta["val"] for one in user.args if isinstance(one, fx.Node)]
        if len(values) != 2 or (values[0] + values[1]).stride() != user.meta["val"].stride():
            return False
    return True


def add_whole(joint: Joint, site: _WholeSum) -> None:
    """Put one sum before the first of them."""
    first, group = site.first, site.parts
    dim, begin = group[0].dim, group[0].begin
    operands = []
    for whole, start, value in zip(group[0].of, (begin, begin + group[0].apart), site.operands, strict=True):
        if value.shape != whole.meta["val"].shape:
            whole = joint.call(first, _SLICE, (whole, dim, start, start + value.shape[dim]), value, first)
        operands.append(whole)
    total = joint.call(first, _ADD, tuple(operands), site.value, first)
    for part, view, copies in zip(group, site.slices, site.copied, strict=True):
        start = part.begin - begin
        taken = joint.call(first, _SLICE, (total, dim, start, start + part.size), view, part.sum)
        if copies:
            taken = joint.call(first, _CLONE, (taken,), part.sum.meta["val"], part.sum)
        part.sum.replace_all_uses_with(taken)
    for part in group:
        slices = part.sum.all_input_nodes
        joint.graph.erase_node(part.sum)
        joint.erase_unread(*slices)


def waiting_parts(joint: Joint) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Slices of gradients that wait long for a reader, while the others are read: each with the last of those."""
    order: dict[fx.Node, float] = {node: number for number, node in enumerate(joint.graph.nodes)}

    def last_reader(node: fx.Node) -> fx.Node:
        readers = [last_reader(user) if user.target is _SLICE else user for user in node.users]
        return max(readers, key=order.__getitem__)

    for node in [node for node in joint.graph.nodes if node in joint.backward]:  # in order: names are given in turn
        parts = [user for user in node.users if user.target is _SLICE and user.users]
        if len(parts) < 2 or len(parts) < len(node.users):
            continue
        *sooner, longest = sorted(parts, key=lambda part: order[last_reader(part)])
        done = last_reader(sooner[-1])
        first_read = min(order[user] for user in longest.users)
        part_bytes = usual(longest.meta["val"].numel()) * longest.meta["val"].element_size()
        whole_bytes = held_bytes(node.meta["val"])
        if first_read - order[done] < _LONG_WAIT_NODES or part_bytes > _PART_OF_WHOLE * whole_bytes:
            continue
        yield longest, done
        # A slice of a slice looks for its last reader among the new ones.
        order[done.next] = order[done.next.next] = order[done] + 0.5


def copy_part(joint: Joint, site: tuple[fx.Node, fx.Node]) -> None:
    """Copy the slice as soon as the others are read."""
    longest, done = site
    with joint.graph.inserting_after(done):
        view = joint.graph.node_copy(longest)
    copy = joint.call(view.next, _CLONE, (view,), longest.meta["val"].clone(), longest)
    joint.backward.update({view, copy})
    joint.replace(longest, copy)
    joint.backward.discard(longest)


def able(joint: Joint) -> Iterator[fx.Node]:
    """Concatenations that only convolutions and gradients of their weights read."""
    return (node for node in joint.find(_aten.cat.default) if can_be_left_out(node))


def can_be_left_out(node: fx.Node) -> bool:
    """Whether a concatenation is one of `able`."""
    value = node.meta["val"]
    parts, dim = list(args_of(node)[0]), (*args_of(node)[1:], 0)[0]
    if dim not in (_CHANNELS, _CHANNELS - value.dim()) or value.dim() not in (4, 5) or len(parts) < 2:
        return False
    tensors = [value, *(part.meta["val"] for part in parts)]
    if not are_sizes_known(*tensors) or any(tensor.dtype != value.dtype for tensor in tensors):
        return False
    return bool(node.users) and all(_can_be_summed(reader, node) for reader in node.users)


def _can_be_summed(reader: fx.Node, node: fx.Node) -> bool:
    arguments: Any = reader.args
    if sum(one is node for one in reader.all_input_nodes) != 1:
        return False
    if reader.target is _FORWARD:
        return arguments[0] is node and arguments[6] is False and arguments[8] == 1
    if reader.target is not _BACKWARD or arguments[1] is not node:
        return False
    transposed, groups, wanted = arguments[7], arguments[9], arguments[10]
    return transposed is False and groups == 1 and wanted[0] is False and wanted[1] is True


def leave_out(joint: Joint, node: fx.Node) -> None:
    """Compute the convolutions and gradients from the parts."""
    parts = list(args_of(node)[0])
    bounds = list(pairwise(accumulate((int(part.meta["val"].shape[_CHANNELS]) for part in parts), initial=0)))
    of_weight = {reader.args[1 if reader.target is _FORWARD else 2] for reader in node.users}
    for reader in list(node.users):
        if reader.target is _FORWARD:
            _sum_convolutions(joint, reader, parts, bounds)
        else:
            _join_weight_gradients(joint, reader, parts, bounds)
    for gradient in joint.find(input_gradient):
        if gradient.args[1] in of_weight:
            _give_parts(joint, gradient, bounds)
    joint.graph.erase_node(node)


def _sum_convolutions(joint: Joint, node: fx.Node, parts: list[fx.Node], bounds: list[tuple[int, int]]) -> None:
    _, weight, bias, *options = node.args
    value = node.meta["val"]
    total: fx.Node | None = None
    for part, (first, end) in zip(parts, bounds, strict=True):
        call = (part, _channels_of(joint, weight, first, end, node), bias if total is None else None, *options)
        one = joint.call(node, _FORWARD, call, value, node, f"{node.name}_of_{first}")
        if total is not None:
            one = joint.call(node, _ADD, (total, one), value, node, f"{node.name}_to_{end}")
        total = one
    assert total is not None
    joint.replace(node, total)


def _join_weight_gradients(joint: Joint, node: fx.Node, parts: list[fx.Node], bounds: list[tuple[int, int]]) -> None:
    grad, _, weight, bias_sizes, *options, wanted = args_of(node)
    _, of_weight_value, of_bias_value = node.meta["val"]
    items = {item.args[1]: item for item in node.users}
    found = []
    for part, (first, end) in zip(parts, bounds, strict=True):
        own_wanted = [False, True, bool(wanted[2]) and first == 0]
        own_weight = _channels_of(joint, weight, first, end, node)
        call = (grad, part, own_weight, bias_sizes if own_wanted[2] else None, *options, own_wanted)
        value = torch.empty_like(own_weight.meta["val"], memory_format=torch.contiguous_format)
        values = (None, value, of_bias_value if own_wanted[2] else None)
        one = joint.call(node, _BACKWARD, call, values, node, f"{node.name}_of_{first}")
        found.append(joint.call(node, operator.getitem, (one, 1), value, node, f"{node.name}_of_{first}_weight"))
        if own_wanted[2] and 2 in items:
            of_bias = joint.call(node, operator.getitem, (one, 2), of_bias_value, node, f"{node.name}_bias")
            items[2].replace_all_uses_with(of_bias)
    call = (found, _CHANNELS)
    joined = joint.call(node, _aten.cat.default, call, of_weight_value, node, f"{node.name}_joined")
    items[1].replace_all_uses_with(joined)
    for item in (*items.values(), node):
        joint.graph.erase_node(item)


def _give_parts(joint: Joint, node: fx.Node, bounds: list[tuple[int, int]]) -> None:
    """Compute a gradient of which only the parts are read by one op each."""
    slices = list(node.users)
    if not slices or not all(_bounds_of(one) in bounds for one in slices):
        return
    grad, weight, shape, _, *options = args_of(node)
    for one in slices:
        first, end = _bounds_of(one)
        value = torch.empty_like(one.meta["val"], memory_format=torch.contiguous_format)
        own_shape = [int(size) for size in value.shape]
        own_weight = _channels_of(joint, weight, first, end, one)
        call = (grad, own_weight, own_shape, list(value.stride()), *options)
        part = joint.call(one, input_gradient, call, value, one, f"{node.name}_of_{first}")
        part.meta["flops"] = node.meta["flops"] * (end - first) // int(shape[_CHANNELS])
        joint.stand_for_slice(one, part)
    joint.graph.erase_node(node)


def _bounds_of(node: fx.Node) -> tuple[int, int]:
    """The channels of a slice; (0, 0) of anything else."""
    arguments: Any = node.args
    if node.target is not _SLICE or len(arguments) != 4 or arguments[1] != _CHANNELS or node.kwargs:
        return 0, 0
    return int(arguments[2]), int(arguments[2]) + int(node.meta["val"].shape[_CHANNELS])


def _channels_of(joint: Joint, weight: Any, first: int, end: int, before: fx.Node) -> fx.Node:
    part = weight.meta["val"][:, first:end]
    return joint.call(before, _SLICE, (weight, _CHANNELS, first, end), part, weight)
