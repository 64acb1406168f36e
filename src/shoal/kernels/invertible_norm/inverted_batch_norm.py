"""Batch norm and its activation as one op that saves only its result (In-Place ABN: Rota Bulo, Porzi and Kontschieder,
CVPR'18; the invertible block of CPU offloading, section 3).

The input of a batch norm is saved only for its backward pass, and its result only for the activation's.
An activation with an inverse makes both unnecessary: the normalised input is reconstructed from the result of the pair,
which the next convolution saves anyway. So one tensor is saved where PyTorch saves two.

`inverted_batch_norm` and `inverted_batch_norm_backward` are custom ops of torch, `shoal::...`, single nodes for
compilers; `forward_` and `backward_` are the same over their first operand; `run` is a layer's call. The sweeps are
Triton's kernels on CUDA, native ones for float32 on the CPU, else pointwise ops of PyTorch, see
`norm_sweeps`. Known limits: no double backward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.kernels.batch_norm_vectors import measures, move_statistics
from shoal.kernels.invertible_norm.inverted_op import InvertedOp
from shoal.kernels.norm.norm_operands import wide
from shoal.lowlevel.torch_state import check_batch_norm_input, check_batch_size, in_functorch


def kept_from_zero(weight: Tensor, eps: float) -> Tensor:
    """The scale that is used for a weight (C,): as far from zero as |weight| + eps, on the weight's side; at 0, eps.

    In-Place ABN uses |weight| + eps itself. Any scale that is not zero can be undone, so the sign stays: a trained
    network with negative weights keeps its function. The derivative is 1 everywhere.

    >>> kept_from_zero(torch.tensor([1.0, 0.0, -0.5]), 0.25)
    tensor([ 1.2500,  0.2500, -0.7500])
    """
    return torch.where(weight < 0, weight - eps, weight + eps)


_OP = InvertedOp("inverted_batch_norm", kept_from_zero, of_samples=False)
inverted_batch_norm, inverted_batch_norm_backward = _OP.op, _OP.backward_op
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
forward_, backward_ = _OP.forward_, _OP.backward_


def run(layer: _BatchNorm, x: Tensor, activation: str, slope: float, overwrite: bool = False) -> Tensor:
    """Call a batch norm layer and its activation in the inverted form.

    Replaces `activation(layer(x))`. Running statistics move as the layer's own call moves them, but once a step: not
    again when checkpointing repeats the forward pass. An empty batch, and one under a transform of `torch.func`, is
    computed by PyTorch's own ops.

    Args:
        layer: with its parameters, running statistics, momentum and mode.
        x: (N, C, ...).
        activation, slope: as for `inverted_batch_norm`.
        overwrite: whether the result may be written over `x`, for callers who know that nothing else reads it.
            Compilers decide that for themselves.

    Raises:
        ValueError: as the layer: `x` has another number of dimensions, or one value per channel in training mode.
    """
    check_batch_norm_input(layer, x)
    if x.numel() == 0 or in_functorch():  # for which the op has no rules
        return _OP.by_pytorch(layer, x, activation, slope)
    by_batch = measures(layer)
    if by_batch:
        check_batch_size(x)
    given = (None, None) if by_batch else (layer.running_mean, layer.running_var)
    y, mean, variance = _OP(x, overwrite, layer.weight, layer.bias, *given, layer.eps, activation, slope)
    move_statistics(layer, mean, variance, x.numel() // x.shape[1])
    return y


def reconstruction_error(
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    activation: str,
    slope: float,
    dtype: torch.dtype,
    spread: float = 4.0,
) -> Tensor:
    """How far a normalised input that is recomputed from the result can be from what it was.

    The result is rounded to its dtype, and that is all that is lost. A LeakyReLU keeps its relative accuracy whatever
    the slope; undoing the shift costs |bias| / |scale|, so that a channel whose scale is small compared with its shift
    is inexact. ELU flattens out: undoing it at z < 0 costs exp(-z).

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


def error_of(scale: Tensor, bias: Tensor | None, activation: str, dtype: torch.dtype, spread: float = 4.0) -> Tensor:
    """`reconstruction_error` where the scales are known, (C,) float64."""
    scale = scale.abs()
    shift = torch.zeros_like(scale) if bias is None else bias.abs()
    reach = spread * scale + shift
    # Rounded once to the dtype of the result; arithmetic there and back is in the wide one.
    rounding = torch.finfo(dtype).eps / 2 + 6 * torch.finfo(wide(dtype)).eps
    error = rounding * reach
    if activation == "elu":
        lowest = reach if bias is None else (spread * scale - bias).clamp(min=0)
        error = error + rounding * torch.expm1(lowest)
    return error / scale
