"""Tensors as the native batch norm kernels see them: float32 pixels in NHWC order, a number of floats apart.

No magic: all it does is read strides and fill in addresses for `csrc/shoal_native.h`.
"""

from __future__ import annotations

import torch

from shoal.lowlevel.native import bytes_needed


def row_stride(x: torch.Tensor) -> int | None:
    """Floats from pixel to pixel of `x`, (N, C, H, W), in NHWC order without gaps between its rows; else None.

    >>> row_stride(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    3
    >>> row_stride(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)[:, :2])
    3
    >>> row_stride(torch.ones(2, 3, 4, 5))
    """
    if x.dim() != 4 or x.dtype != torch.float32 or not x.is_cpu or x.layout != torch.strided:
        return None
    if x.numel() == 0:
        return None
    images, channels, height, width = x.shape
    if x.is_contiguous(memory_format=torch.channels_last):
        return channels
    over_images, over_channels, over_rows, over_columns = x.stride()
    if channels > 1 and over_channels != 1:
        return None
    # A dimension of size one may have any stride: the first longer one decides.
    if width > 1:
        found = over_columns
    elif height > 1:
        found = over_rows
    else:
        found = over_images if images > 1 else channels
    fits = (
        found >= channels
        and (height == 1 or over_rows == width * found)
        and (images == 1 or over_images == height * width * found)
    )
    return found if fits else None


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a channels_last copy where the kernels cannot read it."""
    if row_stride(x) is not None:
        return x
    return x.to(torch.float32).contiguous(memory_format=torch.channels_last)


def empty_rows(images: int, channels: int, height: int, width: int) -> torch.Tensor:
    """A dense channels_last tensor."""
    return torch.empty((images, channels, height, width), memory_format=torch.channels_last)


def vector(values: torch.Tensor) -> torch.Tensor:
    """`values`, (C,), dense and in float32."""
    if values.dtype == torch.float32 and values.is_contiguous():
        return values
    return values.detach().float().contiguous()


def address(tensor: torch.Tensor | None) -> int | None:
    """Its address; null for None."""
    return None if tensor is None else tensor.data_ptr()


def workspace(name: str, *arguments: object) -> torch.Tensor:
    """Memory of torch's own allocator, that of the step's budget, as much as a function of the library counts."""
    return torch.empty(max(bytes_needed(name, *arguments), 1), dtype=torch.uint8)
