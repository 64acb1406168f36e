"""Batch, group and layer norms by the kernels that eager PyTorch runs, and their gradients in place.

AOTAutograd names the native kernels in its graphs, whatever eager PyTorch would run: for float32 and float16 on CUDA
that is cuDNN, which rounds otherwise and is faster. PyTorch itself is asked, for each batch norm.

PyTorch's kernels on the CPU allocate gradients that may be written over the incoming one: batch norm's (and so instance
norm's), group norm's and layer norm's one more, PReLU's two. A norm is rewritten if a trial on this machine gave the
same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import args_of, held_bytes
from shoal.graph.joint import Joint
from shoal.graph.symbolic_sizes import usual
from shoal.kernels import batch_norm, cudnn_batch_norm, group_norm, layer_norm
from shoal.kernels.memory_format import are_channels_last, suggested_memory_format
from shoal.kernels.pieces import WORTH_PIECES_BYTES
from shoal.lowlevel.cuda_calls import cudnn_reserve_bytes, is_left_to_cudnn

_aten = torch.ops.aten
_BACKWARD = _aten.native_batch_norm_backward.default
_FUNCTIONAL = _aten._native_batch_norm_legit_functional.default
_MEAN, _INVSTD = 1, 2
_ALL = [True, True, True]
Retargeted = Iterator[tuple[fx.Node, Any, tuple[Any, ...]]]  # a node, and what it calls instead with which arguments
_OPERANDS: dict[Any, Any] = {  # forward op → its arguments as of `cudnn_batch_norm`
    _FUNCTIONAL: lambda node: node.args,
    _aten._native_batch_norm_legit.default: lambda node: node.args,
    _aten._native_batch_norm_legit.no_stats: lambda node: (*node.args[:3], None, None, *node.args[3:]),
    _aten._native_batch_norm_legit_no_training.default: lambda node: (*node.args[:5], False, *node.args[5:]),
}


def left_to_cudnn(joint: Joint) -> Iterator[tuple[fx.Node, tuple[Any, ...], list[fx.Node]]]:
    """Batch norms that eager PyTorch leaves to cuDNN: the node, its arguments, and the backward ops."""
    for target, operands in _OPERANDS.items():
        for node in joint.find(target):
            *tensors, training, momentum, eps = operands(node)
            if not is_left_to_cudnn(*map(_plain, tensors), training, eps):  # type: ignore[call-arg]  # as many
                continue
            readers = _backwards(node) if training else []
            if readers is not None:
                yield node, (*tensors, training, momentum, eps), readers


def leave_to_cudnn(joint: Joint, site: tuple[fx.Node, tuple[Any, ...], list[fx.Node]]) -> None:
    """Put cuDNN's batch norm and its backward in the place of the native ones."""
    node, (x, *others), readers = site
    x = _dense(joint, x, node)
    in_place = node.target is not _FUNCTIONAL
    node.target = _aten.cudnn_batch_norm.default if in_place else cudnn_batch_norm.functional
    node.args = (x, *others)
    if not others[4]:  # not training
        return
    value, place = x.meta["val"], len(node.meta["val"])
    reserve_bytes = cudnn_reserve_bytes(_plain(value)) if readers else 0
    kept = value.new_empty(reserve_bytes, dtype=torch.uint8) if reserve_bytes else None
    node.meta["val"] = (*node.meta["val"], kept)
    reserve = None
    if kept is not None:
        reserve = joint.call(min(readers), operator.getitem, (node, place), kept, node)
    for reader in readers:
        grad, _, weight, _, _, mean, invstd, _, _, wanted = args_of(reader)
        grad = _dense(joint, grad, reader, suggested_memory_format(_plain(value)))
        reader.target = cudnn_batch_norm.backward
        reader.args = (grad, x, weight, mean, invstd, reserve, others[6], wanted)


def _plain(operand: Any) -> Any:
    """The operand's fake tensor, with numbers for symbolic sizes: a question about those would settle them."""
    value = operand.meta["val"] if isinstance(operand, fx.Node) else operand
    if value is None or not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return value
    shape, strides = (tuple(usual(size) for size in sizes) for sizes in (value.shape, value.stride()))
    return value.new_empty_strided(shape, strides)


def _backwards(node: fx.Node) -> list[fx.Node] | None:
    """The ops that read the saved statistics; None where one of them is no batch norm's backward."""
    items = [item for item in node.users if item.target is operator.getitem and item.args[1] in (_MEAN, _INVSTD)]
    readers = dict.fromkeys(reader for item in items for reader in item.users)
    return list(readers) if all(reader.target is _BACKWARD for reader in readers) else None


def _dense(joint: Joint, node: fx.Node, reader: fx.Node, layout: torch.memory_format | None = None) -> fx.Node:
    """The node itself, or what eager PyTorch copies for cuDNN where it has gaps or another layout."""
    layout = layout or suggested_memory_format(_plain(node))
    if _plain(node).is_contiguous(memory_format=layout):
        return node
    value = torch.empty_like(node.meta["val"], memory_format=layout)
    return joint.call(reader, _aten.clone.default, (node,), value, reader, kwargs={"memory_format": layout})


def batch_norms_in_place(joint: Joint) -> Retargeted:
    """Gradients of batch norms that may be written over the incoming one."""
    for node in joint.find(_BACKWARD) if joint.runs_here else ():
        grad, x, weight, _, _, mean, deviation, training, _, wanted = args_of(node)
        if training is not True or wanted != (_ALL if weight is not None else [True, False, False]):
            continue
        operands = [x, grad, mean, deviation, *([weight] if weight is not None else [])]
        if all(isinstance(operand, fx.Node) for operand in operands) and _repeats_bits_of_batch_norm(operands):
            yield node, batch_norm.backward, (grad, x, weight, mean, deviation)


def _repeats_bits_of_batch_norm(operands: list[fx.Node]) -> bool:
    value, of_grad, *of_channels = (operand.meta["val"] for operand in operands)
    if value.dim() not in (3, 4, 5) or of_grad.stride() != value.stride() or value.device.type != "cpu":
        return False
    weight_dtypes = {each.dtype for each in of_channels}
    if prod(value.shape[2:]) == 1 or of_grad.dtype != value.dtype or len(weight_dtypes) > 1:
        return False
    channels_last = not value.is_contiguous()
    if channels_last:
        if not are_channels_last(value):
            return False
    elif held_bytes(value) < WORTH_PIECES_BYTES:
        return False
    sizes = value.dim(), int(value.shape[1])
    return batch_norm.backward_repeats_bits(value.dtype, weight_dtypes.pop(), value.device, *sizes, channels_last)


def group_norms_in_place(joint: Joint) -> Retargeted:
    """Gradients of group norms that may be written over the incoming one."""
    for node in joint.find(_aten.native_group_norm_backward.default) if joint.runs_here else ():
        grad, x, mean, invstd, weight, *_, groups, wanted = args_of(node)
        if wanted != _ALL or not isinstance(weight, fx.Node):
            continue
        values = [operand.meta["val"] for operand in (grad, x, weight)]
        value = values[1]
        dense = all(one.is_contiguous() and one.dtype == value.dtype for one in values)
        if not dense or value.device.type != "cpu" or value.dim() < 3 or held_bytes(value) < WORTH_PIECES_BYTES:
            continue
        sizes = min(value.dim(), 5), int(value.shape[1]), groups
        if group_norm.backward_repeats_bits(value.dtype, value.device, *sizes):
            yield node, group_norm.backward, (grad, x, weight, mean, invstd)


def layer_norms_in_place(joint: Joint) -> Retargeted:
    """Gradients of layer norms that may be written over the incoming one."""
    for node in joint.find(_aten.native_layer_norm_backward.default) if joint.runs_here else ():
        grad, x, shape, mean, invstd, weight, bias, wanted = args_of(node)
        if wanted != _ALL or not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node):
            continue
        values = [operand.meta["val"] for operand in (grad, x, weight, bias)]
        value = values[1]
        fixed = all(type(size) is int for size in (*value.shape, *shape))
        if not fixed or not all(one.is_contiguous() for one in values) or value.device.type != "cpu":
            continue
        if values[0].dtype != value.dtype or held_bytes(value) < WORTH_PIECES_BYTES:
            continue
        if layer_norm.backward_repeats_bits(value.dtype, values[2].dtype, prod(shape)):
            yield node, layer_norm.backward, (grad, x, shape, mean, invstd, weight, bias)
