"""Batch norm over slices of a batch: the statistics of the whole, with one slice in memory after the other.

Each pass over a slice is one op of a captured step, and so is what joins the vectors of all: a planner has few ops to
consider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.kernels.batch_norm_vectors import batch_norm_scale, move_statistics
from shoal.kernels.norm import joined_statistics, statistics

_registered = joined_statistics, statistics
_ops = torch.ops.shoal


def sliced_batch_norm(slices: Sequence[torch.Tensor], layer: _BatchNorm, relu: bool = False) -> list[torch.Tensor]:
    """Normalise slices of a batch by the mean and variance of all.

    Replaces one call of the layer, in training mode, on `torch.cat(slices)`. Running statistics move once.

    Args:
        slices: tensors of (n_i, C, ...).
        layer: with its parameters and running statistics.
        relu: whether a ReLU follows.

    Raises:
        InputError: a channel has one element, as in PyTorch's own layer in training mode.

    >>> halves = torch.tensor([[[1.0]], [[3.0]]]).split(1)
    >>> [half.item() for half in sliced_batch_norm(halves, torch.nn.BatchNorm1d(1, eps=0.0, affine=False))]
    [-1.0, 1.0]
    """
    counts = [x.numel() // x.shape[1] for x in slices]
    if sum(counts) < 2:
        raise InputError(
            f"batch norm got one value for each of {slices[0].shape[1]} channels, expected at least 2 to train; "
            "give a larger batch"
        )
    with torch.no_grad():
        means, variances = zip(*(_ops.statistics(x) for x in slices), strict=True)
        mean, variance = _ops.joined_statistics(means, variances, counts)
        if layer.training:
            move_statistics(layer, mean, variance, sum(counts))
    settings = layer.eps, sum(counts), relu
    found = _SlicedBatchNorm.apply(mean, variance, layer.weight, layer.bias, settings, *slices)
    return list(found)


class _SlicedBatchNorm(torch.autograd.Function):
    """y = relu((x - mean) * scale + bias), with scale = weight / sqrt(variance + eps).

    With D = sum of dy and E = sum of dy * (x - mean) over all slices, dy as the ReLU lets it through,
    dx = scale * (dy - D / count - (x - mean) * E / ((variance + eps) * count)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        mean: torch.Tensor,
        variance: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        settings: tuple[float, int, bool],
        *slices: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.settings, ctx.has_weight, ctx.has_bias = settings, weight is not None, bias is not None
        eps, _, relu = settings
        scale = batch_norm_scale(variance, weight, eps)
        shift = torch.zeros_like(mean) if bias is None else bias
        ctx.save_for_backward(mean, variance, scale, shift, *([] if weight is None else [weight]), *slices)
        return tuple(_ops.sliced_norm(x, mean, scale, shift, relu) for x in slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        mean, variance, scale, shift, *slices = ctx.saved_tensors
        weight = slices.pop(0) if ctx.has_weight else None
        eps, count, relu = ctx.settings
        pairs = list(zip(grads, slices, strict=True))
        sums = [_ops.sliced_norm_sums(grad, x, mean, scale, shift, relu) for grad, x in pairs]
        slope, constant, of_weight, of_bias = _ops.joined_norm_gradients(
            [one[0] for one in sums], [one[1] for one in sums], variance, weight, eps, count
        )
        of_slices = [_ops.sliced_norm_gradient(grad, x, mean, scale, shift, slope, constant, relu) for grad, x in pairs]
        return None, None, of_weight if ctx.has_weight else None, of_bias if ctx.has_bias else None, None, *of_slices
