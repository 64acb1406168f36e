"""Best fit with the whole step in view: large and long-lived blocks first, each into the gap that fits it best."""

from __future__ import annotations

from collections.abc import Callable

from shoal.memory.layout.in_order import lay_out_in_order
from shoal.memory.layout.problem import Block, Layout, Problem

_ORDERS: tuple[Callable[[Block], tuple[int, int]], ...] = (
    lambda block: (-block.size_bytes, block.lower - block.upper),
    lambda block: (block.lower - block.upper, -block.size_bytes),
    lambda block: (-block.size_bytes * (block.upper - block.lower), block.lower),
)


def best_fit(problem: Problem) -> Layout:
    """The smallest of the layouts that three orders give: by size, by lifetime, and by their product."""
    blocks = problem.blocks
    layouts = []
    for key in _ORDERS:
        order = sorted(range(len(blocks)), key=lambda place: key(blocks[place]))
        layouts += [lay_out_in_order(problem, order, tightest=tightest) for tightest in (True, False)]
    return min(layouts, key=lambda layout: layout.arena_bytes)
