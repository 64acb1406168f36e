"""Place blocks one after the other: what first fit and best fit share."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from shoal.memory.layout.problem import Layout, Problem


def lay_out_in_order(problem: Problem, order: Sequence[int], *, tightest: bool) -> Layout:
    """Place blocks one after the other, each into a gap that all blocks placed before leave it.

    Args:
        problem: what to lay out.
        order: places of the blocks in `problem.blocks`, first to be placed first.
        tightest: into the smallest gap that is large enough; else into the lowest.
    """
    blocks = problem.blocks
    offsets = [0] * len(blocks)
    placed: list[tuple[int, int, int, int]] = []  # begin, end, lower, upper; the lowest first
    for place in order:
        block = blocks[place]
        lower, upper, size_bytes = block.lower, block.upper, block.size_bytes
        top = 0
        best: tuple[int, int] | None = None  # bytes of the gap, its offset
        for begin, end, since, until in placed:
            if since < upper and lower < until:
                gap_bytes = begin - top
                if gap_bytes >= size_bytes and (best is None or gap_bytes < best[0]):
                    best = gap_bytes, top
                    if not tightest:
                        break
                top = max(top, end)
        offsets[place] = top if best is None else best[1]
        insort(placed, (offsets[place], offsets[place] + size_bytes, lower, upper))
    return Layout(problem, tuple(offsets))
