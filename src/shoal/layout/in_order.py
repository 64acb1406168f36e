"""Place blocks one after the other: what first fit and best fit share."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.layout.problem import Layout, Problem


def lay_out_in_order(problem: Problem, order: Sequence[int], *, tightest: bool) -> Layout:
    """Place blocks one after the other, each into a gap that all blocks placed before leave it.

    Args:
        problem: what to lay out.
        order: places of the blocks in `problem.blocks`, first to be placed first.
        tightest: into the smallest gap that is large enough; else into the lowest.
    """
    blocks = problem.blocks
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for place in order:
        block = blocks[place]
        taken = sorted(
            (offsets[other], offsets[other] + blocks[other].size_bytes)
            for other in placed
            if blocks[other].lower < block.upper and block.lower < blocks[other].upper
        )
        end = 0
        best: tuple[int, int] | None = None  # bytes of the gap, its offset
        for lower, upper in taken:
            gap_bytes = lower - end
            if gap_bytes >= block.size_bytes and (best is None or (tightest and gap_bytes < best[0])):
                best = gap_bytes, end
            end = max(end, upper)
        offsets[place] = end if best is None else best[1]
        placed.append(place)
    return Layout(problem, tuple(offsets))
