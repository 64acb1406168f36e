"""Tensors in memory order: their dimensions by decreasing stride, and their elements one after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch


def dims_by_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions by decreasing stride.

    >>> dims_by_stride(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    (0, 2, 3, 1)
    """
    return _by_stride(tensor.shape, tensor.stride())


def _by_stride(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    # A dimension of size one, whose stride means nothing, comes after one of the same stride.
    return tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim], dim)))


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions have this order, by decreasing stride.

    >>> strides_in_order((2, 3, 4, 5), (0, 2, 3, 1))
    (60, 1, 15, 3)
    """
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where its elements fill a range of memory once each, else a contiguous copy."""
    shape, strides = tensor.shape, tensor.stride()
    return tensor if same_places(shape, strides, strides_without_gaps(shape, strides)) else tensor.contiguous()


@lru_cache(1024)  # a network's tensors come again with every step
def strides_without_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions have the order of these.

    >>> strides_without_gaps((2, 3), (10, 1)), strides_without_gaps((2, 3), (1, 10))
    ((3, 1), (1, 2))
    """
    return strides_in_order(shape, _by_stride(shape, strides))


def same_places(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether elements lie at the same places under either strides."""
    return (
        strides == others
        or 0 in shape
        or all(size == 1 or a == b for size, a, b in zip(shape, strides, others, strict=True))
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory, (n,): a view."""
    if tensor.dim() == 1 and tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))
