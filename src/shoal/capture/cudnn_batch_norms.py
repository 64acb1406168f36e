"""Batch norms that eager PyTorch leaves to cuDNN are left to it in the step too.

AOTAutograd names the native kernels in its graphs, whatever eager PyTorch would run: for float32 and float16 on CUDA
that is cuDNN, which rounds otherwise and is faster. PyTorch itself is asked, for each batch norm.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shoal.capture.symbolic_sizes import usual
from shoal.kernels import cudnn_batch_norm
from shoal.kernels.memory_format import suggested_memory_format
from shoal.lowlevel.cuda_calls import cudnn_reserve_bytes, is_left_to_cudnn

_aten = torch.ops.aten
_BACKWARD = _aten.native_batch_norm_backward.default
_FUNCTIONAL = _aten._native_batch_norm_legit_functional.default
_MEAN, _INVSTD = 1, 2


def leave_to_cudnn(joint: fx.GraphModule, backward: set[fx.Node]) -> dict[fx.Node, Any]:
    """Put cuDNN's batch norm and its backward in the place of the native ones, where eager PyTorch runs them.

    Args:
        joint: the joint graph, with running statistics in place; edited.
        backward: its backward nodes; new ones are added.

    Returns:
        What the backward ops return now: cuDNN lays the gradient out as the input.
    """
    graph = joint.graph
    replaced: list[fx.Node] = []
    for target in _OPERANDS:
        for node in graph.find_nodes(op="call_function", target=target):
            x, weight, bias, mean, var, training, momentum, eps = _OPERANDS[target](node)
            tensors = map(_plain, (x, weight, bias, mean, var))
            if not is_left_to_cudnn(*tensors, training, eps):  # type: ignore[call-arg]  # as many
                continue
            readers = _backwards(node) if training else []
            if readers is not None:
                _replace(graph, node, (x, weight, bias, mean, var, training, momentum, eps), readers, backward)
                replaced += readers
    return {node: _gradients(node) for node in replaced}


_OPERANDS: dict[Any, Any] = {
    _FUNCTIONAL: lambda node: node.args,
    _aten._native_batch_norm_legit.default: lambda node: node.args,
    _aten._native_batch_norm_legit.no_stats: lambda node: (*node.args[:3], None, None, *node.args[3:]),
    _aten._native_batch_norm_legit_no_training.default: lambda node: (*node.args[:5], False, *node.args[5:]),
}
"""Arguments as of `cudnn_batch_norm`."""


def _plain(operand: fx.Node | None) -> Any:
    """The operand's fake tensor, with numbers for symbolic sizes: a question about those would settle them."""
    if operand is None:
        return None
    value = operand.meta["val"]
    if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return value
    shape, strides = (tuple(usual(size) for size in sizes) for sizes in (value.shape, value.stride()))
    return value.new_empty_strided(shape, strides)


def _backwards(node: fx.Node) -> list[fx.Node] | None:
    """The ops that read the saved statistics; None where one of them is no batch norm's backward."""
    readers = [
        reader
        for item in node.users
        if item.target is operator.getitem and item.args[1] in (_MEAN, _INVSTD)
        for reader in item.users
    ]
    return list(dict.fromkeys(readers)) if all(reader.target is _BACKWARD for reader in readers) else None


def _replace(
    graph: fx.Graph, node: fx.Node, arguments: tuple[Any, ...], readers: list[fx.Node], backward: set[fx.Node]
) -> None:
    training, eps = arguments[5], arguments[7]
    x = _dense(graph, arguments[0], node)
    in_place = node.target is not _FUNCTIONAL
    node.target = _aten.cudnn_batch_norm.default if in_place else cudnn_batch_norm.functional
    node.args = (x, *arguments[1:])
    if not training:
        return
    value, place = x.meta["val"], len(node.meta["val"])
    reserve_bytes = cudnn_reserve_bytes(_plain(x)) if readers else 0
    kept = value.new_empty(reserve_bytes, dtype=torch.uint8) if reserve_bytes else None
    node.meta["val"] = (*node.meta["val"], kept)
    reserve = None
    if kept is not None:
        with graph.inserting_before(min(readers)):
            reserve = graph.call_function(operator.getitem, (node, place))
        reserve.meta = {**node.meta, "val": kept}
    for reader in readers:
        grad, _, weight, _, _, mean, invstd, _, _, wanted = reader.args
        grad = _dense(graph, grad, reader, suggested_memory_format(_plain(x)))  # type: ignore[arg-type]
        if grad not in reader.args:
            backward.add(grad)
        reader.target = cudnn_batch_norm.backward
        reader.args = (grad, x, weight, mean, invstd, reserve, eps, wanted)


def _gradients(node: fx.Node) -> Any:
    (x, *_), (of_input, *others) = node.args[1:], node.meta["val"]
    like = None if of_input is None else torch.empty_like(x.meta["val"])  # type: ignore[union-attr]  # it is a node
    return like, *others


def _dense(graph: fx.Graph, node: fx.Node, reader: fx.Node, layout: torch.memory_format | None = None) -> fx.Node:
    """The node itself, or what eager PyTorch copies for cuDNN where it has gaps or another layout."""
    value = _plain(node)
    layout = layout or suggested_memory_format(value)
    if value.is_contiguous(memory_format=layout):
        return node
    with graph.inserting_before(reader):
        copy = graph.call_function(_aten.clone.default, (node,), {"memory_format": layout})
    copy.meta = {**reader.meta, "val": torch.empty_like(node.meta["val"], memory_format=layout)}
    return copy
