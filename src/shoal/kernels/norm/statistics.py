"""`shoal::statistics`: mean and variance of every channel of a tensor, as an op of its own with its backward.

For a tensor that is not the output of `norm_conv`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.kernels.memory_format import dense_in_format, in_format, memory_format_of
from shoal.kernels.norm.norm_operands import IDENTITY, NormAffine, by_channel, wide
from shoal.kernels.norm.norm_sweeps import apply_exactly, sweeps
from shoal.lowlevel.direct_call import register_op


class MeasuredNorm(NamedTuple):
    """A tensor, (N, C, ...), its mean, and the gradients of its mean and variance, summed over their readers; (C,)."""

    x: Tensor
    mean: Tensor
    of_mean: Tensor
    of_variance: Tensor


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the channels of `x`; replaces `torch.var_mean(x, (0, 2, 3), correction=0)`.

    Args:
        x: (N, C, ...), of any floating dtype.

    Returns:
        mean and variance, (C,), in float32, in float64 for a float64 `x`; differentiable once.

    >>> mean, variance = statistics(torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]]]))
    >>> mean, variance
    (tensor([4.]), tensor([5.]))
    """
    mean, variance = _statistics(x)
    return mean, variance


def detached_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """`statistics` as numbers that lead back to nothing: of an `x` whose readers make its whole gradient themselves."""
    mean, variance = statistics(x)
    return mean.detach(), variance.detach()


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype has fewer digits than channels are measured in."""
    return wide(dtype) != dtype


def measure(x: Tensor) -> tuple[Tensor, Tensor]:
    """`statistics` without autograd."""
    return sweeps(x).statistics(x)


def whole_gradient(
    grad: Tensor | None, measured: MeasuredNorm, dtype: torch.dtype | None = None, factor: Tensor | None = None
) -> Tensor:
    """The gradient of a tensor whose statistics were used too: one affine map for all their readers.

    Args:
        grad: of the tensor itself, or None.
        measured: the tensor.
        dtype: of the result; None: the wide one.
        factor: (C,), what `grad` is multiplied with; None: nothing.
    """
    x, mean, of_mean, of_variance = measured
    count = x.numel() // x.shape[1]
    constant, slope = of_mean / count, of_variance * (2 / count)
    whole = torch.empty_like(x, dtype=dtype or wide(x.dtype), memory_format=memory_format_of(x))
    added = None if grad is None else in_format(grad, memory_format_of(x))
    if added is not None and factor is not None:
        into = whole if whole.dtype == torch.result_type(added, factor) else None
        added = torch.mul(added, by_channel(factor, added), out=into)
    apply_exactly(x, NormAffine(mean, slope, constant), added, IDENTITY, whole)
    return whole


def _forward_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1], dtype=wide(x.dtype)), x.new_empty(x.shape[1], dtype=wide(x.dtype))


def _backward(of_mean: Tensor, of_variance: Tensor, x: Tensor, mean: Tensor) -> Tensor:
    whole = whole_gradient(None, MeasuredNorm(x, mean, of_mean, of_variance), x.dtype)
    return dense_in_format(whole, memory_format_of(x))


def _backward_fake(of_mean: Any, of_variance: Any, x: Tensor, mean: Any) -> Tensor:
    return torch.empty_like(x, memory_format=memory_format_of(x))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[0])


def _differentiate(ctx: Any, of_mean: Tensor, of_variance: Tensor) -> Tensor:
    gradient: Tensor = _statistics_backward(of_mean, of_variance, *ctx.saved_tensors)
    return gradient


_statistics = register_op(
    "statistics(Tensor x) -> (Tensor, Tensor)", measure, _forward_fake, setup=_setup, differentiate=_differentiate
)
_statistics_backward = register_op(
    "statistics_backward(Tensor of_mean, Tensor of_variance, Tensor x, Tensor mean) -> Tensor",
    *(_backward, _backward_fake),
)
