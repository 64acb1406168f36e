"""Planned addresses in PyTorch's caching allocator, which decides itself where a block lies: the holes that it would
choose are filled while an op allocates.

What a step allocates and frees, in order, is the same in every step. So its blocks can be laid out over the whole of
it (the largest first, each at the lowest address that is free all its life), and the allocator's choice at each op is
known (`caching_allocator`). Where that is another hole, or another part of it, blocks of exactly the size of what comes
first are allocated before the op and released after it (`steering`). They write nothing, and take what no tensor has.
Where a block lies elsewhere all the same, since no more may be filled, what comes after it is laid out again around it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from random import Random
from typing import Any

import numpy as np

from shoal.memory.layout.caching_allocator import LARGEST_SMALL_BYTES, AddressRange, CachingAllocator, block_bytes
from shoal.memory.layout.problem import Block, Problem
from shoal.memory.layout.search import best_fit, search
from shoal.memory.layout.steering import Event, Program, carried_out, steered

_SEARCH_SECONDS = 0.5
_GRAINS = (512, 1 << 20, 3 << 19, 5 << 19)
_SPREADS = (0.0, 0.15, 0.4)
_FEWEST_ATTEMPTS, _MOST_ATTEMPTS = 10, 32
_ATTEMPTED_EVENTS = 64_000  # of all attempts, between the two
_ENOUGH = 1.02  # of the bytes in use at the peak
_MOST_LAID_OUT = 32  # times in a step; a layout that the allocator follows so badly is no good

Addresses = Mapping[int, int]  # of the blocks of a step, by the event that allocates each
Relayout = Callable[[CachingAllocator, Addresses, int], Addresses]  # the rest of a step around blocks in use, by event
Spans = Sequence[tuple[int, int]]  # in use at every time t with a <= t < b, of each


@dataclass(frozen=True)
class Filled:
    """A step with planned addresses.

    Attributes:
        mapping: blocks to allocate and release once before it, so that the addresses are backed by memory.
        programs: by op, what is allocated before it and fills holes while it runs; see `steering`.
        reserved_bytes: at its peak.
        allocated_bytes: at its peak, with what fills holes.
    """

    mapping: tuple[int, ...]
    programs: Mapping[str, Program]
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class _Life:
    """A large block of the step: allocated by the event `start`, in use in these `spans` of events."""

    start: int
    size_bytes: int
    spans: tuple[tuple[int, int], ...]

    def meets(self, other: _Life) -> bool:
        return any(a < d and c < b for a, b in self.spans for c, d in other.spans)


class RecordedStep:
    """A recorded step, from its first event to the first of the next one.

    Args:
        events: in order.
        segments: the allocator's, as they are when the step begins; see `CachingAllocator.of_snapshot`.
    """

    def __init__(self, events: Sequence[Event], segments: Iterable[Mapping[str, Any]]) -> None:
        self._segments = list(segments)
        self._events = list(events)
        self._groups = _by_op(self._events)
        there = {b.address: b for b in CachingAllocator.of_snapshot(self._segments).in_use()}
        self._frees: dict[int, int] = {}  # event → address, in the record, of what it frees
        self._stays: dict[int, int] = {}  # address of what is in use until it is freed → event that makes its successor
        self._lasting: set[int] = set()  # events that allocate what is in use from then on, as an optimizer's state
        self._standing, self._lives = self._lifetimes(there)
        self._planned = {
            number
            for group in self._groups
            if events[group[0]].op and events[group[0]].allocated
            for number in group
            if events[number].allocated and events[number].size_bytes > LARGEST_SMALL_BYTES
        }

    def as_it_is(self) -> Filled:
        """The step with nothing filled."""
        return self._run({}, None, 0)

    def filled(self, most_bytes: int, enough_bytes: int = 0) -> Filled:
        """The step with the addresses that reserve least, as far as was looked.

        Args:
            most_bytes: that may be in use at its peak, with what fills holes.
            enough_bytes: layouts that reserve no more are not improved on.
        """
        best = self.as_it_is()
        attempts = min(_MOST_ATTEMPTS, max(_FEWEST_ATTEMPTS, _ATTEMPTED_EVENTS // len(self._events)))
        for layout, relayout in islice(self._layouts(), attempts):
            if best.reserved_bytes <= max(_ENOUGH * best.allocated_bytes, enough_bytes):
                break
            made = self._run(layout, relayout, most_bytes)
            if made.reserved_bytes < best.reserved_bytes and made.allocated_bytes <= most_bytes:
                best = made
        return best

    def _layouts(self) -> Iterator[tuple[Addresses, Relayout | None]]:
        """Addresses of the step's blocks, in several ways: how well the allocator can follow each shows later."""
        for grain_bytes in _GRAINS:
            yield self._above(grain_bytes), None
        random = Random(0)
        allocator = CachingAllocator.of_snapshot(self._segments)
        for attempt in count():
            spread = _SPREADS[attempt % len(_SPREADS)]
            weight = {life.start: life.size_bytes * random.uniform(1 - spread, 1 + spread) for life in self._lives}
            relayout = partial(self._among, _AddressLine(self._segments, allocator), weight)
            yield relayout(allocator, {}, -1), relayout

    def _above(self, grain_bytes: int) -> dict[int, int]:
        """In holes between what was there before, all others above it in fewest bytes.

        Sizes are rounded up to whole grains: before a block, the allocator can fill more than 1 MiB, or nothing.
        """
        end = len(self._events)
        top = CachingAllocator.of_snapshot(self._segments).top
        planned = self._in_holes(top)
        lives = [life for life in self._lives if life.start not in planned]
        spans = (life.spans[0] if len(life.spans) == 1 else (0, end) for life in lives)
        problem = Problem(
            tuple(
                Block(str(life.start), *span, -(-life.size_bytes // grain_bytes) * grain_bytes)
                for life, span in zip(lives, spans, strict=True)
            )
        )
        found = search(problem, problem.highest_live_bytes, time_limit_seconds=_SEARCH_SECONDS).layout
        for life, offset in zip(lives, (found or best_fit(problem)).offsets, strict=True):
            planned[life.start] = top + offset
        return {start: address for start, address in planned.items() if start in self._planned}

    def _among(
        self, line: _AddressLine, weight: Mapping[int, float], allocator: CachingAllocator, made: Addresses, last: int
    ) -> Addresses:
        """Among what is in use, what comes from here on: each at the lowest address that is free all its life.

        Args:
            line: of the allocator's addresses.
            weight: of each block; those that weigh most come first.
            allocator: as it is now.
            made: of the step's blocks that are in use, address → event.
            last: the last event.
        """
        end = len(self._events)
        spans = {life.start: life.spans for life in (*self._standing, *self._lives)}
        fixed: list[tuple[int, int, Spans]] = [
            (
                line.place(b.address),
                line.place(b.address) + b.size_bytes,
                spans.get(made.get(b.address, b.address), ((0, end),)),
            )
            for b in allocator.in_use()
            if not b.small
        ]
        fixed += [(place, place + 1, ((0, end),)) for place in line.walls]
        lives = sorted(
            (life for life in self._lives if life.start > last), key=lambda life: (-weight[life.start], life.start)
        )
        places = fit_around(fixed, [(life.size_bytes, life.spans) for life in lives])
        return {
            life.start: line.address(place)
            for life, place in zip(lives, places, strict=True)
            if life.start in self._planned
        }

    def _in_holes(self, top: int) -> dict[int, int]:
        """Addresses of blocks that are in use at the peak and fit into holes below `top`, the longest in use first."""
        peak = self._peak()
        holes = [h for h in CachingAllocator.of_snapshot(self._segments).holes(LARGEST_SMALL_BYTES) if h.address < top]
        placed: dict[int, list[tuple[int, int, _Life]]] = {hole.address: [] for hole in holes}
        found: dict[int, int] = {}
        long = sorted(self._lives, key=lambda life: (-sum(b - a for a, b in life.spans), life.start))
        for life in long:
            if life.start not in self._planned or not any(a <= peak < b for a, b in life.spans):
                continue
            for hole in holes:
                address = hole.address
                for start, stop, other in placed[hole.address]:
                    if life.meets(other):
                        if start - address >= life.size_bytes:
                            break
                        address = max(address, stop)
                if address + life.size_bytes <= hole.end:
                    insort(placed[hole.address], (address, address + life.size_bytes, life), key=lambda one: one[:2])
                    found[life.start] = address
                    break
        return found

    def _peak(self) -> int:
        """The event at which most bytes of the step's large blocks are in use."""
        changes = [(a, life.size_bytes) for life in self._lives for a, _ in life.spans]
        changes += [(b, -life.size_bytes) for life in self._lives for _, b in life.spans]
        in_use = highest = peak = 0
        for event, change in sorted(changes):
            in_use += change
            if in_use > highest:
                highest, peak = in_use, event
        return peak

    def _lifetimes(self, there: Mapping[int, AddressRange]) -> tuple[list[_Life], list[_Life]]:
        """Large blocks from before the step, and those of the step.

        What a step frees of the one before, such as its gradients, takes the place of what it leaves to the next one.
        Anything else that it freed of before was there once, and is not in the next one; anything else that it left is
        there already when the next one begins, and not made again.
        """
        end = len(self._events)
        began: dict[int, tuple[int, int]] = {}
        lives: list[_Life] = []
        freed: list[tuple[int, int]] = []  # of what was there: when, bytes
        for number, event in enumerate(self._events):
            size_bytes = block_bytes(event.size_bytes)
            if event.allocated:
                began[event.address] = number, size_bytes
            elif event.address in began:
                start, size_bytes = began.pop(event.address)
                self._frees[number] = event.address
                lives.append(_Life(start, size_bytes, ((start, number),)))
            else:
                freed.append((number, size_bytes))
        until: dict[int, int] = {}
        for address, (start, size_bytes) in began.items():
            spans: tuple[tuple[int, int], ...] = ((start, end),)
            same = there.get(address)
            match = next((one for one in freed if one[1] == size_bytes), None)
            if same is not None and same.size_bytes == size_bytes:
                if match is None:
                    self._lasting.add(start)
                    continue
                freed.remove(match)
                until[address], self._frees[match[0]] = match[0], address
                self._stays[address] = start
                spans = ((0, match[0]), *spans) if match[0] else spans
            lives.append(_Life(start, size_bytes, spans))
        standing = [
            _Life(address, block.size_bytes, ((0, until.get(address, end)),))
            for address, block in there.items()
            if not block.small and block.grows
        ]
        return standing, [life for life in lives if life.size_bytes > LARGEST_SMALL_BYTES]

    def _run(self, planned: Addresses, relayout: Relayout | None, most_bytes: int) -> Filled:
        """Two steps in a row, as the allocator runs them."""
        allocator = CachingAllocator.of_snapshot(self._segments)
        blocks: dict[int, AddressRange] = {block.address: block for block in allocator.in_use()}
        programs: dict[str, Program] = {}  # of each op that ran, empty where nothing is filled
        mapping: tuple[int, ...] = ()
        if planned:
            ends = (planned[n] + block_bytes(self._events[n].size_bytes) for n in planned)
            end = max((end for end in ends if allocator.is_of_range(end - 1)), default=0)
            mapping = allocator.map_up_to(end, most_bytes)
        laid_out = 0
        for _ in range(2):
            made: dict[int, int] = {}  # address in the record → event, of what is in use
            for group in self._groups:
                first = self._events[group[0]]
                op = first.op if first.allocated else ""
                fillers: list[AddressRange] = []
                wanted: dict[int, int] = {}
                if op in programs:  # an op may run several times in a step, and the step does again and again
                    fillers = carried_out(programs[op], allocator.allocate, allocator.release)
                elif op:
                    wanted = {number: planned[number] for number in group if number in planned}
                    events = {number: self._events[number] for number in group if number not in self._lasting}
                    programs[op], fillers = steered(allocator, events, wanted, most_bytes) if wanted else ((), [])
                for number in group:
                    event = self._events[number]
                    if number in self._lasting:
                        continue
                    if event.allocated:
                        blocks[event.address] = allocator.allocate(event.size_bytes)
                        made[event.address] = number
                        if wanted.get(number) == blocks[event.address].address:
                            del wanted[number]
                    elif (address := self._frees.get(number, -1)) in blocks:
                        allocator.release(blocks.pop(address))
                        made.pop(address, None)
                for block in fillers:
                    allocator.release(block)
                if wanted and relayout is not None and laid_out < _MOST_LAID_OUT:
                    laid_out += 1
                    planned = relayout(allocator, {blocks[at].address: n for at, n in made.items()}, group[-1])
            for address, number in made.items():
                if self._stays.get(address) != number:  # gone when the next step begins, such as gradients
                    allocator.release(blocks.pop(address))
        programs = {op: program for op, program in programs.items() if program}
        return Filled(mapping, programs, allocator.peak_reserved_bytes, allocator.peak_allocated_bytes)


class _AddressLine:
    """Addresses of large blocks on one line: segments of a fixed size, a wall after each, then the range that grows.

    Attributes:
        walls: places that belong to no block.
    """

    def __init__(self, segments: Iterable[Mapping[str, Any]], allocator: CachingAllocator) -> None:
        self._grows = allocator.bottom
        self._fixed: list[tuple[int, int, int]] = []  # address, end, place
        self._start = 0
        for segment in sorted(segments, key=lambda one: int(one["address"])):
            if segment["segment_type"] == "large" and not segment["is_expandable"]:
                address, size_bytes = int(segment["address"]), int(segment["total_size"])
                self._fixed.append((address, address + size_bytes, self._start))
                self._start += size_bytes + 1
        self.walls = [place + end - address for address, end, place in self._fixed]

    def place(self, address: int) -> int:
        """Of an address."""
        for begin, end, place in self._fixed:
            if begin <= address < end:
                return place + address - begin
        return self._start + address - self._grows

    def address(self, place: int) -> int:
        """Of a place."""
        for begin, end, start in self._fixed:
            if start <= place < start + end - begin:
                return begin + place - start
        return self._grows + place - self._start


def _by_op(events: Sequence[Event]) -> list[list[int]]:
    """Events in a row of the same op. What an op frees before it allocates are the operands of the one before."""
    groups: list[list[int]] = []
    current = ""
    for number, event in enumerate(events):
        op = event.op if event.allocated or event.op == current else ""
        if groups and op == current:
            groups[-1].append(number)
        else:
            groups.append([number])
        current = op
    return groups


def fit_around(fixed: Iterable[tuple[int, int, Spans]], wanted: Sequence[tuple[int, Spans]]) -> list[int]:
    """The lowest place for each block, one after the other, that shares no byte with another while both are in use.

    Args:
        fixed: where each of the others begins and ends, and when it is in use.
        wanted: the size of each block, and when it is in use; the first is placed first.

    >>> fit_around([(0, 4, [(0, 9)]), (6, 9, [(0, 3)])], [(5, [(2, 4)]), (3, [(5, 6)]), (2, [(0, 9)])])
    [9, 4, 14]
    """
    rows = sorted((begin, end, since, until) for begin, end, spans in fixed for since, until in spans)
    n_all = len(rows) + sum(len(spans) for _, spans in wanted)
    placed = np.empty((4, n_all), np.int64)  # begins, ends, since, until; by begin
    count = len(rows)
    placed[:, :count] = np.array(rows, np.int64).reshape(-1, 4).T
    places = []
    for size, spans in wanted:
        begins, ends, since, until = placed[:, :count]
        meets = np.zeros(count, bool)
        for start, stop in spans:
            meets |= (since < stop) & (until > start)
        tops = np.maximum.accumulate(np.concatenate(([0], ends[meets])))
        gaps = begins[meets] - tops[:-1] >= size
        place = int(tops[np.argmax(gaps)] if gaps.any() else tops[-1])
        places.append(place)
        at = int(np.searchsorted(begins, place))
        n_new = len(spans)
        placed[:, at + n_new : count + n_new] = placed[:, at:count].copy()
        for column, (start, stop) in enumerate(spans, at):
            placed[:, column] = place, place + size, start, stop
        count += n_new
    return places
