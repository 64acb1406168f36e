"""Tensors as they lie in memory: which dimension steps furthest, and their elements one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dims_by_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from the one that steps furthest to the one that steps least.

    >>> dims_by_stride(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    (0, 2, 3, 1)
    """
    # A dimension of size one, whose stride means nothing, stands inside of one that steps as far.
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], -tensor.shape[dim], dim)))


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions step in this order, the furthest first.

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
    dense = strides_in_order(tensor.shape, dims_by_stride(tensor))
    return tensor if same_places(tensor.shape, tensor.stride(), dense) else tensor.contiguous()


def same_places(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether elements lie at the same places under either strides."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, strides, others, strict=True))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps as they lie in memory, (n,): a view."""
    return tensor.as_strided((tensor.numel(),), (1,))
