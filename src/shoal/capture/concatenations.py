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
from shoal.capture.fx_nodes import copied_joint, describe_as, stand_for_slice
from shoal.capture.step_reader import read_joint
from shoal.core.step import StepGraph
from shoal.core.variant import Pieces
from shoal.errors import PlanError
from shoal.kernels.convolution import input_gradient

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
    joint = copied_joint(captured.joint)
    backward = set(captured.backward_names)
    node_called = {node.name: node for node in joint.graph.nodes}
    for one in chosen:
        node = node_called.get(one.op)
        if node is None or node.target is not _aten.cat.default or _readers(node) is None:
            raise PlanError(f"the plan leaves out the concatenation {one.op!r}, which is not here; plan it again")
        _leave_out(joint.graph, node, backward)
    joint.graph.lint()
    return read_joint(joint, backward, captured.read_with)


def _readers(node: fx.Node) -> list[fx.Node] | None:
    """The convolutions and gradients of weights that read a concatenation, where nothing else does."""
    arguments: Any = node.args
    value = node.meta["val"]
    parts, dim = list(arguments[0]), arguments[1] if len(arguments) > 1 else 0
    if dim not in (_CHANNELS, _CHANNELS - value.dim()) or value.dim() not in (4, 5) or len(parts) < 2:
        return None
    tensors = [value, *(part.meta["val"] for part in parts)]
    sizes = [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]
    if not all(type(size) is int for size in sizes) or any(tensor.dtype != value.dtype for tensor in tensors):
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


def _leave_out(graph: fx.Graph, node: fx.Node, backward: set[str]) -> None:
    arguments: Any = node.args
    parts = list(arguments[0])
    bounds = list(pairwise(accumulate((int(part.meta["val"].shape[_CHANNELS]) for part in parts), initial=0)))
    of_weight = {reader.args[1 if reader.target is _FORWARD else 2] for reader in node.users}
    for reader in list(node.users):
        if reader.target is _FORWARD:
            _sum_convolutions(graph, reader, parts, bounds)
        else:
            _join_weight_gradients(graph, reader, parts, bounds, backward)
    for gradient in list(graph.find_nodes(op="call_function", target=input_gradient)):
        if gradient.args[1] in of_weight:
            _give_parts(graph, gradient, bounds, backward)
    graph.erase_node(node)


def _sum_convolutions(graph: fx.Graph, node: fx.Node, parts: list[fx.Node], bounds: list[tuple[int, int]]) -> None:
    _, weight, bias, *options = node.args
    total: fx.Node | None = None
    for part, (first, end) in zip(parts, bounds, strict=True):
        with graph.inserting_before(node):
            own_weight = _channels_of(graph, weight, first, end)
            own_bias = bias if total is None else None
            one = graph.call_function(_FORWARD, (part, own_weight, own_bias, *options), name=f"{node.name}_of_{first}")
            describe_as(one, node.meta["val"], node)
            if total is not None:
                one = graph.call_function(_aten.add.Tensor, (total, one), name=f"{node.name}_to_{end}")
                describe_as(one, node.meta["val"], node)
        total = one
    assert total is not None
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _join_weight_gradients(
    graph: fx.Graph, node: fx.Node, parts: list[fx.Node], bounds: list[tuple[int, int]], backward: set[str]
) -> None:
    grad, _, weight, bias_sizes, *options, wanted = node.args
    _, of_weight_value, of_bias_value = node.meta["val"]
    items = {item.args[1]: item for item in node.users}
    found = []
    for part, (first, end) in zip(parts, bounds, strict=True):
        own_wanted = [False, True, bool(wanted[2]) and first == 0]  # type: ignore[index]
        with graph.inserting_before(node):
            own_weight = _channels_of(graph, weight, first, end)
            call = (grad, part, own_weight, bias_sizes if own_wanted[2] else None, *options, own_wanted)
            one = graph.call_function(_BACKWARD, call, name=f"{node.name}_of_{first}")
            value = torch.empty_like(own_weight.meta["val"], memory_format=torch.contiguous_format)
            describe_as(one, (None, value, of_bias_value if own_wanted[2] else None), node)
            found.append(graph.call_function(operator.getitem, (one, 1), name=f"{node.name}_of_{first}_weight"))
            describe_as(found[-1], value, node)
            if own_wanted[2] and 2 in items:
                of_bias = graph.call_function(operator.getitem, (one, 2), name=f"{node.name}_bias")
                describe_as(of_bias, of_bias_value, node)
                items[2].replace_all_uses_with(of_bias)
        backward.add(one.name)
    with graph.inserting_before(node):
        joined = graph.call_function(_aten.cat.default, (found, _CHANNELS), name=f"{node.name}_joined")
    describe_as(joined, of_weight_value, node)
    backward.add(joined.name)
    items[1].replace_all_uses_with(joined)
    for item in items.values():
        graph.erase_node(item)
    graph.erase_node(node)


def _give_parts(graph: fx.Graph, node: fx.Node, bounds: list[tuple[int, int]], backward: set[str]) -> None:
    """A gradient of which only the parts are read, as one op each."""
    slices = list(node.users)
    if not slices or not all(_bounds_of(one) in bounds for one in slices):
        return
    grad, weight, shape, _, *options = node.args
    for one in slices:
        first, end = _bounds_of(one)
        value = torch.empty_like(one.meta["val"], memory_format=torch.contiguous_format)
        own_shape = [int(size) for size in value.shape]
        with graph.inserting_before(one):
            call = (grad, _channels_of(graph, weight, first, end), own_shape, list(value.stride()), *options)
            part = graph.call_function(input_gradient, call, name=f"{node.name}_of_{first}")
        describe_as(part, value, one)
        part.meta["flops"] = node.meta["flops"] * (end - first) // int(shape[_CHANNELS])  # type: ignore[index, arg-type]
        backward.add(part.name)
        stand_for_slice(graph, one, part)
    graph.erase_node(node)


def _bounds_of(node: fx.Node) -> tuple[int, int]:
    """The channels of a slice; (0, 0) of anything else."""
    arguments: Any = node.args
    if node.target is not _aten.slice.Tensor or len(arguments) != 4 or arguments[1] != _CHANNELS or node.kwargs:
        return 0, 0
    return int(arguments[2]), int(arguments[2]) + int(node.meta["val"].shape[_CHANNELS])


def _channels_of(graph: fx.Graph, weight: Any, first: int, end: int) -> fx.Node:
    part = graph.call_function(_aten.slice.Tensor, (weight, _CHANNELS, first, end))
    part.meta["val"] = weight.meta["val"][:, first:end]
    return part
