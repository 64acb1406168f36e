"""A captured step without concatenations that only convolutions read: each is a sum over what was concatenated.

A U-Net's skip and what was upsampled lie side by side in a tensor as large as both, and so do their gradients. A
convolution of them is the sum of convolutions of each, by its channels of the weight; the gradients are of each by
itself. They are ops of PyTorch, for any device. Where the direct kernels run, these read the parts (`capture.direct`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.fx_nodes import stand_for_slice
from shoal.capture.step_writer import StepWriter
from shoal.core.step import StepGraph
from shoal.core.variant import Pieces
from shoal.errors import PlanError
from shoal.kernels.convolution import input_gradient
from shoal.kernels.pieces import are_sizes_known

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_WORTH_BYTES = 4 << 20
_NEAR_WHAT_STAYS = 0.2  # what else is held while another op runs differs by much
_CHANNELS = 1


def choose_concatenations(captured: Captured, graph: StepGraph) -> tuple[Pieces, ...]:
    """Which concatenations not to compute: those that are large, and near the most that any op holds.

    Args:
        captured: the step.
        graph: the same.
    """
    held = {op.name: sum(graph.storages[one].nbytes for one in {*op.reads, *op.writes}) for op in graph.ops}
    most_bytes = max(held.values(), default=0)
    able = [
        node.name
        for node in captured.joint.graph.find_nodes(op="call_function", target=_aten.cat.default)
        if _readers(node) is not None
    ]
    near = [name for name in able if held.get(name, 0) > max(_WORTH_BYTES, _NEAR_WHAT_STAYS * most_bytes)]
    return tuple(Pieces(name, parts=True) for name in near)


def without_concatenations(captured: Captured, chosen: Collection[Pieces]) -> Captured:
    """The step without these; `captured` stays as it is.

    Raises:
        PlanError: one of them is no such concatenation of this step.
    """
    writer = StepWriter(captured)
    node_called = writer.called()
    for one in chosen:
        node = node_called.get(one.op)
        if node is None or node.target is not _aten.cat.default or _readers(node) is None:
            raise PlanError(f"the plan leaves out the concatenation {one.op!r}, which is not here; plan it again")
        _leave_out(writer, node)
    return writer.read()


def _readers(node: fx.Node) -> list[fx.Node] | None:
    """The convolutions and gradients of weights that read a concatenation, where nothing else does."""
    arguments: Any = node.args
    value = node.meta["val"]
    parts, dim = list(arguments[0]), arguments[1] if len(arguments) > 1 else 0
    if dim not in (_CHANNELS, _CHANNELS - value.dim()) or value.dim() not in (4, 5) or len(parts) < 2:
        return None
    tensors = [value, *(part.meta["val"] for part in parts)]
    if not are_sizes_known(*tensors) or any(tensor.dtype != value.dtype for tensor in tensors):
        return None
    readers = list(node.users)
    return readers if readers and all(_can_be_summed(reader, node) for reader in readers) else None


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


def _leave_out(writer: StepWriter, node: fx.Node) -> None:
    arguments: Any = node.args
    parts = list(arguments[0])
    bounds = list(pairwise(accumulate((int(part.meta["val"].shape[_CHANNELS]) for part in parts), initial=0)))
    of_weight = {reader.args[1 if reader.target is _FORWARD else 2] for reader in node.users}
    for reader in list(node.users):
        if reader.target is _FORWARD:
            _sum_convolutions(writer, reader, parts, bounds)
        else:
            _join_weight_gradients(writer, reader, parts, bounds)
    for gradient in list(writer.graph.find_nodes(op="call_function", target=input_gradient)):
        if gradient.args[1] in of_weight:
            _give_parts(writer, gradient, bounds)
    writer.graph.erase_node(node)


def _sum_convolutions(writer: StepWriter, node: fx.Node, parts: list[fx.Node], bounds: list[tuple[int, int]]) -> None:
    _, weight, bias, *options = node.args
    value = node.meta["val"]
    total: fx.Node | None = None
    for part, (first, end) in zip(parts, bounds, strict=True):
        call = (part, _channels_of(writer, weight, first, end, node), bias if total is None else None, *options)
        one = writer.call(node, _FORWARD, call, value, node, f"{node.name}_of_{first}")
        if total is not None:
            one = writer.call(node, _aten.add.Tensor, (total, one), value, node, f"{node.name}_to_{end}")
        total = one
    assert total is not None
    writer.replace(node, total)


def _join_weight_gradients(
    writer: StepWriter, node: fx.Node, parts: list[fx.Node], bounds: list[tuple[int, int]]
) -> None:
    grad, _, weight, bias_sizes, *options, wanted = node.args
    _, of_weight_value, of_bias_value = node.meta["val"]
    items = {item.args[1]: item for item in node.users}
    found = []
    for part, (first, end) in zip(parts, bounds, strict=True):
        own_wanted = [False, True, bool(wanted[2]) and first == 0]  # type: ignore[index]
        own_weight = _channels_of(writer, weight, first, end, node)
        call = (grad, part, own_weight, bias_sizes if own_wanted[2] else None, *options, own_wanted)
        value = torch.empty_like(own_weight.meta["val"], memory_format=torch.contiguous_format)
        values = (None, value, of_bias_value if own_wanted[2] else None)
        one = writer.call(node, _BACKWARD, call, values, node, f"{node.name}_of_{first}")
        found.append(writer.call(node, operator.getitem, (one, 1), value, node, f"{node.name}_of_{first}_weight"))
        if own_wanted[2] and 2 in items:
            of_bias = writer.call(node, operator.getitem, (one, 2), of_bias_value, node, f"{node.name}_bias")
            items[2].replace_all_uses_with(of_bias)
    call = (found, _CHANNELS)
    joined = writer.call(node, _aten.cat.default, call, of_weight_value, node, f"{node.name}_joined")
    items[1].replace_all_uses_with(joined)
    for item in items.values():
        writer.graph.erase_node(item)
    writer.graph.erase_node(node)


def _give_parts(writer: StepWriter, node: fx.Node, bounds: list[tuple[int, int]]) -> None:
    """A gradient of which only the parts are read, as one op each."""
    slices = list(node.users)
    if not slices or not all(_bounds_of(one) in bounds for one in slices):
        return
    grad, weight, shape, _, *options = node.args
    for one in slices:
        first, end = _bounds_of(one)
        value = torch.empty_like(one.meta["val"], memory_format=torch.contiguous_format)
        own_shape = [int(size) for size in value.shape]
        own_weight = _channels_of(writer, weight, first, end, one)
        call = (grad, own_weight, own_shape, list(value.stride()), *options)
        part = writer.call(one, input_gradient, call, value, one, f"{node.name}_of_{first}")
        part.meta["flops"] = node.meta["flops"] * (end - first) // int(shape[_CHANNELS])  # type: ignore[index, arg-type]
        stand_for_slice(writer.graph, one, part)
    writer.graph.erase_node(node)


def _bounds_of(node: fx.Node) -> tuple[int, int]:
    """The channels of a slice; (0, 0) of anything else."""
    arguments: Any = node.args
    if node.target is not _aten.slice.Tensor or len(arguments) != 4 or arguments[1] != _CHANNELS or node.kwargs:
        return 0, 0
    return int(arguments[2]), int(arguments[2]) + int(node.meta["val"].shape[_CHANNELS])


def _channels_of(writer: StepWriter, weight: Any, first: int, end: int, before: fx.Node) -> fx.Node:
    part = weight.meta["val"][:, first:end]
    return writer.call(before, _aten.slice.Tensor, (weight, _CHANNELS, first, end), part, weight)
