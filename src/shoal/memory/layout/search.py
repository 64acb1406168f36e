"""An exact search for a layout within a capacity; it also proves that there is none.

`csrc/layout.cpp` tells how and does the work where it was built; `shoal.memory.layout.in_python` does the same without
it. Which block is tried first decides how long it takes, and a bad beginning is better left than worked off: six orders
take turns, for a few nodes mostly (Luby and others, 1993), each knowing where the others failed.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle

from shoal.lowlevel import native
from shoal.memory.layout import in_python
from shoal.memory.layout.best_fit import best_fit
from shoal.memory.layout.problem import Block, Layout, Problem
from shoal.memory.layout.rules import ALL_RULES, Outcome, Rules

_NODES = 300  # of a short attempt
_SHARE_OF_TIME = 1 / 3  # that one capacity may take of what is left
_LOOK_SECONDS = 0.1  # between two looks for Ctrl-C


@dataclass(frozen=True)
class Answer:
    """What the search came to.

    Attributes:
        layout: one within the capacity, or None.
        proven: without a layout: whether it is certain that there is none. False: the time was over.
    """

    layout: Layout | None
    proven: bool


def search(
    problem: Problem, capacity_bytes: int, *, time_limit_seconds: float = 60.0, rules: Rules = ALL_RULES
) -> Answer:
    """Look for a layout of `problem` within `capacity_bytes`; without some of its `rules` it takes longer."""
    if problem.highest_live_bytes > capacity_bytes:
        return Answer(None, True)
    deadline = time.perf_counter() + time_limit_seconds
    blocks = problem.blocks
    sized = [place for place, block in enumerate(blocks) if block.size_bytes > 0]
    attempt = _natively if native.library() is not None else in_python.attempt
    failures = [0] * len(sized)
    orders = cycle(_orders([blocks[place] for place in sized]))
    for nodes, order in zip(_nodes(len(sized)), orders, strict=False):
        left_seconds = deadline - time.perf_counter()
        if left_seconds <= 0:
            break
        places = [sized[i] for i in order]
        here = [blocks[place] for place in places]
        outcome, found = attempt(here, capacity_bytes, rules, nodes, left_seconds, failures)
        if outcome == Outcome.IMPOSSIBLE:
            return Answer(None, True)
        if outcome == Outcome.FOUND:
            offsets = [0] * len(blocks)
            for place, offset in zip(places, found, strict=True):
                offsets[place] = offset
            return Answer(Layout(problem, tuple(offsets)), True)
        failures = [times // 2 for times in failures]  # what failed lately says more
    return Answer(None, False)


def smallest(problem: Problem, *, time_limit_seconds: float = 60.0) -> Answer:
    """The smallest layout found in time; `proven` where there is none smaller.

    Begins with `best_fit`, tries what no layout can be below, and halves what lies between.
    """
    deadline = time.perf_counter() + time_limit_seconds
    best = best_fit(problem)
    impossible_bytes = problem.highest_live_bytes - 1
    tried_bytes = problem.highest_live_bytes
    not_found_bytes = impossible_bytes
    while best.arena_bytes - 1 > not_found_bytes:
        left_seconds = deadline - time.perf_counter()
        if left_seconds <= 0:
            break
        answer = search(problem, tried_bytes, time_limit_seconds=_SHARE_OF_TIME * left_seconds)
        if answer.layout is not None:
            best = answer.layout
        else:
            not_found_bytes = tried_bytes
            if answer.proven:
                impossible_bytes = tried_bytes
        tried_bytes = (not_found_bytes + best.arena_bytes) // 2
    return Answer(best, best.arena_bytes - 1 == impossible_bytes)


def _nodes(blocks: int) -> Iterator[int]:
    """Limits of the attempts: 1 1 2 1 1 2 4 1 1 2 ... times what is enough to place all blocks of a large problem."""
    unit = _NODES if blocks <= _NODES else 2 * blocks
    for attempt in count(1):
        while (attempt + 1) & attempt:  # not 2**n - 1: as in the sequence so far
            attempt -= (1 << (attempt.bit_length() - 1)) - 1
        yield unit * (attempt + 1) // 2


def _orders(blocks: Sequence[Block]) -> list[list[int]]:
    """By length, area and the most bytes in use beside it, in three sequences, the greatest first; then the least."""
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


def _natively(
    blocks: Sequence[Block], capacity_bytes: int, rules: Rules, nodes: int, seconds: float, failures: list[int]
) -> tuple[Outcome, list[int]]:
    """`shoal_layout_search`, interruptible; arguments and result as of `in_python.attempt`."""
    library = native.library()
    assert library is not None
    column = ctypes.c_int64 * len(blocks)
    lower, upper, size = (column(*(getattr(b, name) for b in blocks)) for name in ("lower", "upper", "size_bytes"))
    failed, offsets, stop, outcome = column(*failures), column(), ctypes.c_int32(0), [Outcome.GAVE_UP]

    def run() -> None:
        outcome[0] = Outcome(
            library.shoal_layout_search(
                ctypes.c_int64(len(blocks)),
                lower,
                upper,
                size,
                ctypes.c_int64(capacity_bytes),
                ctypes.c_uint32(rules),
                ctypes.c_int64(nodes),
                ctypes.c_double(seconds),
                ctypes.byref(stop),
                failed,
                offsets,
            )
        )

    worker = threading.Thread(target=run, name="shoal layout search")
    worker.start()
    try:
        while worker.is_alive():
            worker.join(_LOOK_SECONDS)
    finally:  # Ctrl-C reaches this thread, not the library
        stop.value = 1
        worker.join()
    failures[:] = failed
    return outcome[0], list(offsets)
