"""A step's recorded allocations as a layout problem.

A training step repeats, so its time is a circle: a gradient that the next step frees at its beginning is in use across
the step's end. The circle is cut where the fewest bytes are in use across the cut.

        alloc 0   1   2   3   4 | 0   1             time is counted in allocations
    activation ├───────┤        |                   in use at 0 and 1: freed before allocation 2
    gradient           ├────────|──┤                in use at 3, 4 and at 0 of the next step
    output     ├────────────────|──────┤ kept       in use when its successor is made: no place of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import InputError
from shoal.memory.layout.problem import Block, Problem

ALIGNMENT_BYTES = 64  # as torch's own allocator aligns
ELSEWHERE = -1


@dataclass(frozen=True)
class RecordedStep:
    """What one step asked for.

    Attributes:
        sizes_bytes: of its allocations, in their order.
        died: how many allocations the step had made when each was freed; on into the next step, of the same sizes,
            past the number of allocations; None where it was not freed in that time.
    """

    sizes_bytes: tuple[int, ...]
    died: tuple[int | None, ...]


@dataclass(frozen=True)
class ArenaProblem:
    """Which allocations of a step may lie in an arena, and when.

    Attributes:
        problem: one block for each of `allocations`, its size rounded up to `ALIGNMENT_BYTES`.
        allocations: their places in the step.
        count: of the step's allocations.
        highest_live_bytes: the most bytes in use at once, not rounded.
    """

    problem: Problem
    allocations: tuple[int, ...]
    count: int
    highest_live_bytes: int

    def offsets(self, of_blocks: Sequence[int]) -> list[int]:
        """For each allocation of the step its offset, `ELSEWHERE` where it has no block."""
        offsets = [ELSEWHERE] * self.count
        for allocation, offset in zip(self.allocations, of_blocks, strict=True):
            offsets[allocation] = offset
        return offsets


def arena_problem(steps: Sequence[RecordedStep]) -> ArenaProblem:
    """Lay out what every one of `steps` frees in time: a block is in use for as long as it was in any of them.

    Args:
        steps: one or more recordings of the same step.

    Raises:
        InputError: their sizes differ.

    >>> made = arena_problem([RecordedStep((100, 100, 7), (2, 3, None))])
    >>> [(block.lower, block.upper, block.size_bytes) for block in made.problem.blocks], made.allocations
    ([(0, 2, 128), (1, 3, 128)], (0, 1))
    """
    sizes = steps[0].sizes_bytes
    if any(step.sizes_bytes != sizes for step in steps):
        raise InputError("these recordings are of different steps: their allocations have other sizes")
    count = len(sizes)
    lifetimes: dict[int, int] = {}  # allocation → when it is over, at most a whole step later
    for allocation, deaths in enumerate(zip(*(step.died for step in steps), strict=True)):
        known = [death for death in deaths if death is not None]
        if len(known) == len(deaths) and max(known) <= allocation + count:
            lifetimes[allocation] = max(known)
    cut = _cut(sizes, lifetimes)
    blocks, exact = [], []
    for allocation, death in lifetimes.items():
        if _is_across(allocation, death, cut, count):
            lower, upper = 0, count
        else:
            lower = (allocation - cut) % count
            upper = lower + death - allocation
        rounded_bytes = -(-sizes[allocation] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        blocks.append(Block(str(allocation), lower, upper, rounded_bytes))
        exact.append(Block(str(allocation), lower, upper, sizes[allocation]))
    return ArenaProblem(Problem(tuple(blocks)), tuple(lifetimes), count, Problem(tuple(exact)).highest_live_bytes)


def _cut(sizes: Sequence[int], lifetimes: dict[int, int]) -> int:
    """The allocation before which the fewest bytes are in use that were there before it; the earliest of several."""
    count = len(sizes)
    change = [0] * (2 * count + 2)
    for allocation, death in lifetimes.items():
        change[allocation + 1] += sizes[allocation]
        change[max(death, allocation + 1)] -= sizes[allocation]
    in_use, across_bytes = 0, [0] * count
    for time in range(2 * count):
        in_use += change[time]
        across_bytes[time % count] += in_use
    return min(range(count), key=across_bytes.__getitem__, default=0)


def _is_across(allocation: int, death: int, cut: int, count: int) -> bool:
    return allocation < cut < death or allocation < cut + count < death
