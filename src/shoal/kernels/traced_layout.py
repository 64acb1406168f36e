"""A tensor in the layout that the trace gave it, where a kernel returned another."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def in_traced_layout(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """`x` with the strides given: `x` itself where it has them, a view where a view can have them, else a copy."""
    if x.stride() == tuple(strides):
        return x
    return x.as_strided(x.shape, tuple(strides)) if is_same_order(x, strides) else copied(x, strides)


def copied(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of `x` with the strides given."""
    return torch.empty_strided(x.shape, tuple(strides), dtype=x.dtype, device=x.device).copy_(x)


def is_same_order(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the strides lead to the same elements as those of `x`: along an axis of one element any stride does."""
    axes = zip(x.shape, x.stride(), strides, strict=True)
    return x.numel() == 0 or all(size == 1 or own == other for size, own, other in axes)


def is_writable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of this shape with these strides has an address of its own for every element."""
    span = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < span:
            return False
        span += stride * (size - 1)
    return True
