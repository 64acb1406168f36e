"""Instance norm or group norm and an invertible activation as one op that saves only its result.

As `inverted_batch_norm`, by statistics of each sample: its groups of channels, or each channel by itself. The scales
are the weights themselves, but none is nearer to zero than `MIN_SCALE`, so parameters mean what they mean to PyTorch.
Known limits: no double backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.kernels.invertible_norm.inverted_batch_norm import error_of
from shoal.kernels.invertible_norm.inverted_op import InvertedOp, is_swept
from shoal.lowlevel.torch_state import check_batch_norm_input, check_group_size, check_spatial_size, in_functorch

MIN_SCALE = 1e-5
"""What stands for a scale nearer to zero, which could not be undone."""


def at_least(weight: Tensor) -> Tensor:
    """The scale that is used for a weight (C,): itself, or `MIN_SCALE` on its side of zero. The derivative is 1.

    >>> at_least(torch.tensor([1.0, 0.0, -1e-9]))
    tensor([ 1.0000e+00,  1.0000e-05, -1.0000e-05])
    """
    return torch.where(weight < 0, weight.clamp(max=-MIN_SCALE), weight.clamp(min=MIN_SCALE))


_OP = InvertedOp("inverted_norm", lambda weight, _: at_least(weight), of_samples=True)
inverted_norm, inverted_norm_backward = _OP.op, _OP.backward_op
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
        return _OP.by_pytorch(layer, x, activation, slope)  # which raises, or for which the op has no rules
    if isinstance(layer, _InstanceNorm):
        check_spatial_size(x)
    else:
        check_group_size(x, groups)
    arguments = (layer.weight, layer.bias, groups, layer.eps, activation, slope)
    return _OP(x, overwrite and is_swept(x), *arguments)[0]


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
