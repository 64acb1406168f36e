"""Is a layout right? Every pair of blocks is looked at; nothing is shared with what makes layouts."""

from __future__ import annotations

from shoal.errors import PlanError
from shoal.memory.layout.problem import Layout


def check(layout: Layout, capacity_bytes: int | None = None) -> None:
    """Raise unless the layout is sound.

    Args:
        layout: an address for each block.
        capacity_bytes: no byte at or past it may be used; None: any may.

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
