"""Tensors as a norm's kernels see them: pixels in NHWC order, or planes in NCHW order, a number of elements apart.

No magic: all it does is read strides and fill in addresses for `csrc/shoal_native.h`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.kernels.memory_format import row_stride, run_stride
from shoal.lowlevel.native import bytes_needed, run_native

_MAX_SPAN_ELEMS = 2**31  # that the addresses of a tile of Triton's kernels may span
_MAX_LEADING_STRIDE = _MAX_SPAN_ELEMS // 2048
_OF_PIXELS = ("x", "y", "grad_x", "grad_y")  # of a fused convolution


def native_row_stride(x: Tensor) -> int | None:
    """`row_stride` of what native kernels read: (N, C, H, W) in float32 on the CPU; else None."""
    if x.dim() != 4 or x.dtype != torch.float32 or not x.is_cpu or x.layout != torch.strided or x.numel() == 0:
        return None
    return row_stride(x)


def is_channels_last(*tensors: Tensor) -> bool | None:
    """Which of the two layouts all have; None for neither."""
    if tensors[0].dim() < 2 or not tensors[0].numel():
        return None
    strides = [leading_strides(x.shape, x.stride()) for x in tensors]
    if None not in (pixels for pixels, _ in strides):
        return True
    return None if None in (images for _, images in strides) else False


@lru_cache(4096)  # asked several times in every pass
def leading_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Elements from pixel to pixel in channels_last, and from image to image in contiguous order; None in neither.

    >>> leading_strides((2, 3, 4, 5), (60, 20, 5, 1)), leading_strides((2, 2, 4, 5), (60, 20, 5, 1))
    ((None, 60), (None, 60))
    """
    of_pixels = row_stride(torch.empty_strided(shape, stride, device="meta"))
    images, channels, *sides = shape
    over_images, over_channels, *over_sides = stride
    pixels = prod(sides)
    of_images = over_images if images > 1 else channels * pixels
    if run_stride(sides, over_sides) not in (0, 1) or (channels > 1 and over_channels != pixels):
        of_images = 0
    fits = channels * pixels <= of_images and channels * pixels < _MAX_SPAN_ELEMS
    return (of_pixels if of_pixels and of_pixels < _MAX_LEADING_STRIDE else None), of_images if fits else None


def strides_of(x: Tensor, *others: Tensor | None) -> tuple[bool, list[int]]:
    """Whether tensors of one shape are channels_last, else contiguous, and of each its `leading_strides` so; 0 of None.

    Raises:
        InputError: they differ in shape or layout.
    """
    given = [x, *(other for other in others if other is not None)]
    if any(other.shape != x.shape for other in given):
        raise InputError(f"{[tuple(other.shape) for other in given]}; give tensors of one shape")
    channels_last = is_channels_last(*given)
    if channels_last is None:
        raise InputError(f"strides {[t.stride() for t in given]}; give tensors all channels_last or all contiguous")
    return channels_last, [
        0 if t is None else leading_strides(t.shape, t.stride())[not channels_last] or 0 for t in (x, *others)
    ]


def in_rows(x: Tensor) -> Tensor:
    """`x`, or a channels_last copy where the kernels cannot read it."""
    if native_row_stride(x) is not None:
        return x
    return x.to(torch.float32).contiguous(memory_format=torch.channels_last)


def empty_rows(images: int, channels: int, height: int, width: int) -> Tensor:
    """A dense channels_last tensor."""
    return torch.empty((images, channels, height, width), memory_format=torch.channels_last)


def vector(values: Tensor) -> Tensor:
    """`values`, (C,), dense and in float32."""
    if values.dtype == torch.float32 and values.is_contiguous():
        return values
    return values.detach().float().contiguous()


def point(call: Any, **tensors: Tensor | None) -> None:
    """Fill in addresses, and the row strides of tensors of pixels; None is null. The call keeps the tensors alive."""
    call.__dict__.setdefault("kept", []).append(tensors)
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(call, name, tensor.data_ptr())
            if name in _OF_PIXELS:
                setattr(call, f"ld_{name}", native_row_stride(tensor))


def run_in_workspace(name: str, call: Any, counts: str, *which: int) -> None:
    """Call a function of the library with memory of torch's own allocator, that of the step's budget.

    Args:
        name: of the function.
        call: its arguments, a structure with the memory's address in `workspace`.
        counts: the function that counts its bytes, of `call` and `which`.
    """
    space = torch.empty(max(bytes_needed(counts, ctypes.byref(call), *which), 1), dtype=torch.uint8)
    call.workspace = space.data_ptr()
    run_native(name, call)
