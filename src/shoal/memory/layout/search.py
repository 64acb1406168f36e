"""An exact search for a layout within a capacity; it also proves that there is none.

`csrc/layout.cpp` is the branch and bound. Which block it branches on first decides how long it takes, so it is
restarted with six orders in turns and the node limits of Luby et al. (1993); the failure counts of earlier attempts
are kept. Without the native library best fit is used, and nothing is proven.
"""

from __future__ import annotations

import ctypes
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from itertools import count, cycle

from shoal.lowlevel import native
from shoal.memory.layout.problem import Block, Layout, Problem

_NODES = 300  # of the shortest attempt
_POLL_SECONDS = 0.1  # between two looks for Ctrl-C
_ARGUMENTS = native.fields(  # of shoal_layout_search
    "int64 count, pointer lower upper size, int64 capacity, uint32 rules, int64 nodes, double seconds,"
    "pointer stop failures offsets"
)
_ORDERS: tuple[Callable[[Block], tuple[int, int]], ...] = (
    lambda block: (-block.size_bytes, block.lower - block.upper),
    lambda block: (block.lower - block.upper, -block.size_bytes),
    lambda block: (-block.size_bytes * (block.upper - block.lower), block.lower),
)


class SearchOutcome(IntEnum):
    """How an attempt ends; the numbers of csrc/shoal_native.h."""

    FOUND = 0
    IMPOSSIBLE = 1
    GAVE_UP = 2  # at its node or time limit, or told to stop


class Rules(IntFlag):
    """Pruning rules, each described in csrc/layout.cpp. The search is exact without any of them, only slower."""

    LOWEST = 1 << 0
    PAIR = 1 << 1
    GAP = 1 << 2
    PARTS = 1 << 3
    FAILURES = 1 << 4


ALL_RULES = ~Rules(0)


@dataclass(frozen=True)
class Answer:
    """The result of a search.

    Attributes:
        layout: one within the capacity, or None.
        proven: without a layout: there is none. False: that was not decided in time.
    """

    layout: Layout | None
    proven: bool


def search(
    problem: Problem, capacity_bytes: int, *, time_limit_seconds: float = 60.0, rules: Rules = ALL_RULES
) -> Answer:
    """Look for a layout of `problem` within `capacity_bytes`.

    Args:
        problem: what to lay out.
        capacity_bytes: no block may end above it.
        time_limit_seconds: after which the search gives up.
        rules: an ablation may leave some out; it then takes longer.
    """
    if problem.highest_live_bytes > capacity_bytes:
        return Answer(None, True)
    if native.library() is None:
        layout = best_fit(problem)
        fits = layout.arena_bytes <= capacity_bytes
        return Answer(layout if fits else None, fits)
    deadline = time.perf_counter() + time_limit_seconds
    blocks = problem.blocks
    sized = [place for place, block in enumerate(blocks) if block.size_bytes > 0]
    failures = [0] * len(sized)
    orders = cycle(_orders([blocks[place] for place in sized]))
    for nodes, order in zip(_nodes(len(sized)), orders, strict=False):
        left_seconds = deadline - time.perf_counter()
        if left_seconds <= 0:
            break
        places = [sized[i] for i in order]
        here = [blocks[place] for place in places]
        outcome, found = _attempt(here, capacity_bytes, rules, nodes, left_seconds, failures)
        if outcome == SearchOutcome.IMPOSSIBLE:
            return Answer(None, True)
        if outcome == SearchOutcome.FOUND:
            offsets = [0] * len(blocks)
            for place, offset in zip(places, found, strict=True):
                offsets[place] = offset
            return Answer(Layout(problem, tuple(offsets)), True)
        failures = [times // 2 for times in failures]  # recent failures weigh more
    return Answer(None, False)


def _nodes(blocks: int) -> Iterator[int]:
    """Node limits of the attempts: Luby's sequence 1 1 2 1 1 2 4 ... times enough nodes to place every block."""
    unit = _NODES if blocks <= _NODES else 2 * blocks
    for attempt in count(1):
        while (attempt + 1) & attempt:  # not 2**n - 1: as in the sequence so far
            attempt -= (1 << (attempt.bit_length() - 1)) - 1
        yield unit * (attempt + 1) // 2


def _orders(blocks: Sequence[Block]) -> list[list[int]]:
    """By lifetime, area and the most bytes in use meanwhile, in three priorities; descending, then ascending."""
    times = sorted({time for block in blocks for time in (block.lower, block.upper)})
    number = {time: section for section, time in enumerate(times)}
    in_use = [0] * len(times)
    for block in blocks:
        for section in range(number[block.lower], number[block.upper]):
            in_use[section] += block.size_bytes
    length = [block.upper - block.lower for block in blocks]
    area = [block.size_bytes * long for block, long in zip(blocks, length, strict=True)]
    total = [max(in_use[number[block.lower] : number[block.upper]]) for block in blocks]
    keys: list[Callable[[int], tuple[int, int, int]]] = [
        lambda i: (length[i], area[i], total[i]),
        lambda i: (total[i], area[i], length[i]),
        lambda i: (total[i], length[i], area[i]),
    ]
    return [sorted(range(len(blocks)), key=key, reverse=greatest) for greatest in (True, False) for key in keys]


def _attempt(
    blocks: Sequence[Block], capacity_bytes: int, rules: Rules, nodes: int, seconds: float, failures: list[int]
) -> tuple[SearchOutcome, list[int]]:
    """Call `shoal_layout_search` in a thread, so that Ctrl-C can stop it; `failures` is updated in place."""
    call = native.function("shoal_layout_search")
    assert call is not None
    call.argtypes = [kind for _, kind in _ARGUMENTS]  # type: ignore[attr-defined]
    column = ctypes.c_int64 * len(blocks)
    lower, upper, size = (column(*(getattr(b, name) for b in blocks)) for name in ("lower", "upper", "size_bytes"))
    failed, offsets, stop, outcome = column(*failures), column(), ctypes.c_int32(0), [SearchOutcome.GAVE_UP]

    def run() -> None:
        limits = capacity_bytes, rules, nodes, seconds, ctypes.byref(stop)
        outcome[0] = SearchOutcome(call(len(blocks), lower, upper, size, *limits, failed, offsets))

    worker = threading.Thread(target=run, name="shoal layout search")
    worker.start()
    try:
        while worker.is_alive():
            worker.join(_POLL_SECONDS)
    finally:  # Ctrl-C is raised in this thread; the library looks at `stop`
        stop.value = 1
        worker.join()
    failures[:] = failed
    return outcome[0], list(offsets)


def best_fit(problem: Problem) -> Layout:
    """The smallest of six layouts: by size, by lifetime and by their product, the largest first; two fits each.

    It uses the whole step: large and long-lived blocks are placed first. Each order is tried with the smallest gap that
    is large enough and with the lowest one.
    """
    blocks = problem.blocks
    layouts = []
    for key in _ORDERS:
        order = sorted(range(len(blocks)), key=lambda place: key(blocks[place]))
        layouts += [placed_in_order(problem, order, tightest=tightest) for tightest in (True, False)]
    return min(layouts, key=lambda layout: layout.arena_bytes)


def placed_in_order(problem: Problem, order: Sequence[int], *, tightest: bool) -> Layout:
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
