"""Batch norm over all patches of a tensor at once: the statistics of the whole, which no patch has by itself.

Patches may overlap (`halo="exact"`). Every element counts once, in the patch whose core it is in; all are normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.kernels.batch_norm_vectors import measures, move_statistics
from shoal.transforms.split.patches import Region, at, crop


def joint_batch_norm(
    patches: Sequence[torch.Tensor], layer: _BatchNorm, have: Region, core: Region, places: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, ...]:
    """Normalise every patch by the mean and variance of all.

    Replaces one call of the layer on the whole tensor. Running statistics move once.

    Args:
        patches: one tensor of (N, C, ...) for each of `places`.
        layer: with its parameters and running statistics; where it does not measure, it is called on each patch.
        have: what the patches cover.
        core: which part of each counts.
        places: the index of each patch.

    Raises:
        InputError: a channel has one element, as in PyTorch's own layer in training mode.
    """
    if not measures(layer):
        return tuple(layer(x) for x in patches)
    cores = [crop(x, have, core, place) for x, place in zip(patches, places, strict=True)]
    dims = [0, *range(2, patches[0].dim())]
    count = sum(x.numel() // x.shape[1] for x in cores)
    if count < 2:
        raise InputError(
            f"batch norm got one value for each of {patches[0].shape[1]} channels, expected at least 2 to train; "
            "give a larger batch"
        )
    with torch.no_grad():
        wide_type = torch.promote_types(patches[0].dtype, torch.float32)
        mean = _total([x.sum(dims, dtype=wide_type) for x in cores]) / count
        variance = _total([(x - _wide(mean, x)).square().sum(dims, dtype=wide_type) for x in cores]) / count
        move_statistics(layer, mean, variance, count)
        inverse = torch.rsqrt(variance + layer.eps)
    spans = [
        tuple((wants[0] - has[0], wants[1] - has[0]) for has, wants in zip(at(have, p), at(core, p), strict=True))
        for p in places
    ]
    return _JointBatchNorm.apply(mean, inverse, layer.weight, layer.bias, count, spans, *patches)


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape([1, -1, *[1] * (like.dim() - 2)])


class _JointBatchNorm(torch.autograd.Function):
    """y = (x - mean) * inverse * weight + bias, with mean and inverse those of the cores.

    With D = sum of dy and E = sum of dy * (x - mean) * inverse over all patches, halos included, an element in a core
    has dx = weight * inverse * (dy - (D + x_hat * E) / count) and one in a halo weight * inverse * dy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        count: int,
        spans: Sequence[Sequence[tuple[int, int]]],
        *patches: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.count, ctx.spans = count, spans
        ctx.has_weight, ctx.has_bias = weight is not None, bias is not None
        ctx.save_for_backward(mean, inverse, *([weight] if weight is not None else []), *patches)
        scale = inverse if weight is None else inverse * weight
        results = []
        for x in patches:
            y = (x - _wide(mean, x)).mul_(_wide(scale, x))
            if bias is not None:
                y.add_(_wide(bias, x))
            results.append(y.to(x.dtype))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *errors: torch.Tensor) -> tuple[Any, ...]:
        mean, inverse, *rest = ctx.saved_tensors
        weight = rest.pop(0) if ctx.has_weight else None
        dims = [0, *range(2, rest[0].dim())]
        scale = inverse if weight is None else inverse * weight
        pairs = list(zip(errors, rest, strict=True))
        sums = _total([dy.sum(dims, dtype=mean.dtype) for dy in errors])
        products = _total([(dy * (x - _wide(mean, x))).sum(dims, dtype=mean.dtype) for dy, x in pairs]) * inverse
        gradients = []
        for dy, x, span in zip(errors, rest, ctx.spans, strict=True):
            dx = dy * _wide(scale, x)
            inner, x_inner = dx, x
            for dim, (begin, end) in enumerate(span, 2):
                inner, x_inner = inner.narrow(dim, begin, end - begin), x_inner.narrow(dim, begin, end - begin)
            moved = (x_inner - _wide(mean, x)) * _wide(inverse * products * scale / ctx.count, x)
            inner.sub_(moved.add_(_wide(sums * scale / ctx.count, x)))
            gradients.append(dx.to(x.dtype))
        d_weight = products.to(weight.dtype) if weight is not None else None
        d_bias = sums.to(mean.dtype) if ctx.has_bias else None
        return None, None, d_weight, d_bias, None, None, *gradients
