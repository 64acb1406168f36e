"""A layout problem (blocks of bytes with lifetimes), a layout (an address for each block), and its check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shoal.errors import InputError, PlanError, brief


@dataclass(frozen=True)
class Block:
    """Bytes with a lifetime.

    Attributes:
        name: the caller's name for it.
        lower, upper: in use at every time t with lower <= t < upper.
        size_bytes: its size.
    """

    name: str
    lower: int
    upper: int
    size_bytes: int


@dataclass(frozen=True)
class Problem:
    """Blocks to be placed; two that are in use at the same time must not share a byte.

    Raises:
        InputError: a block ends before it begins or its size is negative, or two have the same name.
    """

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for block in self.blocks:
            if block.upper <= block.lower:
                raise InputError(
                    f"block {brief(block.name)} is in use from {block.lower} to {block.upper}: expected a later end"
                )
            if block.size_bytes < 0:
                raise InputError(f"block {brief(block.name)} has {block.size_bytes} bytes; expected 0 or more")
            if block.name in names:
                raise InputError(f"two blocks are called {brief(block.name)}; give each its own id")
            names.add(block.name)

    @cached_property
    def highest_live_bytes(self) -> int:
        """The most bytes in use at any time: no layout is smaller.

        >>> Problem((Block("a", 0, 2, 5), Block("b", 1, 3, 4), Block("c", 2, 3, 3))).highest_live_bytes
        9
        """
        changes = sorted(self._changes())
        in_use = highest = 0
        for _, change in changes:  # at equal times, blocks end before others begin
            in_use += change
            highest = max(highest, in_use)
        return highest

    def _changes(self) -> Iterator[tuple[int, int]]:
        for block in self.blocks:
            yield block.lower, block.size_bytes
            yield block.upper, -block.size_bytes


@dataclass(frozen=True)
class Layout:
    """An address for every block of a problem.

    Attributes:
        problem: the blocks.
        offsets: the address of each block in the arena, in bytes, in the order of the problem.
    """

    problem: Problem
    offsets: tuple[int, ...]

    @cached_property
    def arena_bytes(self) -> int:
        """The size of the arena: where the highest block ends."""
        ends = (offset + block.size_bytes for offset, block in zip(self.offsets, self.problem.blocks, strict=True))
        return max(ends, default=0)

    @property
    def fragmentation(self) -> float:
        """Arena bytes over the most bytes in use at any time; 1.0 is optimal."""
        highest = self.problem.highest_live_bytes
        return self.arena_bytes / highest if highest else 1.0


def check_layout(layout: Layout, capacity_bytes: int | None = None) -> None:
    """Raise unless the layout is sound. Every pair of blocks is compared; no code is shared with what makes layouts.

    Args:
        layout: an address for each block.
        capacity_bytes: every block must end at or below it; None: no limit.

    Raises:
        PlanError: a block begins below 0 or ends past the capacity, or two blocks that are in use at the same time
            share a byte. The message names them.
    """
    blocks, offsets = layout.problem.blocks, layout.offsets
    if len(offsets) != len(blocks):
        raise PlanError(f"{len(offsets)} offsets for {len(blocks)} blocks")
    for i, one in enumerate(blocks):
        begin, end = offsets[i], offsets[i] + one.size_bytes
        if begin < 0:
            raise PlanError(f"block {one.name!r} begins at {begin}, before the arena")
        if capacity_bytes is not None and end > capacity_bytes:
            raise PlanError(f"block {one.name!r} ends at {end}, past the capacity of {capacity_bytes}")
        for j in range(i):
            other = blocks[j]
            at_once = one.lower < other.upper and other.lower < one.upper
            if at_once and begin < offsets[j] + other.size_bytes and offsets[j] < end:
                raise PlanError(
                    f"blocks {other.name!r} at {offsets[j]} and {one.name!r} at {begin} share bytes between "
                    f"{max(one.lower, other.lower)} and {min(one.upper, other.upper)}"
                )
