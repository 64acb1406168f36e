"""Instance norm or group norm and an invertible activation as one op that saves only its result.

As `inverted_batch_norm`, by statistics of each sample: its groups of channels, or each channel by itself. The scales
are the weights themselves, but none is nearer to zero than `MIN_SCALE`, so parameters mean what they mean to PyTorch.

A sample's channel is a channel of its own to the sweeps of the batch norm: in a contiguous tensor those of all samples
lie one after the other; in channels_last they are swept sample by sample. Known limits: no double backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.kernels.invertible_norm.inverted_batch_norm import channel_statistics, error_of
from shoal.kernels.invertible_norm.inverted_batch_norm_sweeps import sweeps
from shoal.kernels.norm.statistics import wide as wide_of
from shoal.lowlevel.direct_call import needs_dispatch
from shoal.lowlevel.torch_state import check_batch_norm_input, check_group_size, check_spatial_size, in_functorch

MIN_SCALE = 1e-5
"""What stands for a scale nearer to zero, which could not be undone."""

_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, int groups, float eps, str activation, float slope)"
    " -> (Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor y, Tensor? weight, Tensor? bias, Tensor invstd, str activation, float slope)"
    " -> (Tensor, Tensor, Tensor)"
)


def at_least(weight: torch.Tensor) -> torch.Tensor:
    """The scale that is used for a weight (C,): itself, or `MIN_SCALE` on its side of zero. The derivative is 1.

    >>> at_least(torch.tensor([1.0, 0.0, -1e-9]))
    tensor([ 1.0000e+00,  1.0000e-05, -1.0000e-05])
    """
    return torch.where(weight < 0, weight.clamp(max=-MIN_SCALE), weight.clamp(min=MIN_SCALE))


def forward_(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`inverted_norm` that writes over `x`, contiguous or channels_last."""
    return x, *_forward(x, x, weight, bias, groups, eps, activation, slope)


@torch.library.custom_op("shoal::inverted_norm", mutates_args=(), schema=_SCHEMA)
def inverted_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise each sample, scale, shift and activate; saves the result and vectors for the backward pass.

    Replaces `F.leaky_relu(F.group_norm(x, groups, weight, bias, eps), slope)`, and with as many groups as channels
    `F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias, eps=eps), slope)`.

    Args:
        x: (N, C, ...) of any floating dtype; other layouts than contiguous and channels_last become contiguous.
        weight, bias: (C,), or None for 1 and 0.
        groups: of channels, which share their statistics.
        eps: added to the variance.
        activation: "leaky_relu", "elu" or "identity".
        slope: LeakyReLU's negative slope or ELU's alpha, greater than 0.

    Returns:
        The result, of the dtype of `x`; mean and 1 / sqrt(variance + eps), (N, groups) float32, or float64 for a
        float64 `x`. The last two carry no gradient.
    """
    return _forward_anew(x, weight, bias, groups, eps, activation, slope)


@torch.library.custom_op("shoal::inverted_norm_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def inverted_norm_backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `inverted_norm`, from its result.

    Args:
        grad: of the result, (N, C, ...).
        y: the result.
        weight, bias, activation, slope: as there.
        invstd: (N, groups), which it returned.

    Returns:
        Gradients of x, in the layout of `y`, and of weight and bias, (C,) of their dtypes.
    """
    return _backward_anew(grad, y, weight, bias, invstd, activation, slope)


def backward_(
    grad: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`inverted_norm_backward` that writes the gradient of x over `grad`, which has the layout of `y`."""
    return grad, *_backward(grad, grad, y, weight, bias, invstd, activation, slope)


def run(
    layer: _InstanceNorm | nn.GroupNorm, x: torch.Tensor, activation: str, slope: float, overwrite: bool = False
) -> torch.Tensor:
    """Call an instance norm without running statistics, or a group norm, and its activation in the inverted form.

    Replaces `activation(layer(x))`. An empty batch, one without a batch dimension, and one under a transform of
    `torch.func` is computed by PyTorch's own ops.

    Args:
        layer: with its parameters.
        x: (N, C, ...).
        activation, slope: as for `inverted_norm`.
        overwrite: whether the result may be written over `x`, for callers who know that nobody else reads it. Compilers
            decide that for themselves.

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
        return _plainly(layer, x, activation, slope)  # which raises, or for which the op has no rules
    if isinstance(layer, _InstanceNorm):
        check_spatial_size(x)
    else:
        check_group_size(x, groups)
    arguments = (layer.weight, layer.bias, groups, layer.eps, activation, slope)
    if needs_dispatch((x,)):
        return inverted_norm(x, *arguments)[0]
    overwrite = overwrite and not x._is_view() and not (x.is_leaf and x.requires_grad)  # as torch's own in-place ops
    return _Eager.apply(x, overwrite and _is_swept(x), *arguments)[0]


def reconstruction_error(
    weight: torch.Tensor, bias: torch.Tensor | None, activation: str, dtype: torch.dtype
) -> torch.Tensor:
    """How far a normalised input that is recomputed from the result can be from what it was, (C,) float64.

    See `inverted_batch_norm.reconstruction_error`.
    """
    scale = at_least(weight.detach().double())
    return error_of(scale, None if bias is None else bias.detach().double(), activation, dtype)


def _plainly(layer: nn.Module, x: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """The same function by PyTorch's own ops, which save more."""
    scale = {} if layer.weight is None else {"weight": at_least(layer.weight)}  # type: ignore[arg-type]
    z: torch.Tensor = torch.func.functional_call(layer, scale, (x,))
    if activation == "identity":
        return z
    return F.elu(z, slope) if activation == "elu" else F.leaky_relu(z, slope)


def _is_swept(x: torch.Tensor) -> bool:
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


def _like(x: torch.Tensor) -> torch.Tensor:
    layout = torch.preserve_format if _is_swept(x) else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout)


def _forward_anew(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = _like(x)
    if y.stride() != x.stride():
        x = y.copy_(x)
    return y, *_forward(x, y, *arguments)


def _backward_anew(
    grad: torch.Tensor, y: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    result = torch.empty_like(y)
    if grad.stride() != y.stride():
        grad = result.copy_(grad)
    return result, *_backward(grad, result, y, *arguments)


def _planes(x: torch.Tensor) -> list[torch.Tensor]:
    """Views that cover it, (1, channels, ...), in which a channel is one of a sample."""
    if x.is_contiguous():
        return [x.view(1, x.shape[0] * x.shape[1], -1)]
    return list(x.split(1))


def _forward(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, channels = x.shape[:2]
    mean, variance = _statistics(x, groups)
    invstd = torch.rsqrt(variance + eps)
    scale, shift = _scale_and_shift(weight, bias, mean, channels)
    means, factors = (_of_planes(vector, channels) for vector in (mean, invstd))
    factors, shifts = factors * scale.repeat(samples), shift.repeat(samples)
    start = 0
    for source, target in zip(_planes(x), _planes(y), strict=True):
        ours = slice(start, start := start + source.shape[1])
        kernel = sweeps(source, target, activation)
        kernel.forward_into(source, target, means[ours], factors[ours], shifts[ours], activation, slope)
    return mean, invstd


def _statistics(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of the groups of each sample, (N, groups)."""
    samples, channels = x.shape[:2]
    if x.is_contiguous():
        mean, variance = channel_statistics(x.view(1, samples * groups, -1))
        return mean.view(samples, groups), variance.view(samples, groups)
    found = [channel_statistics(sample) for sample in x.split(1)]
    mean, variance = (torch.stack(vectors) for vectors in zip(*found, strict=True))
    if groups == channels:
        return mean, variance
    mean, variance = (vector.view(samples, groups, -1) for vector in (mean, variance))
    middle = mean.mean(2, keepdim=True)
    return middle.squeeze(2), (variance + (mean - middle).square()).mean(2)


def _of_planes(vector: torch.Tensor, channels: int) -> torch.Tensor:
    """(N, groups) as (N * channels,)."""
    return vector.repeat_interleave(channels // vector.shape[1], 1).view(-1)


def _scale_and_shift(
    weight: torch.Tensor | None, bias: torch.Tensor | None, like: torch.Tensor, channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = like.new_ones(channels) if weight is None else at_least(weight.to(like.dtype))
    return scale, like.new_zeros(channels) if bias is None else bias.to(like.dtype)


def _backward(
    grad: torch.Tensor,
    result: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    samples, channels = y.shape[:2]
    scale, shift = _scale_and_shift(weight, bias, invstd, channels)
    scales, shifts, factors = scale.repeat(samples), shift.repeat(samples), _of_planes(invstd, channels)
    in_group = channels // invstd.shape[1]
    start, found = 0, []
    for source, target, one in zip(_planes(grad), _planes(result), _planes(y), strict=True):
        ours = slice(start, start := start + one.shape[1])
        vectors = (scales[ours], shifts[ours], factors[ours])
        kernel = sweeps(source, one, activation)
        gradients = kernel.backward_into(source, target, one, *vectors, False, activation, slope, in_group=in_group)
        found.append(gradients)
    of_scale, of_shift = (torch.cat(parts).view(samples, channels).sum(0) for parts in zip(*found, strict=True))
    return (
        of_scale.to(invstd.dtype if weight is None else weight.dtype),
        of_shift.to(invstd.dtype if bias is None else bias.dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, weight, bias, *_, activation, slope = inputs
    y, mean, invstd = output
    ctx.options = (activation, slope)
    ctx.mark_non_differentiable(mean, invstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, weight, bias, invstd)


def _gradients(ctx: Any, grad: torch.Tensor | None, *unused: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    y, weight, bias, invstd = ctx.saved_tensors
    gradients = inverted_norm_backward if needs_dispatch((grad,)) else _backward_anew
    of_x, of_weight, of_bias = gradients(grad, y, weight, bias, invstd, *ctx.options)
    return of_x, of_weight if weight is not None else None, of_bias if bias is not None else None, *(None,) * 4


@inverted_norm.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, groups: int, *unused: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vector = x.new_empty((x.shape[0], groups), dtype=wide_of(x.dtype))
    return _like(x), vector, torch.empty_like(vector)


@inverted_norm_backward.register_fake
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    *unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vector = invstd.new_empty(y.shape[1])
    of_weight, of_bias = (torch.empty_like(vector if one is None else one) for one in (weight, bias))
    return torch.empty_like(y), of_weight, of_bias


inverted_norm.register_autograd(_gradients, setup_context=_setup)


class _Eager(torch.autograd.Function):
    """`inverted_norm` without the custom op's dispatch, and over its input: custom ops have no autograd there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, overwrite: bool, *arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        result = (forward_ if overwrite else _forward_anew)(x, *arguments)
        if overwrite:
            ctx.mark_dirty(x)
        _setup(ctx, (x, *arguments), result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        of_x, *others = _gradients(ctx, *grads)
        return of_x, None, *others
