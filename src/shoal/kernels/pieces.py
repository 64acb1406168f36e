"""Shared by ops that are computed in pieces: how one is cut, and whether pieces give the bits of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.lowlevel.torch_internals import isolated

WORTH_PIECES_BYTES = 4 << 20
"""Tensors and scratch smaller than this are not cut."""


@dataclass(frozen=True)
class Cut:
    """How something is cut: along which dimension, into how many pieces, and how much less memory they take.

    `reordered`: sums are in another order than those of the whole, and so their bits others.
    """

    dim: int
    count: int
    saved_bytes: int
    reordered: bool = False


def spans(length: int, pieces: int) -> Iterator[slice]:
    """Slices that cut a length into at most `pieces` parts; the last may be shorter.

    >>> list(spans(5, 2))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    step = -(-length // pieces)
    return (slice(begin, min(length, begin + step)) for begin in range(0, length, step))


def are_sizes_known(*tensors: torch.Tensor) -> bool:
    """Whether all shapes and strides are integers: those of fake tensors may be symbolic."""
    return all(type(size) is int for tensor in tensors for size in (*tensor.shape, *tensor.stride()))


def have_same_bits(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> bool:
    """Whether tensors are equal in elements and strides; pairs with a None are skipped."""
    return all(
        ours is None or theirs is None or (torch.equal(ours, theirs) and ours.stride() == theirs.stride())
        for ours, theirs in zip(found, expected, strict=True)
    )


def repeats(device: torch.device, compare: Callable[[torch.Generator], bool]) -> bool:
    """What `compare` returns for a seeded generator of the device; False if the device is out of memory."""
    try:
        with isolated(device):
            return compare(torch.Generator(device).manual_seed(1))
    except torch.OutOfMemoryError:
        return False
