"""A norm and its activation as one op that saves only its result (In-Place ABN: Rota Bulo, Porzi and Kontschieder,
CVPR'18; the invertible block of CPU offloading, section 3).

The input of a batch norm is saved only for its backward pass, and its result only for the activation's.
An activation with an inverse makes both unnecessary: the normalised input is reconstructed from the result of the pair,
which the next convolution saves anyway. So one tensor is saved where PyTorch saves two.

Instance norm and group norm are normalised by statistics of each sample: its groups of channels, or each channel by
itself. Their scales are the weights themselves, but none is nearer to zero than `MIN_SCALE`, so parameters mean what
they mean to PyTorch.

`inverted_batch_norm`, `inverted_norm` and their `..._backward` are custom ops of torch, `shoal::...`, single nodes for
compilers; `BATCH_NORM` and `SAMPLE_NORM` have the same over their first operand; `run` is a layer's call. The sweeps
are Triton's kernels on CUDA, native ones for float32 on the CPU, else pointwise ops of PyTorch, see `norm_sweeps`.
Known limits: no double backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.kernels.batch_norm_vectors import measures, move_statistics
from shoal.kernels.invertible_norm.inverted_op import InvertedOp, is_swept
from shoal.kernels.norm.norm_operands import wide
from shoal.lowlevel.torch_state import (
    check_batch_norm_input,
    check_batch_size,
    check_group_size,
    check_spatial_size,
    in_functorch,
)

MIN_SCALE = 1e-5
"""What stands for a scale nearer to zero, which could not be undone."""


def kept_from_zero(weight: Tensor, eps: float) -> Tensor:
    """The scale that is used for a weight (C,): as far from zero as |weight| + eps, on the weight's side; at 0, eps.

    In-Place ABN uses |weight| + eps itself. Any scale that is not zero can be undone, so the sign stays: a trained
    network with negative weights keeps its function. The derivative is 1 everywhere.

    >>> kept_from_zero(torch.tensor([1.0, 0.0, -0.5]), 0.25)
    tensor([ 1.2500,  0.2500, -0.7500])
    """
    return torch.where(weight < 0, weight - eps, weight + eps)


def at_least(weight: Tensor) -> Tensor:
    """The scale that is used for a weight (C,): itself, or `MIN_SCALE` on its side of zero. The derivative is 1.

    >>> at_least(torch.tensor([1.0, 0.0, -1e-9]))
    tensor([ 1.0000e+00,  1.0000e-05, -1.0000e-05])
    """
    return torch.where(weight < 0, weight.clamp(max=-MIN_SCALE), weight.clamp(min=MIN_SCALE))


BATCH_NORM = InvertedOp("inverted_batch_norm", kept_from_zero, of_samples=False)
inverted_batch_norm, inverted_batch_norm_backward = BATCH_NORM.op, BATCH_NORM.backward_op
"""Replaces `F.leaky_relu(F.batch_norm(x, mean, variance, scale, bias, ...), slope)` with a scale `kept_from_zero`.

Args:
    x: (N, C, ...) of any floating dtype, contiguous or channels_last.
    weight, bias: (C,), or None for 1 and 0.
    mean, variance: (C,) of running statistics to normalise by; None for those of the batch.
    eps: added to the variance, and to the scale's distance from zero.
    activation: "leaky_relu", "elu" or "identity".
    slope: LeakyReLU's negative slope or ELU's alpha, greater than 0.

Returns:
    The result, of the dtype and layout of `x`; mean and biased variance that it was normalised by, (C,) float32, or
    float64 for a float64 `x`.

The second takes the gradient of the result, the result, weight, bias, 1 / sqrt(variance + eps), whether the statistics
were given, and eps, activation and slope; it returns the gradients of x, weight and bias.
"""

SAMPLE_NORM = InvertedOp("inverted_norm", lambda weight, _: at_least(weight), of_samples=True)
inverted_norm, inverted_norm_backward = SAMPLE_NORM.op, SAMPLE_NORM.backward_op
"""Replaces `F.leaky_relu(F.group_norm(x, groups, weight, bias, eps), slope)`, and with as many groups as channels
`F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias, eps=eps), slope)`.

Args:
    x: (N, C, ...) of any floating dtype; other layouts than contiguous and channels_last become contiguous.
    weight, bias: (C,), or None for 1 and 0.
    groups: of channels, which share their statistics.
    eps: added to the variance.
    activation, slope: as of `inverted_batch_norm`.

Returns:
    The result, of the dtype of `x`; mean and 1 / sqrt(variance + eps), (N, groups) float32, or float64 for a float64
    `x`.

The second takes the gradient of the result, the result, weight, bias, the last vector, activation and slope; it returns
the gradients of x, weight and bias.
"""


def run(
    layer: _BatchNorm | _InstanceNorm | nn.GroupNorm, x: Tensor, activation: str, slope: float, overwrite: bool = False
) -> Tensor:
    """Call a norm and its activation in the inverted form.

    Replaces `activation(layer(x))`. Running statistics of a batch norm move as the layer's own call moves them, but
    once a step: not again when checkpointing repeats the forward pass. An empty batch, one of samples' norms without a
    batch dimension, and one under a transform of `torch.func` is computed by PyTorch's own ops.

    Args:
        layer: with its parameters, running statistics, momentum and mode; an instance norm without running statistics.
        x: (N, C, ...).
        activation, slope: as for `inverted_batch_norm`.
        overwrite: whether the result may be written over `x`, for callers who know that nothing else reads it.
            Compilers decide that for themselves.

    Raises:
        ValueError: as the layer: `x` has another number of dimensions, or one value for each mean.
        RuntimeError: as the layer: `x` has another number of channels.
    """
    if isinstance(layer, _BatchNorm):
        return _run_of_batch(layer, x, activation, slope, overwrite)
    if isinstance(layer, _InstanceNorm):
        check_batch_norm_input(layer, x)
        if x.dim() == layer._get_no_batch_dim():
            return run(layer, x.unsqueeze(0), activation, slope, overwrite).squeeze(0)
        groups, channels = x.shape[1], layer.num_features if layer.affine else x.shape[1]
    else:
        groups, channels = layer.num_groups, layer.num_channels
    if x.numel() == 0 or x.dim() < 2 or x.shape[1] != channels or in_functorch():
        return SAMPLE_NORM.by_pytorch(layer, x, activation, slope)  # which raises, or for which the op has no rules
    if isinstance(layer, _InstanceNorm):
        check_spatial_size(x)
    else:
        check_group_size(x, groups)
    arguments = (layer.weight, layer.bias, groups, layer.eps, activation, slope)
    return SAMPLE_NORM(x, overwrite and is_swept(x), *arguments)[0]


def _run_of_batch(layer: _BatchNorm, x: Tensor, activation: str, slope: float, overwrite: bool) -> Tensor:
    check_batch_norm_input(layer, x)
    if x.numel() == 0 or in_functorch():  # for which the op has no rules
        return BATCH_NORM.by_pytorch(layer, x, activation, slope)
    by_batch = measures(layer)
    if by_batch:
        check_batch_size(x)
    given = (None, None) if by_batch else (layer.running_mean, layer.running_var)
    y, mean, variance = BATCH_NORM(x, overwrite, layer.weight, layer.bias, *given, layer.eps, activation, slope)
    move_statistics(layer, mean, variance, x.numel() // x.shape[1])
    return y


def reconstruction_error(
    scale: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype, spread: float = 4.0
) -> Tensor:
    """How far a normalised input that is recomputed from the result can be from what it was.

    The result is rounded to its dtype, and that is all that is lost. A LeakyReLU keeps its relative accuracy whatever
    the slope; undoing the shift costs |bias| / |scale|, so that a channel whose scale is small compared with its shift
    is inexact. ELU flattens out: undoing it at z < 0 costs exp(-z).

    Args:
        scale: (C,), what the norm uses for its weight: see `kept_from_zero` and `at_least`.
        bias: (C,), or None.
        activation: as for `inverted_batch_norm`.
        dtype: of the activations.
        spread: how far from 0 the normalised inputs are.

    Returns:
        (C,) float64, an upper bound of the absolute error of the normalised input, which has variance 1.

    >>> error = reconstruction_error(torch.tensor([1.0, 1e-4]), torch.tensor([0.0, 1.0]), "leaky_relu", torch.float32)
    >>> [f"{e:.0e}" for e in error.tolist()]
    ['3e-06', '8e-03']
    """
    scale, bias = scale.detach().double().abs(), None if bias is None else bias.detach().double()
    reach = spread * scale if bias is None else spread * scale + bias.abs()
    # Rounded once to the dtype of the result; arithmetic there and back is in the wide one.
    rounding = torch.finfo(dtype).eps / 2 + 6 * torch.finfo(wide(dtype)).eps
    error = rounding * reach
    if activation == "elu":
        lowest = reach if bias is None else (spread * scale - bias).clamp(min=0)
        error = error + rounding * torch.expm1(lowest)
    return error / scale


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
