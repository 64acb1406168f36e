"""Group norm in fewer bytes and the same bits: its result recomputed from its statistics, its gradient in place.

PyTorch's CPU kernel normalises as `x * scale + shift`, a fused multiply-add with a scale and a shift for each sample
and channel: `torch.addcmul` does the same arithmetic in one pass, in place where the input has no later reader. Its
backward kernel allocates the gradient of the input. Groups are independent there, so it is called for the gradients
of weight and bias only, which allocates next to nothing, and then for the input's some groups at a time, over the
incoming gradient. In channels_last PyTorch 2.13 crashes where not all three gradients are asked for, so its kernel
stays there. `repeats_bits` and `backward_repeats_bits` test on this machine that the bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.kernels import pieces
from shoal.kernels.batch_norm import Gradients, scaled
from shoal.kernels.pieces import TensorLayout, of_odd_size

_PIECE_ELEMS = 1 << 18  # 1 MiB of float32: a piece stays in L2 until it is copied


def normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """What `torch.group_norm` returned for `x`, (N, C, ...), given the statistics it saved, each (N, groups).

    `x` is contiguous or channels_last; `weight` and `bias` are (C,).
    """
    return scaled(x, *lines(x, weight, bias, mean, invstd))


def normalise_(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:
    """`normalise` that writes over `x`."""
    scale, shift = lines(x, weight, bias, mean, invstd)
    return torch.addcmul(shift, x, scale, out=x)


def backward(grad: Tensor, x: Tensor, *vectors: Tensor) -> Gradients:
    """Group norm's backward of contiguous tensors: gradients of input, weight and bias.

    `vectors`: weight, mean and invstd.
    """
    return _backward(grad, x, *vectors, wanted=[True, True, True])


def backward_(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor) -> Gradients:
    """`backward` that writes the gradient of the input over `grad`."""
    if not (grad.is_contiguous() and x.is_contiguous()):
        of_input, of_weight, of_bias = backward(grad, x, weight, mean, invstd)
        return grad.copy_(of_input), of_weight, of_bias
    piece_groups = _PIECE_ELEMS * x.shape[0] * mean.shape[1] // max(1, x.numel())
    return backward_in_pieces(grad, x, weight, mean, invstd, max(1, piece_groups))


def backward_in_pieces(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, step: int) -> Gradients:
    """`backward_` of contiguous tensors, `step` groups of one sample at a time."""
    _, of_weight, of_bias = _backward(grad, x, weight, mean, invstd, wanted=[False, True, True])
    samples, channels, groups = x.shape[0], x.shape[1], mean.shape[1]
    in_group = channels // groups
    for sample in range(samples):
        one = slice(sample, sample + 1)
        for group in range(0, groups, step):
            some, of_some = slice(group, group + step), slice(group * in_group, (group + step) * in_group)
            piece = grad[one, of_some]
            statistics = mean[one, some].contiguous(), invstd[one, some].contiguous()
            operands = (piece, x[one, of_some], weight[of_some], *statistics)
            piece.copy_(_backward(*operands, wanted=[True, False, False])[0])
    return grad, of_weight, of_bias


def _backward(grad: Tensor, x: Tensor, *vectors: Tensor, wanted: list[bool]) -> Gradients:
    weight, mean, invstd = vectors
    sizes = x.shape[0], x.shape[1], x.shape[2:].numel(), mean.shape[1]
    found: Gradients = torch.ops.aten.native_group_norm_backward(grad, x, mean, invstd, weight, *sizes, wanted)
    return found


def lines(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift of each sample and channel, each (N, C, 1, ...)."""
    samples, channels, groups = x.shape[0], x.shape[1], mean.shape[1]
    in_groups = (samples, groups, channels // groups)
    scale = invstd.unsqueeze(2) * weight.view(1, *in_groups[1:])
    shift = torch.addcmul(bias.view(1, *in_groups[1:]), mean.unsqueeze(2).expand(in_groups), scale, value=-1)
    shape = (samples, channels, *[1] * (x.dim() - 2))
    return scale.view(shape), shift.view(shape)


def repeats_bits(
    dtype: torch.dtype, device: torch.device, dims: int, channels: int, groups: int, channels_last: bool
) -> bool:
    """Whether `normalise` gives the bits of group norm here, found out on random data of odd size."""
    x, vector = of_odd_size(dtype, dims, channels, channels_last), TensorLayout((channels,), (1,), dtype)
    arguments = (x, vector, vector, groups)
    return pieces.repeats_bits(_normalised_twice, _normalised_again, arguments, device=device)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, ...]:
    """PyTorch's group norm: result, mean and inverse deviation."""
    sizes = *x.shape[:2], x.shape[2:].numel(), groups
    found: tuple[Tensor, ...] = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    return found


def _normalised_twice(*arguments: Any) -> list[Tensor]:
    return 2 * [_forward(*arguments)[0]]


def _normalised_again(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    _, *statistics = _forward(x, weight, bias, groups)
    return normalise(x, weight, bias, *statistics), normalise_(x, weight, bias, *statistics)


def backward_repeats_bits(dtype: torch.dtype, device: torch.device, dims: int, channels: int, groups: int) -> bool:
    """Whether `backward_` gives the bits of group norm's backward here, found out on random data of odd size."""
    x, vector = of_odd_size(dtype, dims, channels), TensorLayout((channels,), (1,), dtype)
    statistics = TensorLayout((x.shape[0], groups), (groups, 1), dtype)
    arguments = (x, x, vector, statistics, statistics)
    return pieces.repeats_bits(backward, _backward_by_single_groups, arguments, device=device)


def _backward_by_single_groups(grad: Tensor, *operands: Any) -> Gradients:
    x, weight, mean, invstd = operands
    return backward_in_pieces(grad.clone(), x, weight, mean, invstd, 1)
