"""Gradients of norms and PReLUs that are written over the incoming gradient, bit for bit the same, on the CPU.

PyTorch's kernels allocate them: batch norm's (and so instance norm's), group norm's and layer norm's one more, PReLU's
two. A norm is rewritten where a trial on this machine gave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from shoal.capture.fx_nodes import args_of, held_bytes
from shoal.kernels import batch_norm, group_norm, layer_norm, prelu
from shoal.kernels.memory_format import channels_last_format
from shoal.kernels.pieces import WORTH_PIECES_BYTES

_aten = torch.ops.aten
_ALL = [True, True, True]


def _of_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    grad, x, weight, _, _, mean, deviation, training, _, wanted = args_of(node)
    if training is not True or wanted != (_ALL if weight is not None else [True, False, False]):
        return
    if not all(isinstance(operand, fx.Node) for operand in (grad, x, mean, deviation)):
        return
    value, of_grad, *of_channels = (
        operand.meta["val"] for operand in (x, grad, mean, deviation, weight) if operand is not None
    )
    if value.dim() not in (3, 4, 5) or of_grad.stride() != value.stride() or value.device.type != "cpu":
        return
    weight_dtypes = {each.dtype for each in of_channels}
    if prod(value.shape[2:]) == 1 or of_grad.dtype != value.dtype or len(weight_dtypes) > 1:
        return
    (weight_dtype,) = weight_dtypes
    channels_last = not value.is_contiguous()
    if channels_last:
        layout = channels_last_format(value.dim())
        if value.dim() == 3 or not value.is_contiguous(memory_format=layout):
            return
    elif held_bytes(value) < WORTH_PIECES_BYTES:
        return
    sizes = value.dim(), int(value.shape[1])
    if batch_norm.backward_repeats_bits(value.dtype, weight_dtype, value.device, *sizes, channels_last):
        node.target, node.args = batch_norm.backward, (grad, x, weight, mean, deviation)


def _of_group_norm(graph: fx.Graph, node: fx.Node) -> None:
    grad, x, mean, invstd, weight, *_, groups, wanted = args_of(node)
    if wanted != _ALL or not isinstance(weight, fx.Node):
        return
    values = [operand.meta["val"] for operand in (grad, x, weight)]
    dense = all(value.is_contiguous() and value.dtype == values[1].dtype for value in values)
    value = values[1]
    if not dense or value.device.type != "cpu" or value.dim() < 3 or held_bytes(value) < WORTH_PIECES_BYTES:
        return
    if group_norm.backward_repeats_bits(value.dtype, value.device, min(value.dim(), 5), int(value.shape[1]), groups):
        node.target, node.args = group_norm.backward, (grad, x, weight, mean, invstd)


def _of_layer_norm(graph: fx.Graph, node: fx.Node) -> None:
    grad, x, shape, mean, invstd, weight, bias, wanted = args_of(node)
    if wanted != _ALL or not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node):
        return
    values = [operand.meta["val"] for operand in (grad, x, weight, bias)]
    value = values[1]
    fixed = all(type(size) is int for size in (*value.shape, *shape))
    if not fixed or not all(one.is_contiguous() for one in values) or value.device.type != "cpu":
        return
    if values[0].dtype != value.dtype or held_bytes(value) < WORTH_PIECES_BYTES:
        return
    if layer_norm.backward_repeats_bits(value.dtype, values[2].dtype, prod(shape)):
        node.target, node.args = layer_norm.backward, (grad, x, shape, mean, invstd, weight, bias)


def _of_prelu(graph: fx.Graph, node: fx.Node) -> None:
    grad, x = (operand.meta["val"] for operand in args_of(node)[:2])
    if grad.stride() != x.stride():
        return
    if node.meta["val"][0].device.type == "cpu" and slopes_gradient(node) is not None:
        add_up_slopes(graph, node)


def slopes_gradient(node: fx.Node) -> fx.Node | None:
    """The sum over what broadcasting a PReLU's slope gave it, where that is all that is made of the second gradient.

    None too where incoming gradient, input and slope differ in dtype or layout. The first may be some channels of a
    larger one, as after a concatenation, where the input's gradient has the input's layout.
    """
    grad, x, weight = (operand.meta["val"] for operand in args_of(node))
    summands = next((user for user in node.users if user.args[1] == 1), None)
    total = next(iter(summands.users), None) if summands is not None else None
    if summands is None or total is None or len(summands.users) > 1 or total.target is not _aten.sum.dim_IntList:
        return None
    result = node.meta["val"][0]
    if total.kwargs or (grad.stride() != x.stride() and not (prelu.is_part(grad, x) and result.stride() == x.stride())):
        return None
    return total if grad.dtype == x.dtype == weight.dtype and weight.dim() == x.dim() else None


def add_up_slopes(graph: fx.Graph, node: fx.Node) -> None:
    """Let a node with `slopes_gradient` be that sum too."""
    total = slopes_gradient(node)
    assert total is not None
    (summands,) = total.all_input_nodes
    _, dims, *keepdim = args_of(total)
    node.target, node.args = prelu.backward, (*args_of(node), dims, bool(keepdim and keepdim[0]))
    node.meta["val"] = (node.meta["val"][0], total.meta["val"])
    summands.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(summands)
    graph.erase_node(total)


WRITTEN_OVER: dict[Any, Callable[[fx.Graph, fx.Node], None]] = {
    _aten.native_batch_norm_backward.default: _of_batch_norm,
    _aten.native_group_norm_backward.default: _of_group_norm,
    _aten.native_layer_norm_backward.default: _of_layer_norm,
    _aten._prelu_kernel_backward.default: _of_prelu,
}
"""What rewrites a node of each, where it can be."""
