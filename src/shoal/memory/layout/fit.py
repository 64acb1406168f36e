"""First fit and best fit: blocks are placed one after the other, each into a gap that the earlier ones leave."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from shoal.memory.layout.problem import Block, Layout, Problem

_ORDERS: tuple[Callable[[Block], tuple[int, int]], ...] = (
    lambda block: (-block.size_bytes, block.lower - block.upper),
    lambda block: (block.lower - block.upper, -block.size_bytes),
    lambda block: (-block.size_bytes * (block.upper - block.lower), block.lower),
)


def first_fit(problem: Problem) -> Layout:
    """Give each block, in the order of allocation, the lowest address where it fits.

    This is the paper's static memory planning (Split-CNN and HMMS, section 4.4), and what an allocator without
    knowledge of the future does. Blocks that are allocated at the same time keep their order.
    """
    blocks = problem.blocks
    return _place(problem, sorted(range(len(blocks)), key=lambda place: blocks[place].lower), tightest=False)


def best_fit(problem: Problem) -> Layout:
    """The smallest of six layouts: by size, by lifetime and by their product, the largest first; two fits each.

    It uses the whole step: large and long-lived blocks are placed first. Each order is tried with the smallest gap that
    is large enough and with the lowest one.
    """
    blocks = problem.blocks
    layouts = []
    for key in _ORDERS:
        order = sorted(range(len(blocks)), key=lambda place: key(blocks[place]))
        layouts += [_place(problem, order, tightest=tightest) for tightest in (True, False)]
    return min(layouts, key=lambda layout: layout.arena_bytes)


def _place(problem: Problem, order: Sequence[int], *, tightest: bool) -> Layout:
    """Place the blocks in `order` (indices into `problem.blocks`).

    Args:
        problem: what to lay out.
        order: the first is placed first.
        tightest: use the smallest gap that is large enough; else the lowest one.
    """
    blocks = problem.blocks
    offsets = [0] * len(blocks)
    placed: list[tuple[int, int, int, int]] = []  # begin, end, lower, upper; sorted by address
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
