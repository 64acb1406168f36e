"""Whose hole the allocator takes among holes of one size: from PyTorch 2.13 on that of the segment which came first.

No snapshot tells the order in which segments of a fixed size came, and their addresses do not show it. So it is tried
out: all other holes are filled, and of two of one size, in two segments, it is seen which is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import Any

import torch

from shoal.lowlevel import cuda_allocator
from shoal.lowlevel.torch_versions import OLDEST_FIRST
from shoal.memory.layout.caching_allocator import BLOCK_BYTES, LARGEST_SMALL_BYTES

_FEWEST_BYTES = {"small": BLOCK_BYTES, "large": LARGEST_SMALL_BYTES + BLOCK_BYTES}  # that come from such a segment
_MOST_SEGMENTS = 64  # that are tried, each against each; those with the largest holes


class _AnotherCourse(Exception):
    """A block came from elsewhere than was expected."""


def in_order_of_choice(
    segments: Iterable[Mapping[str, Any]], allocate: Callable[[int], int], release: Callable[[int], None]
) -> list[Mapping[str, Any]]:
    """The segments of a snapshot, those whose holes come first among holes of one size before the others.

    Two segments whose holes cannot be made one size are left in the order in which they were given: the allocator
    never chooses between them either.

    Args:
        segments: of one stream, as `torch.cuda.memory_snapshot()` tells them.
        allocate: hands out a block of that many bytes, from them wherever one of their holes is large enough.
        release: takes the block at an address back.
    """
    given = list(segments)
    place = {int(segment["address"]): number for number, segment in enumerate(given)}
    for kind, fewest_bytes in _FEWEST_BYTES.items():
        holes = {
            int(segment["address"]): _holes(segment, fewest_bytes)
            for segment in given
            if segment["segment_type"] == kind
        }
        fixed = [
            int(segment["address"])
            for segment in given
            if not segment["is_expandable"] and holes.get(int(segment["address"]))
        ]
        fixed.sort(key=lambda address: -max(holes[address].values()))
        tried = sorted(fixed[:_MOST_SEGMENTS], key=lambda address: place[address])
        if len(tried) < 2:
            continue
        order = _order(tried, holes, allocate, release, fewest_bytes)
        for address, number in zip(order, sorted(place[address] for address in tried), strict=True):
            place[address] = number
    return sorted(given, key=lambda segment: place[int(segment["address"])])


def _holes(segment: Mapping[str, Any], fewest_bytes: int) -> dict[int, int]:
    """Address → bytes."""
    return {
        int(block["address"]): int(block["size"])
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] >= fewest_bytes
    }


def _order(
    tried: Sequence[int],
    holes: Mapping[int, Mapping[int, int]],
    allocate: Callable[[int], int],
    release: Callable[[int], None],
    fewest_bytes: int,
) -> list[int]:
    """The segments `tried` in the order of choice; as they are where somebody else takes blocks meanwhile."""
    held: set[int] = set()

    def take(nbytes: int, expected: Iterable[int]) -> int:
        address = allocate(nbytes)
        held.add(address)
        if address not in expected:
            raise _AnotherCourse
        return address

    def give(address: int) -> None:
        held.remove(address)
        release(address)

    def first(one: int, other: int) -> int | None:
        """Which of two segments is chosen first; None where their holes cannot be made one size."""
        pair = _same_size(holes[one], holes[other], fewest_bytes)
        if pair is None:
            return None
        places = sorted(((holes[s][hole], hole, s) for s, hole in zip((one, other), pair, strict=True)), reverse=True)
        (more_bytes, large, of_large), (nbytes, small, of_small) = places
        give(large)
        rest = large
        if more_bytes > nbytes:
            rest = take(more_bytes - nbytes, {large}) + more_bytes - nbytes
        give(small)
        chosen = take(nbytes, {rest, small})
        give(chosen)
        if more_bytes > nbytes:
            give(large)
        take(more_bytes, {large, small})
        take(nbytes, {large, small})
        return of_small if chosen == small else of_large

    after: dict[int, list[int]] = {address: [] for address in tried}
    try:
        sizes = {address: nbytes for some in holes.values() for address, nbytes in some.items()}
        for nbytes in sorted(sizes.values(), reverse=True):
            take(nbytes, {address for address, size in sizes.items() if size == nbytes})
        for one, other in combinations(tried, 2):
            chosen = first(one, other)
            if chosen is not None:
                after[other if chosen == one else one].append(chosen)
        return list(TopologicalSorter(after).static_order())
    except (_AnotherCourse, CycleError):
        return list(tried)
    finally:
        for address in held:
            release(address)


def _same_size(one: Mapping[int, int], other: Mapping[int, int], fewest_bytes: int) -> tuple[int, int] | None:
    """Two holes of one size, or of which the larger can be cut to the smaller's; the smallest such."""
    return min(
        (
            (a, b)
            for a, a_bytes in one.items()
            for b, b_bytes in other.items()
            if a_bytes == b_bytes or abs(a_bytes - b_bytes) >= fewest_bytes
        ),
        key=lambda pair: max(one[pair[0]], other[pair[1]]),
        default=None,
    )


def trimmed_segments(device: torch.device) -> list[Mapping[str, Any]]:
    """Give back what is cached, and return what is left; see `CachingAllocator.of_snapshot`.

    Where ages of segments matter all holes that are left are filled for a moment; nothing is written to them.
    """
    torch.accelerator.empty_cache()
    segments: list[Mapping[str, Any]] = [*cuda_allocator.segments(device)]
    if not OLDEST_FIRST:
        return segments
    held: dict[int, torch.Tensor] = {}

    def allocate(nbytes: int) -> int:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        held[block.data_ptr()] = block
        return block.data_ptr()

    def release(address: int) -> None:
        del held[address]

    try:
        return in_order_of_choice(segments, allocate, release)
    except torch.OutOfMemoryError:  # somebody else took what was free
        return segments
