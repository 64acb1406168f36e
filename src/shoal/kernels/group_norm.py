"""Group norm's gradient over the incoming one, with the bits of PyTorch's CPU kernel, which allocates it.

Groups are independent in the gradient of the input, so the kernel is called for the gradients of weight and bias only,
which allocates next to nothing, and then for the input's some groups at a time. In channels_last PyTorch 2.13 crashes
where not all three gradients are asked for, so its kernel stays there. `backward_repeats_bits` tests on this machine
that the bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.kernels import pieces
from shoal.kernels.batch_norm import Gradients
from shoal.kernels.pieces import TensorLayout, of_odd_size

_PIECE_ELEMS = 1 << 18  # 1 MiB of float32: a piece stays in L2 until it is copied


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


def backward_repeats_bits(dtype: torch.dtype, device: torch.device, dims: int, channels: int, groups: int) -> bool:
    """Whether `backward_` gives the bits of group norm's backward here, found out on random data of odd size."""
    x, vector = of_odd_size(dtype, dims, channels), TensorLayout((channels,), (1,), dtype)
    statistics = TensorLayout((x.shape[0], groups), (groups, 1), dtype)
    arguments = (x, x, vector, statistics, statistics)
    return pieces.repeats_bits(backward, _backward_by_single_groups, arguments, device=device)


def _backward_by_single_groups(grad: Tensor, *operands: Any) -> Gradients:
    x, weight, mean, invstd = operands
    return backward_in_pieces(grad.clone(), x, weight, mean, invstd, 1)
