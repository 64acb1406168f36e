"""Two tiers: blocks smaller than a page by first fit, on top of the others, which get every effort.

More than half of a training step's blocks are a few hundred bytes of statistics. Placing takes the square of the
number of blocks and the small ones are a thousandth of the bytes, so they are kept out of the way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.cpu_arena.reorder import reorder
from examples.minimalloc import first_fit
from shoal.memory.layout.problem import Layout, Problem
from shoal.memory.layout.search import best_fit, search

PAGE_BYTES = 4096
_GOOD_ENOUGH = 1.01  # arena over the most bytes in use, above which more effort is worth its time
_SHARE_OF_SEARCH = 1 / 8  # it is over at once or takes for ever


def two_tiers(problem: Problem, *, time_limit_seconds: float) -> Layout:
    """The better of first fit and best fit for large blocks, or what is found beyond them; small ones above.

    Args:
        problem: what to lay out.
        time_limit_seconds: of going beyond where both fits waste more than one per cent: a short exact search, then
            reordering.
    """
    large = [place for place, block in enumerate(problem.blocks) if block.size_bytes >= PAGE_BYTES]
    small = [place for place, block in enumerate(problem.blocks) if block.size_bytes < PAGE_BYTES]
    floor = _with_effort(_of(problem, large), time_limit_seconds)
    above = first_fit(_of(problem, small))
    offsets = [0] * len(problem.blocks)
    for place, offset in zip(large, floor.offsets, strict=True):
        offsets[place] = offset
    for place, offset in zip(small, above.offsets, strict=True):
        offsets[place] = floor.arena_bytes + offset
    return Layout(problem, tuple(offsets))


def _with_effort(problem: Problem, time_limit_seconds: float) -> Layout:
    deadline = time.perf_counter() + time_limit_seconds
    enough_bytes = int(_GOOD_ENOUGH * problem.highest_live_bytes)
    layout = min(first_fit(problem), best_fit(problem), key=_arena_bytes)
    if layout.arena_bytes > enough_bytes:
        layout = (
            search(problem, enough_bytes, time_limit_seconds=_SHARE_OF_SEARCH * time_limit_seconds).layout or layout
        )
    if layout.arena_bytes > enough_bytes:
        left_seconds = deadline - time.perf_counter()
        layout = min(
            layout, reorder(problem, enough_bytes=enough_bytes, time_limit_seconds=left_seconds), key=_arena_bytes
        )
    return layout


def _of(problem: Problem, places: Sequence[int]) -> Problem:
    return Problem(tuple(problem.blocks[place] for place in places))


def _arena_bytes(layout: Layout) -> int:
    return layout.arena_bytes
