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
Measured = Sequence[tuple[torch.Tensor, torch.Tensor]]


def sliced_batch_norm(
    slices: Sequence[torch.Tensor], layer: _BatchNorm, activation: str = "", measured: Measured | None = None
) -> list[torch.Tensor]:
    """Normalise slices of a batch by the mean and variance of all.

    Replaces one call of the layer, in training mode, on `torch.cat(slices)`. Running statistics move once.
    Slabs, parts along a spatial dimension, are normalised in the same way.

    Args:
        slices: tensors of (n_i, C, ...).
        layer: with its parameters and running statistics.
        activation: what follows, as of `shoal.kernels.norm.joined_statistics`.
        measured: `measure` of each; None: they are measured here.

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
    mean, variance = _statistics(measured or [measure(x) for x in slices], counts)
    with torch.no_grad():
        move_statistics(layer, mean, variance, sum(counts))
    settings = layer.eps, sum(counts), activation
    return list(_SlicedBatchNorm.apply(mean, variance, layer.weight, layer.bias, settings, *slices))


def slab_instance_norm(
    slabs: Sequence[torch.Tensor],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str = "",
    measured: Measured | None = None,
) -> list[torch.Tensor]:
    """Normalise each channel of each sample by the mean and variance of all slabs.

    Replaces `F.instance_norm(torch.cat(slabs, 2), None, None, weight, bias, eps=eps)`.

    Args:
        slabs: tensors of (N, C, d_i, ...).
        weight, bias: (C,), or None.
        eps, activation: as of `F.instance_norm` and `sliced_batch_norm`.
        measured: `measure_samples` of each; None: they are measured here.

    >>> halves = torch.tensor([[[1.0, 3.0]], [[1.0, 5.0]]]).split(1, 2)
    >>> [half.flatten().tolist() for half in slab_instance_norm(halves, None, None, 0.0)]
    [[-1.0, -1.0], [1.0, 1.0]]
    """
    samples, channels = slabs[0].shape[:2]
    rows = [x.reshape(1, samples * channels, *x.shape[2:]) for x in slabs]
    counts = [x.numel() // x.shape[1] for x in rows]
    if sum(counts) < 2:
        raise InputError("instance norm got one value for each channel, expected at least 2; give a larger input")
    mean, variance = _statistics(measured or [measure(x) for x in rows], counts)
    vectors = (None if vector is None else vector.repeat(samples) for vector in (weight, bias))
    found = _SlicedBatchNorm.apply(mean, variance, *vectors, (eps, sum(counts), activation), *rows)
    return [y.reshape(x.shape) for x, y in zip(slabs, found, strict=True)]


@torch.no_grad()
def measure(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of the channels of a slice, (C,)."""
    mean, variance = _ops.statistics(x)
    return mean, variance


def measure_samples(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`measure` of the channels of each sample, (N * C,)."""
    return measure(x.reshape(1, -1, *x.shape[2:]))


@torch.no_grad()
def _statistics(measured: Measured, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of the channels of all."""
    means, variances = zip(*measured, strict=True)
    mean, variance = _ops.joined_statistics(means, variances, counts)
    return mean, variance


class _SlicedBatchNorm(torch.autograd.Function):
    """y = activation((x - mean) * scale + bias), with scale = weight / sqrt(variance + eps).

    With D = sum of dy and E = sum of dy * (x - mean) over all slices, dy as the activation lets it through,
    dx = scale * (dy - D / count - (x - mean) * E / ((variance + eps) * count)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        mean: torch.Tensor,
        variance: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        settings: tuple[float, int, str],
        *slices: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.settings, ctx.has_weight, ctx.has_bias = settings, weight is not None, bias is not None
        eps, _, activation = settings
        scale = batch_norm_scale(variance, weight, eps)
        shift = torch.zeros_like(mean) if bias is None else bias
        ctx.save_for_backward(mean, variance, scale, shift, *([] if weight is None else [weight]), *slices)
        return tuple(_ops.sliced_norm(x, mean, scale, shift, activation) for x in slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        mean, variance, scale, shift, *slices = ctx.saved_tensors
        weight = slices.pop(0) if ctx.has_weight else None
        eps, count, activation = ctx.settings
        pairs = list(zip(grads, slices, strict=True))
        sums = [_ops.sliced_norm_sums(grad, x, mean, scale, shift, activation) for grad, x in pairs]
        slope, constant, of_weight, of_bias = _ops.joined_norm_gradients(
            [one[0] for one in sums], [one[1] for one in sums], variance, weight, eps, count
        )
        of_slices = [
            _ops.sliced_norm_gradient(grad, x, mean, scale, shift, slope, constant, activation) for grad, x in pairs
        ]
        return None, None, of_weight if ctx.has_weight else None, of_bias if ctx.has_bias else None, None, *of_slices
