"""Memory formats and strides: which a tensor has, and conversions between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shoal.codecs.memory_order import same_places, strides_in_order


def channels_last_format(dims: int) -> torch.memory_format:
    """The channels_last format of tensors of four or five dimensions.

    >>> channels_last_format(5)
    torch.channels_last_3d
    """
    return torch.channels_last if dims == 4 else torch.channels_last_3d


def memory_format_of(*tensors: Tensor) -> torch.memory_format:
    """channels_last where one of the tensors is, or is a slice of one that is, and is not contiguous as well.

    So does PyTorch's batch norm lay its result out.

    >>> x = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    >>> memory_format_of(x), memory_format_of(x[:, :2]), memory_format_of(x.contiguous())
    (torch.channels_last, torch.channels_last, torch.contiguous_format)
    """
    return suggested_memory_format(*(x for x in tensors if not x.is_contiguous()))


def suggested_memory_format(*tensors: Tensor) -> torch.memory_format:
    """channels_last where the strides of one of the tensors are such, even if it is contiguous as well.

    So does PyTorch's convolution lay its result out, of its input and its weight. It is `Tensor::suggest_memory_format`
    of ATen (c10/core/MemoryFormat.h), which Python does not have.

    >>> suggested_memory_format(torch.ones(2, 1, 4, 5).to(memory_format=torch.channels_last))
    torch.channels_last
    """
    for x in tensors:
        if x.dim() in (4, 5) and _strides_are_channels_last(x):
            return channels_last_format(x.dim())
    return torch.contiguous_format


def are_channels_last(*tensors: Tensor) -> bool:
    """Whether tensors are (N, C, H, W) or (N, C, D, H, W), and dense with a pixel's channels side by side.

    >>> are_channels_last(torch.ones(2, 1, 4, 5)), are_channels_last(torch.ones(2, 3, 4, 5))
    (True, False)
    """
    return all(x.dim() in (4, 5) and x.is_contiguous(memory_format=channels_last_format(x.dim())) for x in tensors)


def dense_in_format(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """`x`, or a copy: dense, and with the strides of that format also along dimensions of one element."""
    dense = x.contiguous(memory_format=memory_format)
    return (
        dense
        if suggested_memory_format(dense) == memory_format
        else torch.empty_like(dense, memory_format=memory_format).copy_(dense)
    )


def in_format(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """`x`, or a copy where it has another format or was expanded; a slice of a tensor of that format stays."""
    expanded = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if memory_format_of(x) == memory_format and not expanded else x.contiguous(memory_format=memory_format)


def dense_strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Of a tensor without gaps, contiguous or channels_last.

    >>> dense_strides((2, 3, 4, 5), True)
    (60, 1, 15, 3)
    """
    return strides_in_order(shape, [0, *range(2, len(shape)), 1] if channels_last else range(len(shape)))


def row_stride(x: Tensor) -> int | None:
    """Elements from pixel to pixel of `x`, (N, C, ...), in NHWC order without gaps between its rows; else None.

    >>> x = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    >>> row_stride(x), row_stride(x[:, :2]), row_stride(x[:, :, :2]), row_stride(x.contiguous())
    (3, 3, None, None)
    """
    images, channels, *sides = x.shape
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return channels
    over_images, over_channels, *over_sides = x.stride()
    if channels > 1 and over_channels != 1:
        return None
    found = run_stride([images, *sides], [over_images, *over_sides])
    if found == 0:
        return channels
    return found if found is not None and found >= channels else None


def run_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from one to the next where dimensions lie in one run, the last fastest; 0 for one element, else None."""
    found, span = 0, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if not stride or (span and stride != span):
            return None
        found, span = found or stride, stride * size
    return found


def in_traced_layout(x: Tensor, strides: Sequence[int]) -> Tensor:
    """`x` with the strides given: `x` itself where it has them, a view where a view can have them, else a copy."""
    strides, own = tuple(strides), x.stride()
    if own == strides:
        return x
    return x.as_strided(x.shape, strides) if _are_same_order(x.shape, own, strides) else copied(x, strides)


def copied(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of `x` with the strides given."""
    return torch.empty_strided(x.shape, tuple(strides), dtype=x.dtype, device=x.device).copy_(x)


def is_same_order(x: Tensor, strides: Sequence[int]) -> bool:
    """Whether the strides lead to the same elements as those of `x`: along an axis of one element any stride does."""
    return _are_same_order(x.shape, x.stride(), tuple(strides))


@lru_cache(4096)  # asked in every step, for each weight of a convolution over single pixels
def _are_same_order(shape: tuple[int, ...], own: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return same_places(shape, own, others)


def is_writable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of this shape with these strides has an address of its own for every element."""
    span = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < span:
            return False
        span += stride * (size - 1)
    return True


def _strides_are_channels_last(x: Tensor) -> bool:
    lowest = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        size, stride = x.shape[dim], x.stride(dim)
        if size == 0 or stride < lowest or (dim == 0 and lowest == x.stride(1)):
            return False
        lowest = stride * size
    return x.stride(1) > 0
