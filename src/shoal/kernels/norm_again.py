"""A norm and the activation after it, computed again in one sweep, with the bits that the two had by themselves.

What a norm made is seldom saved: the activation after it writes over it. Where the activation's result is recomputed,
the norm's would be made only for it, which reads and writes a large tensor once more. Here each piece of the input is
normalised and activated while it lies in L2, on CUDA in a register by one Triton kernel. On channels_last tensors, and
where that kernel is missing or has other bits, the activation writes over the whole normalised tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.kernels import batch_norm, group_norm, pieces
from shoal.kernels.memory_format import dense_strides
from shoal.kernels.norm.norm_operands import RELU, Activation, NormAffine
from shoal.kernels.norm.norm_sweeps_triton import TRITON
from shoal.kernels.pieces import TILE_ELEMS, TensorLayout, tiles
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register


class Norm(NamedTuple):
    """What a norm of (N, C, ...) reads: weight and bias, (C,) or None, and the statistics that it saved.

    Those of a batch norm are (C,), those of a group norm (N, groups).
    """

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    invstd: Tensor

    @property
    def is_of_groups(self) -> bool:
        return self.mean.dim() == 2


def activated(x: Tensor, *rest: Any) -> Tensor:
    """What leaky ReLU returned for the norm of `x`, given the statistics that the norm saved.

    Args:
        x: (N, C, ...), contiguous or channels_last.
        rest: what a `Norm` consists of; the slope below zero, 0 for a ReLU; the shape of the result, which is the
            normalised tensor seen in that shape.
    """
    *norm, slope, shape = rest
    made = Norm(*norm)
    return choose(_OP, x, made)(x, made, slope).view(shape)


def _by_pytorch(x: Tensor, norm: Norm, slope: float) -> Tensor:
    if not (x.is_cpu and x.is_contiguous() and x.dim() > 2):
        return _one_after_the_other(x, *norm, slope, None)
    kernels: Any = group_norm if norm.is_of_groups else batch_norm
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for some, into, scale, shift in tiles(x, y, *(line.expand_as(x) for line in kernels.lines(x, *norm))):
        _activation(slope).apply_(torch.addcmul(shift, some, scale, out=into))
    return y


def _triton_applies(x: Tensor, norm: Norm) -> bool:
    return x.dim() > 2 and x.is_contiguous() and TRITON.applies(_with_channels_of(norm, x))


def _by_triton(x: Tensor, norm: Norm, slope: float) -> Tensor:
    y = torch.empty_like(x)
    weight, bias, middle, factor = norm
    if norm.is_of_groups:  # (x - 0) * 1 has the bits of x: PyTorch's kernel multiplies by one scale for each
        lines: Any = group_norm.lines
        factor, bias = (line.reshape(-1) for line in lines(x, *norm))
        middle, weight = torch.zeros_like(factor), None
    affine = NormAffine(middle, factor, torch.zeros_like(middle) if bias is None else bias)
    source, into = _with_channels_of(norm, x), _with_channels_of(norm, y)
    TRITON.apply(source, affine, None, _activation(slope), into, factor=weight, rounded=True)
    return y


def _with_channels_of(norm: Norm, x: Tensor) -> Tensor:
    """`x` with a channel for each of those that have a line of their own: of a group norm, those of each sample."""
    return x.view(1, x.shape[0] * x.shape[1], -1) if norm.is_of_groups else x


def _activation(slope: float) -> Activation:
    return Activation("leaky_relu", slope) if slope else RELU


def repeats_bits(
    dtype: torch.dtype, device: torch.device, dims: int, of_groups: bool, slope: float, weight_dtype: torch.dtype | None
) -> bool:
    """Whether `activated` of contiguous tensors gives the bits of `normalise` and then the activation here.

    Found out on random data of odd size, in several pieces.

    Args:
        of_groups: whether it is a group norm's, not a batch norm's.
        weight_dtype: of weight and bias; None: there are none.
    """
    shape = (2, 4, *(TILE_ELEMS // 2 + 3, 3, 1)[: dims - 2])
    wide = dtype if of_groups or device.type == "cpu" else torch.float32  # of the statistics
    statistics = TensorLayout((2, 2), (2, 1), wide) if of_groups else TensorLayout((4,), (1,), wide)
    vector = None if weight_dtype is None else TensorLayout((4,), (1,), weight_dtype)
    x = TensorLayout(shape, dense_strides(shape, channels_last=False), dtype)
    arguments = (x, vector, vector, statistics, statistics, slope, shape)
    return pieces.repeats_bits(_one_after_the_other, activated, arguments, device=device)


def _one_after_the_other(x: Tensor, *rest: Any) -> Tensor:
    *norm, slope, _ = rest
    kernels: Any = group_norm if Norm(*norm).is_of_groups else batch_norm
    return _activation(slope).apply_(kernels.normalise(x, *norm))


_OP: DispatchedOp[Callable[..., Tensor]] = register(
    "activated_norm", _by_pytorch, Implementation("triton", _by_triton, _triton_applies)
)
