"""Placing in order again and again, each time with one block moved forward: hill climbing over orders.

Where the fits waste a few per cent, some block of the top came too late to find a gap. It is moved to a random earlier
place; the new order is kept where its arena is no larger. For problems that are too large for `search`.
"""

from __future__ import annotations

import random
import time
from bisect import insort
from collections.abc import Sequence
from itertools import count

from shoal.memory.layout.problem import Layout, Problem

_CLIMBERS = 3  # orders that take turns, the best of best fit's
_FROM_THE_TOP = 0.7  # share of moves that take a block of the top; the others take any


def reorder(problem: Problem, *, enough_bytes: int, time_limit_seconds: float, seed: int = 0) -> Layout:
    """The smallest layout found in time, or the first of at most `enough_bytes`.

    Which one depends on how fast the machine is; the moves tried are those of `seed`.
    """
    deadline = time.perf_counter() + time_limit_seconds
    draw = random.Random(seed)
    placing = _Placing(problem)
    blocks = problem.blocks
    places = range(len(blocks))
    by_size = sorted(places, key=lambda i: (-blocks[i].size_bytes, blocks[i].lower - blocks[i].upper))
    by_lifetime = sorted(places, key=lambda i: (blocks[i].lower - blocks[i].upper, -blocks[i].size_bytes))
    by_area = sorted(places, key=lambda i: -blocks[i].size_bytes * (blocks[i].upper - blocks[i].lower))
    climbers = []
    for order in (by_size, by_lifetime, by_area):
        for tightest in (True, False):
            placed = placing.place(order, tightest)
            assert placed is not None
            climbers.append((*placed, order, tightest))
    climbers = sorted(climbers, key=lambda climber: climber[0])[:_CLIMBERS]
    best_bytes, best_offsets, *_ = climbers[0]
    for turn in count():
        if best_bytes <= enough_bytes or time.perf_counter() > deadline or not blocks:
            return Layout(problem, tuple(best_offsets))
        arena_bytes, offsets, order, tightest = climbers[turn % len(climbers)]
        top = [i for i in places if offsets[i] + blocks[i].size_bytes > enough_bytes]
        moved = draw.choice(top if top and draw.random() < _FROM_THE_TOP else places)
        order = list(order)
        at = order.index(moved)
        order.insert(draw.randrange(at + 1), order.pop(at))
        placed = placing.place(order, tightest, arena_bytes)
        if placed is None:
            continue
        climbers[turn % len(climbers)] = (*placed, order, tightest)
        if placed[0] < best_bytes:
            best_bytes, best_offsets = placed
    raise AssertionError("the turns have no end")


class _Placing:
    """Placing in a given order, with what meets what found once."""

    def __init__(self, problem: Problem) -> None:
        blocks = problem.blocks
        self.size_bytes = [block.size_bytes for block in blocks]
        self.meets = [
            frozenset(j for j, other in enumerate(blocks) if other.lower < one.upper and one.lower < other.upper)
            for one in blocks
        ]

    def place(
        self, order: Sequence[int], tightest: bool, most_bytes: int | None = None
    ) -> tuple[int, list[int]] | None:
        """Bytes of the arena and offsets, as `lay_out_in_order`; None where it would be larger than `most_bytes`."""
        offsets = [0] * len(order)
        placed: list[tuple[int, int, int]] = []  # offset, end, block; ascending
        arena_bytes = 0
        for block in order:
            size_bytes, meets = self.size_bytes[block], self.meets[block]
            end, best, best_gap_bytes = 0, -1, 0
            for begin, upper, other in placed:
                if other not in meets:
                    continue
                gap_bytes = begin - end
                if gap_bytes >= size_bytes and (best < 0 or gap_bytes < best_gap_bytes):
                    best, best_gap_bytes = end, gap_bytes
                    if not tightest:
                        break
                end = max(end, upper)
            offset = end if best < 0 else best
            arena_bytes = max(arena_bytes, offset + size_bytes)
            if most_bytes is not None and arena_bytes > most_bytes:
                return None
            offsets[block] = offset
            insort(placed, (offset, offset + size_bytes, block))
        return arena_bytes, offsets
