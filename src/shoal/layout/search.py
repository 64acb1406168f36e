"""An exact search for a layout within a capacity; it also proves that there is none.

Depth first over the order in which blocks are stacked from the bottom up, after Moffitt (MiniMalloc, ASPLOS'23): see
`csrc/layout.cpp`, which does the work where it was built, and `_Search` below, which does the same without it.
Which block is tried first decides how long it takes, so three orders take turns, each with more and more nodes.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from shoal import native
from shoal.layout.best_fit import best_fit
from shoal.layout.problem import Block, Layout, Problem

_FOUND, _IMPOSSIBLE, _GAVE_UP = range(3)  # as in csrc/shoal_native.h
_FIRST_NODES = 20_000
_MORE_NODES = 4  # times as many in each round
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


def search(problem: Problem, capacity_bytes: int, *, time_limit_seconds: float = 60.0) -> Answer:
    """Look for a layout of `problem` within `capacity_bytes`."""
    if problem.highest_live_bytes > capacity_bytes:
        return Answer(None, True)
    deadline = time.perf_counter() + time_limit_seconds
    blocks = problem.blocks
    sized = [place for place, block in enumerate(blocks) if block.size_bytes > 0]
    attempt = _natively if native.library() is not None else _in_python
    for round_ in count():
        for order in _orders([blocks[place] for place in sized]):
            places = [sized[i] for i in order]
            left_seconds = deadline - time.perf_counter()
            if left_seconds <= 0:
                return Answer(None, False)
            nodes = _FIRST_NODES * _MORE_NODES**round_
            outcome, found = attempt([blocks[place] for place in places], capacity_bytes, nodes, left_seconds)
            if outcome == _IMPOSSIBLE:
                return Answer(None, True)
            if outcome == _FOUND:
                offsets = [0] * len(blocks)
                for place, offset in zip(places, found, strict=True):
                    offsets[place] = offset
                return Answer(Layout(problem, tuple(offsets)), True)
    raise AssertionError("the rounds have no end")


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


def _orders(blocks: Sequence[Block]) -> list[list[int]]:
    """By length, area and the most bytes in use beside it, in three sequences, the greatest first."""
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
    return [sorted(range(len(blocks)), key=key, reverse=True) for key in keys]


def _natively(blocks: Sequence[Block], capacity_bytes: int, nodes: int, seconds: float) -> tuple[int, list[int]]:
    library = native.library()
    assert library is not None
    column = ctypes.c_int64 * len(blocks)
    lower, upper, size = (column(*(getattr(b, name) for b in blocks)) for name in ("lower", "upper", "size_bytes"))
    offsets, stop, outcome = column(), ctypes.c_int32(0), [_GAVE_UP]

    def run() -> None:
        outcome[0] = library.shoal_layout_search(
            ctypes.c_int64(len(blocks)),
            lower,
            upper,
            size,
            ctypes.c_int64(capacity_bytes),
            ctypes.c_int64(nodes),
            ctypes.c_double(seconds),
            ctypes.byref(stop),
            offsets,
        )

    worker = threading.Thread(target=run, name="shoal layout search")
    worker.start()
    try:
        while worker.is_alive():
            worker.join(_LOOK_SECONDS)
    finally:  # Ctrl-C reaches this thread, not the library
        stop.value = 1
        worker.join()
    return outcome[0], list(offsets)


def _in_python(blocks: Sequence[Block], capacity_bytes: int, nodes: int, seconds: float) -> tuple[int, list[int]]:
    searching = _Search(blocks, capacity_bytes, nodes, time.perf_counter() + seconds)
    if searching.place_all(sorted(range(len(blocks)), key=lambda i: blocks[i].lower), 0, -1):
        return _FOUND, searching.offset
    return (_GAVE_UP if searching.gave_up else _IMPOSSIBLE), []


class _Search:
    """`Search` of csrc/layout.cpp, word for word, but that it looks at times instead of sections of time."""

    def __init__(self, blocks: Sequence[Block], capacity_bytes: int, most_nodes: int, deadline: float) -> None:
        self.blocks = blocks
        self.capacity_bytes = capacity_bytes
        self.nodes_left = most_nodes
        self.deadline = deadline
        self.gave_up = False
        self.lowest = [0] * len(blocks)
        self.offset = [-1] * len(blocks)
        self.placed: list[tuple[int, list[tuple[int, int]]]] = []
        self.meets = [
            [j for j, other in enumerate(blocks) if i != j and other.lower < one.upper and one.lower < other.upper]
            for i, one in enumerate(blocks)
        ]

    def place_all(self, items: Sequence[int], least_offset: int, least_item: int) -> bool:
        """Place `items`, ascending by when they begin, at or above `least_offset`."""
        parts: list[list[int]] = []
        end = 0
        for i in items:
            if not parts or self.blocks[i].lower >= end:
                parts.append([])
                end = self.blocks[i].upper
            parts[-1].append(i)
            end = max(end, self.blocks[i].upper)
        mark = len(self.placed)
        for part in parts:
            if not self._place_next(part, least_offset, least_item):
                while len(self.placed) > mark:
                    self._take_back()
                return False
        return True

    def _place_next(self, items: Sequence[int], least_offset: int, least_item: int) -> bool:
        self.nodes_left -= 1
        if self.nodes_left < 0 or time.perf_counter() > self.deadline:
            self.gave_up = True
            return False
        blocks, lowest = self.blocks, self.lowest
        ceiling = min(lowest[i] + blocks[i].size_bytes for i in items)
        if ceiling <= least_offset or not self._room_for(items, least_offset):
            return False
        candidates = (i for i in items if (lowest[i], i) > (least_offset, least_item) and lowest[i] < ceiling)
        for i in sorted(candidates, key=lambda i: (lowest[i], i)):
            self._place(i)
            if self.place_all([j for j in items if j != i], self.offset[i], i):
                return True
            self._take_back()
            if self.gave_up:
                return False
        return False

    def _room_for(self, items: Sequence[int], least_offset: int) -> bool:
        for at in {self.blocks[i].lower for i in items}:  # some block begins where the most bytes are to come
            here = [i for i in items if self.blocks[i].lower <= at < self.blocks[i].upper]
            begin = min(max(self.lowest[i], least_offset) for i in here)
            if begin + sum(self.blocks[i].size_bytes for i in here) > self.capacity_bytes:
                return False
        return all(max(self.lowest[i], least_offset) + self.blocks[i].size_bytes <= self.capacity_bytes for i in items)

    def _place(self, i: int) -> None:
        self.offset[i] = self.lowest[i]
        top = self.offset[i] + self.blocks[i].size_bytes
        raised = [(j, self.lowest[j]) for j in self.meets[i] if self.offset[j] < 0 and self.lowest[j] < top]
        for j, _ in raised:
            self.lowest[j] = top
        self.placed.append((i, raised))

    def _take_back(self) -> None:
        i, raised = self.placed.pop()
        for j, before in raised:
            self.lowest[j] = before
        self.offset[i] = -1
