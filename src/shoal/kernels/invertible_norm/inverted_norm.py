"""Instance norm or group norm and an invertible activation as one op that saves only its result.

As `inverted_batch_norm`, by statistics of each sample: its groups of channels, or each channel by itself. The scales
are the weights themselves, but none is nearer to zero than `MIN_SCALE`, so parameters mean what they mean to PyTorch.

A sample's channel is a channel of its own to the sweeps of the batch norm: in a contiguous tensor those of all samples
lie one after the other; in channels_last they are swept sample by sample. Known limits: no double backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.kernels.invertible_norm.inverted_batch_norm import error_of
from shoal.kernels.invertible_norm.inverted_op import InvertedOp, InvertedVectors, by_pytorch, gradients_into
from shoal.kernels.norm.norm_operands import Activation, NormAffine
from shoal.kernels.norm.norm_sweeps import apply_exactly
from shoal.kernels.norm.statistics import measure
from shoal.lowlevel.torch_state import check_batch_norm_input, check_group_size, check_spatial_size, in_functorch

MIN_SCALE = 1e-5
"""What stands for a scale nearer to zero, which could not be undone."""


def at_least(weight: Tensor) -> Tensor:
    """The scale that is used for a weight (C,): itself, or `MIN_SCALE` on its side of zero. The derivative is 1.

    >>> at_least(torch.tensor([1.0, 0.0, -1e-9]))
    tensor([ 1.0000e+00,  1.0000e-05, -1.0000e-05])
    """
    return torch.where(weight < 0, weight.clamp(max=-MIN_SCALE), weight.clamp(min=MIN_SCALE))


def _is_swept(x: Tensor) -> bool:
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


def _like(x: Tensor) -> Tensor:
    layout = torch.preserve_format if _is_swept(x) else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout)


def _planes(x: Tensor) -> list[Tensor]:
    """Views that cover it, (1, channels, ...), in which a channel is one of a sample."""
    if x.is_contiguous():
        return [x.view(1, x.shape[0] * x.shape[1], -1)]
    return list(x.split(1))


def _forward(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[Tensor, Tensor]:
    """Normalise each sample, scale, shift and activate; saves the result and vectors for the backward pass.

    Replaces `F.leaky_relu(F.group_norm(x, groups, weight, bias, eps), slope)`, and with as many groups as channels
    `F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias, eps=eps), slope)`.

    Args:
        x: (N, C, ...) of any floating dtype; other layouts than contiguous and channels_last become contiguous.
        y: the result, of the dtype of `x`.
        weight, bias: (C,), or None for 1 and 0.
        groups: of channels, which share their statistics.
        eps: added to the variance.
        activation: "leaky_relu", "elu" or "identity".
        slope: LeakyReLU's negative slope or ELU's alpha, greater than 0.

    Returns:
        Mean and 1 / sqrt(variance + eps), (N, groups) float32, or float64 for a float64 `x`.
    """
    samples, channels = x.shape[:2]
    mean, variance = _statistics(x, groups)
    invstd = torch.rsqrt(variance + eps)
    scale, shift = _scale_and_shift(weight, bias, mean, channels)
    means, factors = (_of_planes(vector, channels) for vector in (mean, invstd))
    factors, shifts = factors * scale.repeat(samples), shift.repeat(samples)
    start = 0
    for source, target in zip(_planes(x), _planes(y), strict=True):
        ours = slice(start, start := start + source.shape[1])
        affine = NormAffine(means[ours], factors[ours], shifts[ours])
        apply_exactly(source, affine, None, Activation(activation, slope), target)
    return mean, invstd


def _statistics(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the groups of each sample, (N, groups)."""
    samples, channels = x.shape[:2]
    if x.is_contiguous():
        mean, variance = measure(x.view(1, samples * groups, -1))
        return mean.view(samples, groups), variance.view(samples, groups)
    found = [measure(sample) for sample in x.split(1)]
    mean, variance = (torch.stack(vectors) for vectors in zip(*found, strict=True))
    if groups == channels:
        return mean, variance
    mean, variance = (vector.view(samples, groups, -1) for vector in (mean, variance))
    middle = mean.mean(2, keepdim=True)
    return middle.squeeze(2), (variance + (mean - middle).square()).mean(2)


def _of_planes(vector: Tensor, channels: int) -> Tensor:
    """(N, groups) as (N * channels,)."""
    return vector.repeat_interleave(channels // vector.shape[1], 1).view(-1)


def _scale_and_shift(weight: Tensor | None, bias: Tensor | None, like: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    scale = like.new_ones(channels) if weight is None else at_least(weight.to(like.dtype))
    return scale, like.new_zeros(channels) if bias is None else bias.to(like.dtype)


def _backward(
    grad: Tensor,
    result: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    invstd: Tensor,
    activation: str,
    slope: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of `inverted_norm`, from its result; arguments and results as for `inverted_batch_norm`'s."""
    samples, channels = y.shape[:2]
    scale, shift = _scale_and_shift(weight, bias, invstd, channels)
    scales, shifts, factors = scale.repeat(samples), shift.repeat(samples), _of_planes(invstd, channels)
    in_group = channels // invstd.shape[1]
    start, found = 0, []
    for source, target, one in zip(_planes(grad), _planes(result), _planes(y), strict=True):
        ours = slice(start, start := start + one.shape[1])
        vectors = InvertedVectors(scales[ours], shifts[ours], factors[ours])
        found.append(gradients_into(source, target, one, vectors, Activation(activation, slope), in_group=in_group))
    of_scale, of_shift = (torch.cat(parts).view(samples, channels).sum(0) for parts in zip(*found, strict=True))
    return (
        of_scale.to(invstd.dtype if weight is None else weight.dtype),
        of_shift.to(invstd.dtype if bias is None else bias.dtype),
    )


_OP = InvertedOp(
    "inverted_norm",
    "int groups, float eps, str activation, float slope",
    "str activation, float slope",
    forward=_forward,
    backward=_backward,
    saved=lambda arguments, vectors: (vectors[1], tuple(arguments[2:])),
    vector_shape=lambda x, groups, *_: (x.shape[0], groups),
    empty_like=_like,
)
inverted_norm, inverted_norm_backward = _OP.op, _OP.backward_op
forward_, backward_ = _OP.forward_, _OP.backward_


def run(
    layer: _InstanceNorm | nn.GroupNorm, x: Tensor, activation: str, slope: float, overwrite: bool = False
) -> Tensor:
    """Call an instance norm without running statistics, or a group norm, and its activation in the inverted form.

    Replaces `activation(layer(x))`. An empty batch, one without a batch dimension, and one under a transform of
    `torch.func` is computed by PyTorch's own ops.

    Args:
        layer: with its parameters.
        x: (N, C, ...).
        activation, slope: as for `inverted_norm`.
        overwrite: whether the result may be written over `x`, for callers who know that nothing else reads it.
            Compilers decide that for themselves.

    Raises:
        ValueError: as the layer: `x` has another number of dimensions, or one value per group.
        RuntimeError: as the layer: `x` has another number of channels.
    """
    if isinstance(layer, _InstanceNorm):
        check_batch_norm_input(layer, x)
        if x.dim() == layer._get_no_batch_dim():
            return run(layer, x.unsqueeze(0), activation, slope, overwrite).squeeze(0)
        groups, channels = x.shape[1], layer.num_features if layer.affine else x.shape[1]
    else:
        groups, channels = layer.num_groups, layer.num_channels
    if x.numel() == 0 or x.dim() < 2 or x.shape[1] != channels or in_functorch():
        return by_pytorch(layer, at_least, x, activation, slope)  # which raises, or for which the op has no rules
    if isinstance(layer, _InstanceNorm):
        check_spatial_size(x)
    else:
        check_group_size(x, groups)
    arguments = (layer.weight, layer.bias, groups, layer.eps, activation, slope)
    return _OP(x, overwrite and _is_swept(x), *arguments)[0]


def reconstruction_error(weight: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype) -> Tensor:
    """How far a normalised input that is recomputed from the result can be from what it was, (C,) float64.

    See `inverted_batch_norm.reconstruction_error`.
    """
    scale = at_least(weight.detach().double())
    return error_of(scale, None if bias is None else bias.detach().double(), activation, dtype)


def inverted_norm_in(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
    dtype: torch.dtype,
) -> Tensor:
    """`inverted_norm` of `x` in the dtype that autocast gave the norm."""
    y: Tensor = inverted_norm(x.to(dtype), weight, bias, groups, eps, activation, slope)[0]
    return y
