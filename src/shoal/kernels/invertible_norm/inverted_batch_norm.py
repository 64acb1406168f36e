"""Batch norm and its activation as one op that saves only its result (In-Place ABN: Rota Bulo, Porzi and Kontschieder,
CVPR'18; the invertible block of CPU offloading, section 3).

The input of a batch norm is saved only for its backward pass, and its result only for the activation's.
An activation with an inverse makes both unnecessary: the normalised input is reconstructed from the result of the pair,
which the next convolution saves anyway. So one tensor is saved where PyTorch saves two.

`inverted_batch_norm` and `inverted_batch_norm_backward` are custom ops of torch, `shoal::...`, single nodes for
compilers; `forward_` and `backward_` are the same over their first operand; `run` is a layer's call. The sweeps are
Triton's kernels on CUDA, native ones for float32 on the CPU, else pointwise ops of PyTorch, see
`inverted_batch_norm_sweeps`. Known limits: no double backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.kernels.batch_norm_vectors import measures, move_statistics
from shoal.kernels.invertible_norm.inverted_batch_norm_sweeps import sweeps
from shoal.kernels.norm import norm_sweeps
from shoal.kernels.norm.statistics import wide as wide_of
from shoal.lowlevel.direct_call import needs_dispatch
from shoal.lowlevel.torch_state import check_batch_norm_input, check_batch_size, in_functorch

_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? variance, float eps, str activation, float slope)"
    " -> (Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor y, Tensor? weight, Tensor? bias, Tensor invstd, bool frozen, float eps,"
    " str activation, float slope) -> (Tensor, Tensor, Tensor)"
)


def kept_from_zero(weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The scale that is used for a weight (C,): as far from zero as |weight| + eps, on the weight's side; at 0, eps.

    In-Place ABN uses |weight| + eps itself. Any scale that is not zero can be undone, so the sign stays: a trained
    network with negative weights keeps its function. The derivative is 1 everywhere.

    >>> kept_from_zero(torch.tensor([1.0, 0.0, -0.5]), 0.25)
    tensor([ 1.2500,  0.2500, -0.7500])
    """
    return torch.where(weight < 0, weight - eps, weight + eps)


def forward_(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`inverted_batch_norm` that writes over `x`."""
    return x, *_forward(x, x, weight, bias, mean, variance, eps, activation, slope)


@torch.library.custom_op("shoal::inverted_batch_norm", mutates_args=(), schema=_SCHEMA)
def inverted_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise, scale, shift and activate; saves the result and vectors for the backward pass.

    Replaces `F.leaky_relu(F.batch_norm(x, mean, variance, scale, bias, ...), slope)` with
    `scale = kept_from_zero(weight, eps)`.

    Args:
        x: (N, C, ...) of any floating dtype, contiguous or channels_last.
        weight, bias: (C,), or None for 1 and 0.
        mean, variance: (C,) of running statistics to normalise by; None for those of the batch.
        eps: added to the variance, and to the scale's distance from zero.
        activation: "leaky_relu", "elu" or "identity".
        slope: LeakyReLU's negative slope or ELU's alpha, greater than 0.

    Returns:
        The result, of the dtype and layout of `x`; mean and biased variance that it was normalised by, (C,) float32, or
        float64 for a float64 `x`. The last two carry no gradient.
    """
    return _forward_anew(x, weight, bias, mean, variance, eps, activation, slope)


@torch.library.custom_op("shoal::inverted_batch_norm_backward", mutates_args=(), schema=_BACKWARD_SCHEMA)
def inverted_batch_norm_backward(
    grad: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    frozen: bool,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `inverted_batch_norm`, from its result.

    Args:
        grad: of the result, (N, C, ...).
        y: the result.
        weight, bias, eps, activation, slope: as there.
        invstd: (C,), 1 / sqrt(variance + eps).
        frozen: whether the statistics were given; otherwise they depend on the input.

    Returns:
        Gradients of x, in the layout of `y`, and of weight and bias, (C,) of their dtypes.
    """
    return _backward_anew(grad, y, weight, bias, invstd, frozen, eps, activation, slope)


def backward_(
    grad: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    frozen: bool,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`inverted_batch_norm_backward` that writes the gradient of x over `grad`, which has the layout of `y`."""
    return grad, *_backward(grad, grad, y, weight, bias, invstd, frozen, eps, activation, slope)


def run(layer: _BatchNorm, x: torch.Tensor, activation: str, slope: float, overwrite: bool = False) -> torch.Tensor:
    """Call a batch norm layer and its activation in the inverted form.

    Replaces `activation(layer(x))`. Running statistics move as the layer's own call moves them, but once a step: not
    again when checkpointing repeats the forward pass. An empty batch, and one under a transform of `torch.func`, is
    computed by PyTorch's own ops.

    Args:
        layer: with its parameters, running statistics, momentum and mode.
        x: (N, C, ...).
        activation, slope: as for `inverted_batch_norm`.
        overwrite: whether the result may be written over `x`, for callers who know that nobody else reads it. Compilers
            decide that for themselves.

    Raises:
        ValueError: as the layer: `x` has another number of dimensions, or one value per channel in training mode.
    """
    check_batch_norm_input(layer, x)
    if x.numel() == 0 or in_functorch():  # for which the op has no rules
        return _plainly(layer, x, activation, slope)
    by_batch = measures(layer)
    if by_batch:
        check_batch_size(x)
    given = (None, None) if by_batch else (layer.running_mean, layer.running_var)
    arguments = (layer.weight, layer.bias, *given, layer.eps, activation, slope)
    if not needs_dispatch((x,)):
        overwrite = (
            overwrite and not x._is_view() and not (x.is_leaf and x.requires_grad)
        )  # as torch's own in-place ops
        y, mean, variance = _Eager.apply(x, overwrite, *arguments)
    else:
        y, mean, variance = inverted_batch_norm(x, *arguments)
    move_statistics(layer, mean, variance, x.numel() // x.shape[1])
    return y


def reconstruction_error(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    slope: float,
    dtype: torch.dtype,
    spread: float = 4.0,
) -> torch.Tensor:
    """How far a normalised input that is recomputed from the result can be from what it was.

    The result is rounded to its dtype, and that is all that is lost. A LeakyReLU keeps its relative accuracy whatever
    the slope; undoing the shift costs |bias| / |scale|, so that a channel whose scale is small beside its shift is
    inexact. ELU flattens out: undoing it at z < 0 costs exp(-z).

    Args:
        weight, bias: (C,).
        eps, activation, slope: as for `inverted_batch_norm`.
        dtype: of the activations.
        spread: how far from 0 the normalised inputs are.

    Returns:
        (C,) float64, an upper bound of the absolute error of the normalised input, which has variance 1.

    >>> weight, bias = torch.tensor([1.0, 1e-4]), torch.tensor([0.0, 1.0])
    >>> error = reconstruction_error(weight, bias, 0.0, "leaky_relu", 0.01, torch.float32)
    >>> [f"{e:.0e}" for e in error.tolist()]
    ['3e-06', '8e-03']
    """
    scale = kept_from_zero(weight.detach().double(), eps)
    return error_of(scale, None if bias is None else bias.detach().double(), activation, dtype, spread)


def error_of(
    scale: torch.Tensor, bias: torch.Tensor | None, activation: str, dtype: torch.dtype, spread: float = 4.0
) -> torch.Tensor:
    """`reconstruction_error` where the scales are known, (C,) float64."""
    wide, scale = wide_of(dtype), scale.abs()
    shift = torch.zeros_like(scale) if bias is None else bias.abs()
    reach = spread * scale + shift
    # Rounded once to the dtype of the result; arithmetic there and back is in the wide one.
    rounding = torch.finfo(dtype).eps / 2 + 6 * torch.finfo(wide).eps
    error = rounding * reach
    if activation == "elu":
        lowest = reach if bias is None else (spread * scale - bias).clamp(min=0)
        error = error + rounding * torch.expm1(lowest)
    return error / scale


def _plainly(layer: _BatchNorm, x: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """The same function by PyTorch's own ops, which save more."""
    scale = {} if layer.weight is None else {"weight": kept_from_zero(layer.weight, layer.eps)}
    z: torch.Tensor = torch.func.functional_call(layer, scale, (x,))
    if activation == "identity":
        return z
    return F.elu(z, slope) if activation == "elu" else F.leaky_relu(z, slope)


def _forward_anew(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty_like(x)
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


def _forward(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = wide_of(x.dtype)
    if mean is None or variance is None:
        mean, variance = channel_statistics(x)
    else:
        mean, variance = mean.to(wide, copy=True), variance.to(wide, copy=True)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * kept_from_zero(weight.to(wide), eps)
    shift = torch.zeros_like(mean) if bias is None else bias.to(wide)
    sweeps(x, y, activation).forward_into(x, y, mean, scale, shift, activation, slope)
    return mean, variance


def channel_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of the channels, (C,); nothing as large as `x` is allocated."""
    kernel = norm_sweeps.sweeps(x)
    if kernel is not None:
        return kernel.statistics(x)
    wide = wide_of(x.dtype)
    # PyTorch's own sums, without a result; wide if given wide running statistics, which momentum 0 leaves alone.
    given = (None, None) if x.dtype == wide else tuple(torch.zeros(2, x.shape[1], dtype=wide, device=x.device))
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, *given, 0.0)
    return mean, variance


def _backward(
    grad: torch.Tensor,
    result: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    frozen: bool,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = invstd.dtype
    ones = torch.ones_like(invstd)
    scale = ones if weight is None else kept_from_zero(weight.to(wide), eps)
    shift = torch.zeros_like(ones) if bias is None else bias.to(wide)
    of_weight, of_bias = sweeps(grad, y, activation).backward_into(
        grad, result, y, scale, shift, invstd, frozen, activation, slope
    )
    return (
        of_weight.to(wide if weight is None else weight.dtype),
        of_bias.to(wide if bias is None else bias.dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, weight, bias, mean, _, *options = inputs
    y, used_mean, variance = output
    ctx.frozen, ctx.options = mean is not None, tuple(options)
    ctx.mark_non_differentiable(used_mean, variance)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(y, weight, bias, torch.rsqrt(variance + options[0]))


def _gradients(
    ctx: Any, grad: torch.Tensor | None, *unused: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None, None, None]:
    if grad is None:
        return (None,) * 8
    y, weight, bias, invstd = ctx.saved_tensors
    gradients = inverted_batch_norm_backward if needs_dispatch((grad,)) else _backward_anew
    of_x, of_weight, of_bias = gradients(grad, y, weight, bias, invstd, ctx.frozen, *ctx.options)
    vectors = of_weight if weight is not None else None, of_bias if bias is not None else None
    return of_x, *vectors, None, None, None, None, None


@inverted_batch_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, *unused: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = wide_of(x.dtype)
    vector = x.new_empty((x.shape[1],), dtype=wide)
    return torch.empty_like(x), vector, torch.empty_like(vector)


@inverted_batch_norm_backward.register_fake
def _(
    grad: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    invstd: torch.Tensor,
    *unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vectors = (torch.empty_like(invstd if one is None else one) for one in (weight, bias))
    of_weight, of_bias = vectors
    return torch.empty_like(y), of_weight, of_bias


inverted_batch_norm.register_autograd(_gradients, setup_context=_setup)


class _Eager(torch.autograd.Function):
    """`inverted_batch_norm` without the custom op's dispatch, and over its input: custom ops have no autograd there."""

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
