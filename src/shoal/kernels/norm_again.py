"""A batch norm or group norm computed again from the statistics that it saved, perhaps with the activation after it.

PyTorch's CPU kernels normalise as `x * scale + shift` with `scale = invstd * weight` and `shift = bias - mean * scale`
of each channel, in a group norm of each sample and channel, each a fused multiply-add: `torch.addcmul` does the same
arithmetic in one pass, in place where the input has no later reader. On CUDA the second half of PyTorch's own batch
norm normalises again, also in place.

What a norm made is seldom saved: the activation after it writes over it. Where the activation's result is recomputed,
the norm's would be made only for it, which reads and writes a large tensor once more. In `activated` each piece of the
input is normalised and activated while it lies in L2, on CUDA in a register by one Triton kernel. On channels_last
tensors, and where that kernel is missing or has other bits, the activation writes over the whole normalised tensor.

`repeats_bits` and `activated_repeats_bits` test on this machine that the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.kernels import pieces
from shoal.kernels.memory_format import channels_last_format, dense_strides
from shoal.kernels.norm.norm_operands import RELU, Activation, NormAffine
from shoal.kernels.norm.norm_sweeps_triton import TRITON
from shoal.kernels.pieces import TILE_ELEMS, TensorLayout, of_odd_size, tiles
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register

_aten = torch.ops.aten


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """What a norm of `x` in training mode returned, given the statistics that it saved.

    Args:
        x: (N, C, ...), contiguous or channels_last.
        weight, bias: (C,), or None of a batch norm that has none.
        mean, invstd: of a batch norm (C,), of a group norm (N, groups).
    """
    if _has_second_half(x, mean):
        again: Tensor = _aten.batch_norm_elemt.default(x, weight, bias, mean, invstd, 0.0)
        return again
    layout = torch.contiguous_format if x.is_contiguous() else channels_last_format(x.dim())
    scale, shift = lines(x, weight, bias, mean, invstd)
    y, strides = torch.addcmul(shift, x, scale), torch.empty_like(x, memory_format=layout, device="meta").stride()
    return y if y.stride() == strides else y.as_strided(y.shape, strides)  # they differ along axes of one element


def normalise_(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """`normalise` that writes over `x`."""
    if _has_second_half(x, mean):
        return _aten.batch_norm_elemt.out(x, weight, bias, mean, invstd, 0.0, out=x)
    scale, shift = lines(x, weight, bias, mean, invstd)
    return torch.addcmul(shift, x, scale, out=x)


def lines(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift of each channel, (1, C, 1, ...), of a group norm of each sample and channel, (N, C, 1, ...)."""
    samples, channels = (mean.shape[0] if _is_of_groups(mean) else 1), x.shape[1]
    if _is_of_groups(mean) and weight is not None and bias is not None:
        groups = mean.shape[1]
        weight, bias = (vector.view(1, groups, -1) for vector in (weight, bias))
        mean, invstd = mean.unsqueeze(2).expand(samples, groups, channels // groups), invstd.unsqueeze(2)
    scale = invstd if weight is None else invstd * weight
    shift = torch.addcmul(torch.zeros_like(mean) if bias is None else bias, mean, scale, value=-1)
    shape = samples, channels, *[1] * (x.dim() - 2)
    return scale.view(shape), shift.view(shape)


def _is_of_groups(mean: Tensor) -> bool:
    return mean.dim() == 2


def _has_second_half(x: Tensor, mean: Tensor) -> bool:
    """Whether PyTorch has the second half of the norm as an op: CUDA's batch norm normalises by given statistics."""
    return x.device.type == "cuda" and not _is_of_groups(mean)


def repeats_bits(
    dtype: torch.dtype,
    device: torch.device,
    dims: int,
    channels: int,
    channels_last: bool,
    weight_dtype: torch.dtype | None,
    groups: int = 0,
) -> bool:
    """Whether `normalise` gives the bits of the norm here, found out on random data of odd size.

    Args:
        dtype, dims, channels, channels_last: of the input.
        weight_dtype: of weight and bias; None: there are none.
        groups: of a group norm; 0: it is a batch norm.
    """
    if weight_dtype not in (None, dtype) and (groups or device.type != "cuda"):
        return False
    x, vector = (
        of_odd_size(dtype, dims, channels, channels_last),
        TensorLayout((channels,), (1,), weight_dtype or dtype),
    )
    arguments = (x, *((vector, vector) if weight_dtype else (None, None)), groups)
    return pieces.repeats_bits(_normalised_twice, _normalised_again, arguments, device=device)


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> tuple[Tensor, ...]:
    """PyTorch's norm in training mode: result, mean and inverse deviation."""
    found: tuple[Tensor, ...]
    if groups:
        sizes = *x.shape[:2], x.shape[2:].numel(), groups
        found = _aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    else:
        found = _aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
    return found


def _normalised_twice(*arguments: Any) -> list[Tensor]:
    return 2 * [_forward(*arguments)[0]]


def _normalised_again(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> tuple[Tensor, Tensor]:
    _, mean, invstd = _forward(x, weight, bias, groups)
    return normalise(x, weight, bias, mean, invstd), normalise_(x, weight, bias, mean, invstd)


def activated(x: Tensor, *rest: Any) -> Tensor:
    """What leaky ReLU returned for the norm of `x`, given the statistics that the norm saved.

    Args:
        x: (N, C, ...), contiguous or channels_last.
        rest: what `normalise` takes after `x`; the slope below zero, 0 for a ReLU; the shape of the result, which is
            the normalised tensor seen in that shape.
    """
    *norm, slope, shape = rest
    return choose(_OP, x, *norm)(x, *norm, _activation(slope)).view(shape)


def _by_pytorch(x: Tensor, *rest: Any) -> Tensor:
    *norm, activation = rest
    if not (x.is_cpu and x.is_contiguous() and x.dim() > 2):
        return activation.apply_(normalise(x, *norm))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for some, into, scale, shift in tiles(x, y, *(line.expand_as(x) for line in lines(x, *norm))):
        activation.apply_(torch.addcmul(shift, some, scale, out=into))
    return y


def _triton_applies(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> bool:
    return x.dim() > 2 and x.is_contiguous() and TRITON.applies(_with_channels_of(mean, x))


def _by_triton(x: Tensor, *rest: Any) -> Tensor:
    weight, bias, middle, factor, activation = rest
    y = torch.empty_like(x)
    source, into = _with_channels_of(middle, x), _with_channels_of(middle, y)
    if _is_of_groups(middle):  # (x - 0) * 1 has the bits of x: PyTorch's kernel multiplies by one scale for each
        factor, bias = (line.reshape(-1) for line in lines(x, weight, bias, middle, factor))
        middle, weight = torch.zeros_like(factor), None
    affine = NormAffine(middle, factor, torch.zeros_like(middle) if bias is None else bias)
    TRITON.apply(source, affine, None, activation, into, factor=weight, rounded=True)
    return y


def _with_channels_of(mean: Tensor, x: Tensor) -> Tensor:
    """`x` with a channel for each of those that have a line of their own: of a group norm, those of each sample."""
    return x.view(1, x.shape[0] * x.shape[1], -1) if _is_of_groups(mean) else x


def _activation(slope: float) -> Activation:
    return Activation("leaky_relu", slope) if slope else RELU


def activated_repeats_bits(
    dtype: torch.dtype, device: torch.device, dims: int, of_groups: bool, slope: float, weight_dtype: torch.dtype | None
) -> bool:
    """Whether `activated` of contiguous tensors gives the bits of `normalise` and then the activation here.

    Found out on random data of odd size, in several pieces.

    Args:
        dtype, dims: of the input.
        of_groups: whether it is a group norm's, not a batch norm's.
        slope: below zero.
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
    return _activation(slope).apply_(normalise(x, *norm))


_OP: DispatchedOp[Callable[..., Tensor]] = register(
    "activated_norm", _by_pytorch, Implementation("triton", _by_triton, _triton_applies)
)
