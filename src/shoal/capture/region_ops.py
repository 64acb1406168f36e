"""Which ops of a step a compiled region may take in, and what each computes in ops that Inductor knows."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from shoal.graph.rerun import is_random
from shoal.kernels import batch_norm, group_norm, layer_norm, prelu, relu
from shoal.kernels.dropout import dropout_backward

_aten = torch.ops.aten

# Pointwise too, without the tag.
_POINTWISE = frozenset(
    {
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.elu_backward.default,
        _aten.full_like.default,
        _aten.hardsigmoid_backward.default,
        _aten.hardswish.default,
        _aten.hardswish_backward.default,
        _aten.hardtanh_backward.default,
        _aten.leaky_relu_backward.default,
        _aten.log_sigmoid_backward.default,
        _aten.mish_backward.default,
        _aten.ones_like.default,
        _aten.softplus_backward.default,
        _aten.where.ScalarOther,
        _aten.where.ScalarSelf,
        _aten.where.Scalar,
        _aten.zeros_like.default,
    }
)
_REDUCTIONS = frozenset(
    {
        _aten.amax.default,
        _aten.amin.default,
        _aten.mean.default,
        _aten.mean.dim,
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.var.correction,
        _aten.var_mean.correction,
    }
)


def statistics(
    x: torch.Tensor, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[torch.Tensor, ...]:
    """Mean and inverse deviation of each channel of (N, C, ...), and the running statistics as batch norm moves them.

    Returns:
        Two (C,) in float32, or float64 where `x` is; then the two running ones, where there are such.
    """
    whole = x.to(torch.promote_types(x.dtype, torch.float32))
    var, mean = torch.var_mean(whole, [0, *range(2, x.dim())], correction=0)
    invstd = torch.rsqrt(var + eps)
    if running_mean is None:
        return mean, invstd
    count = x.numel() // x.shape[1]
    unbiased = var * (count / (count - 1))
    moved_mean = momentum * mean + (1 - momentum) * running_mean
    moved_var = momentum * unbiased + (1 - momentum) * running_var
    return mean, invstd, moved_mean.to(running_mean.dtype), moved_var.to(running_var.dtype)


def statistics_in_place(
    x: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float, eps: float
) -> tuple[torch.Tensor, ...]:
    """The first two of `statistics`; the running ones are moved where they lie."""
    mean, invstd, moved_mean, moved_var = statistics(x, running_mean, running_var, momentum, eps)
    running_mean.copy_(moved_mean)
    running_var.copy_(moved_var)
    return mean, invstd


def normalised(x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, invstd: torch.Tensor) -> torch.Tensor:
    """(N, C, ...) normalised by (C,) statistics, in their precision; the result has the dtype of `x`."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = (x.to(mean.dtype) - mean.view(shape)) * invstd.view(shape)
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    return y.to(x.dtype)


def _batch_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> Any:
    return _aten.native_batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, 0.0, [True, True, True])


def _group_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> Any:
    samples, channels, *pixels = x.shape
    return _aten.native_group_norm_backward(
        grad, x, mean, invstd, weight, samples, channels, prod(pixels), mean.shape[1], [True, True, True]
    )


def _relu_backward(grad: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    return torch.where(positive, grad, 0.0)


def _zeroed(grad: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.where(where, 0.0, grad)


def _leaky_backward(grad: torch.Tensor, positive: torch.Tensor, slope: float) -> torch.Tensor:
    return torch.where(positive, grad, grad * slope)


def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> Any:
    return _aten.native_layer_norm_backward(grad, x, shape, mean, invstd, weight, bias, [True, True, True])


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    return grad * mask * (0.0 if p == 1 else 1 / (1 - p))


# Ours → the same in ops of PyTorch.
_REPLACED: dict[Any, Callable[..., Any]] = {
    batch_norm.backward: _batch_norm_backward,
    group_norm.backward: _group_norm_backward,
    relu.backward: _relu_backward,
    layer_norm.backward: _layer_norm_backward,
    prelu.backward: prelu.backward,
    relu.zeroed: _zeroed,
    relu.leaky_backward: _leaky_backward,
    dropout_backward: _dropout_backward,
}
# Worth a region by themselves: eager PyTorch makes several sweeps of them, or Inductor fewer bytes.
_COMPOSITE = frozenset(
    {
        statistics,
        statistics_in_place,
        normalised,
        batch_norm.backward,
        group_norm.backward,
        layer_norm.backward,
        prelu.backward,
        _aten.constant_pad_nd.default,
        _aten.native_batch_norm_backward.default,
        _aten.native_group_norm.default,
        _aten.native_group_norm_backward.default,
        _aten.native_layer_norm.default,
        _aten.native_layer_norm_backward.default,
    }
)
_SOFTMAX = frozenset(
    {
        _aten._softmax.default,
        _aten._softmax_backward_data.default,
        _aten._log_softmax.default,
        _aten._log_softmax_backward_data.default,
    }
)


def can_join(node: fx.Node) -> bool:
    """Whether a region may take the node in: it computes new tensors only from tensors, and changes nothing else.

    The statistics of a batch norm, which may move running ones where they lie, are a region by themselves.
    """
    target = node.target
    if target in _COMPOSITE or target in _REPLACED or target in _POINTWISE or target in _REDUCTIONS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or is_random(node):
        return False
    if target.namespace != "aten":
        return False
    return target in _SOFTMAX or torch.Tag.pointwise in target.tags


def is_composite(node: fx.Node) -> bool:
    """Whether the node is worth a region by itself."""
    return node.target in _COMPOSITE


def is_transposition(node: fx.Node) -> bool:
    """Whether the node copies a tensor into another order of axes on a GPU: Triton does that tile by tile."""
    if node.target is not _aten.clone.default:
        return False
    (operand,) = node.all_input_nodes
    read, made = operand.meta["val"], node.meta["val"]
    innermost = [axis for axis in range(made.dim()) if made.stride(axis) == 1 and made.shape[axis] > 1]
    return made.device.type == "cuda" and any(read.stride(axis) != 1 for axis in innermost)


def is_statistics(node: fx.Node) -> bool:
    """Whether the node takes the statistics of a batch norm, which happens once in a step."""
    return node.target is statistics or node.target is statistics_in_place


def is_reduction(node: fx.Node) -> bool:
    """Whether the node's result is made of many elements each."""
    return node.target in _REDUCTIONS


def is_softmax(node: fx.Node) -> bool:
    """Whether the node is a softmax or the gradient of one."""
    return node.target in _SOFTMAX


def in_known_ops(target: Any) -> Callable[..., Any]:
    """A function that computes what a node of this target does, in ops that Inductor knows."""
    return _REPLACED.get(target, target)
