"""Runs native codec kernels at one instruction set and with some number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.lowlevel.dispatch import VARIABLE


@contextmanager
def at_level(level: str, threads: int = 1) -> Iterator[None]:
    before, threads_before = os.environ.get(VARIABLE), torch.get_num_threads()
    os.environ[VARIABLE] = level
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal as bytes: NaNs too, and 0.0 is not -0.0."""
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def off_by_one(values: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element after what the allocator aligns."""
    room = torch.empty(values.numel() + 1, dtype=values.dtype)
    room[1:].copy_(values)
    return room[1:]
