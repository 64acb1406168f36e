"""Fillers make the allocator choose planned addresses: replayed here with an allocator that knows nothing of a plan."""

from __future__ import annotations

from random import Random

import pytest

from shoal.memory.layout.caching_allocator import AddressRange, CachingAllocator
from shoal.memory.layout.fillers import Filled, RecordedStep, fit_around
from shoal.memory.layout.steering import Event, carried_out

MIB = 1 << 20
Block = tuple[int, int, list[tuple[int, int]]]


def allocated(op: str, address: int, mib: int) -> Event:
    return Event(op, address, mib * MIB, allocated=True)


def freed(event: Event) -> Event:
    return Event("", event.address, event.size_bytes, allocated=False)


def drawn(seed: int) -> list[Event]:
    random, live, events = Random(seed), list[Event](), list[Event]()
    for number in range(60):
        if len(live) > 3 and random.random() < 0.55:
            events.append(freed(live.pop(random.randrange(len(live)))))
        else:
            live.append(allocated(f"op {number}", number, random.choice((3, 5, 8, 13, 40, 80))))
            events.append(live[-1])
    return events + [freed(event) for event in live]


def replayed(events: list[Event], filled: Filled, steps: int = 3) -> CachingAllocator:
    """What the allocator does in some steps."""
    allocator = CachingAllocator()
    for block in [allocator.allocate(nbytes) for nbytes in filled.mapping]:
        allocator.release(block)
    for _ in range(steps):
        blocks: dict[int, AddressRange] = {}
        for event in events:
            if not event.allocated:
                allocator.release(blocks.pop(event.address))
                continue
            fillers = carried_out(filled.programs.get(event.op, ()), allocator.allocate, allocator.release)
            blocks[event.address] = allocator.allocate(event.size_bytes)
            for block in fillers:
                allocator.release(block)
    return allocator


EMPTY = Filled((), {}, 0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_a_step_reserves_what_is_said_and_no_more_than_unplanned(seed: int) -> None:
    events = drawn(seed)
    step = RecordedStep(events, [])
    natural, filled = step.as_it_is(), step.filled(1 << 40)
    unplanned, planned = replayed(events, EMPTY), replayed(events, filled)
    assert (natural.reserved_bytes, natural.allocated_bytes) == (
        unplanned.peak_reserved_bytes,
        unplanned.peak_allocated_bytes,
    )
    assert (filled.reserved_bytes, filled.allocated_bytes) == (
        planned.peak_reserved_bytes,
        planned.peak_allocated_bytes,
    )
    assert filled.reserved_bytes <= natural.reserved_bytes


def test_a_block_that_would_split_a_hole_lies_behind_it() -> None:
    wide, saved, late, again = (allocated(f"op {n}", n, mib) for n, mib in enumerate((100, 20, 20, 100)))
    events = [wide, saved, freed(wide), late, again, freed(again), freed(late), freed(saved)]
    step = RecordedStep(events, [])
    assert step.as_it_is().reserved_bytes == 220 * MIB
    filled = step.filled(140 * MIB)
    assert filled.reserved_bytes == filled.allocated_bytes == 140 * MIB
    assert sum(map(len, filled.programs.values())) == 1


def test_no_more_is_filled_than_may_be_in_use() -> None:
    for seed in range(30):
        step = RecordedStep(drawn(seed), [])
        natural = step.as_it_is()
        assert step.filled(natural.allocated_bytes).allocated_bytes <= natural.allocated_bytes


def test_what_was_there_before_stays_and_its_holes_are_used() -> None:
    used = {"address": 0, "size": 18 * MIB, "state": "active_allocated"}
    hole = {"address": 18 * MIB, "size": 20 * MIB, "state": "inactive"}
    behind = {"address": 38 * MIB, "size": 2 * MIB, "state": "active_allocated"}
    segment = {"address": 0, "total_size": 40 * MIB, "segment_type": "large", "is_expandable": True}
    one, two = allocated("op 1", 1 << 50, 19), allocated("op 2", 1 << 51, 41)
    step = RecordedStep([one, two, freed(two), freed(one)], [{**segment, "blocks": [used, hole, behind]}])
    filled = step.filled(1 << 40)
    assert (filled.reserved_bytes, filled.allocated_bytes) == (100 * MIB, 80 * MIB)


def test_what_the_recorded_step_left_for_good_is_not_made_again() -> None:
    """As the state that an optimizer's first step allocates: it stands when the next step begins."""
    state, saved = allocated("", 0, 20), allocated("op 1", 1 << 50, 60)
    there = {"address": 0, "size": 20 * MIB, "state": "active_allocated"}
    segment = {"address": 0, "total_size": 20 * MIB, "segment_type": "large", "is_expandable": True}
    step = RecordedStep([saved, freed(saved), state], [{**segment, "blocks": [there]}])
    assert step.as_it_is().allocated_bytes == step.as_it_is().reserved_bytes == 80 * MIB


def test_no_layout_is_looked_for_below_what_is_enough() -> None:
    step = RecordedStep(drawn(0), [])
    natural = step.as_it_is()
    assert step.filled(1 << 40).reserved_bytes < natural.reserved_bytes
    assert step.filled(1 << 40, natural.reserved_bytes) == natural


def lowest(blocks: list[Block], size: int, spans: list[tuple[int, int]]) -> int:
    """The lowest place at which no byte is another's at any time of the spans, by trying each."""
    for place in range(1000):
        taken = any(
            place < end and begin < place + size and any(a < d and c < b for a, b in spans for c, d in theirs)
            for begin, end, theirs in blocks
        )
        if not taken:
            return place
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_each_block_lies_at_the_lowest_place_that_is_free(seed: int) -> None:
    random = Random(seed)

    def spans() -> list[tuple[int, int]]:
        first = random.randrange(20)
        second = random.randrange(first + 2, 30)
        return [(first, first + 1), (second, second + 4)] if random.random() < 0.3 else [(first, second)]

    fixed: list[Block] = []
    for _ in range(4):
        begin = random.randrange(40)
        fixed.append((begin, begin + random.randrange(1, 9), spans()))
    wanted = [(random.randrange(1, 12), spans()) for _ in range(15)]
    blocks = list(fixed)
    for (size, when), place in zip(wanted, fit_around(fixed, wanted), strict=True):
        assert place == lowest(blocks, size, when)
        blocks.append((place, place + size, when))


def test_without_others_the_first_lies_at_the_start() -> None:
    assert fit_around([], [(5, [(0, 1)]), (3, [(1, 2)]), (2, [(0, 2)])]) == [0, 0, 5]
    assert fit_around([(0, 1, [(0, 1)])], []) == []
