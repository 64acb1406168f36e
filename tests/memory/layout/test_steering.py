"""What is allocated before an op makes its blocks lie where they are planned; the op itself knows nothing of it."""

from __future__ import annotations

from random import Random

import pytest

from shoal.memory.layout.caching_allocator import AddressRange, CachingAllocator
from shoal.memory.layout.steering import Event, carried_out, steered

MIB = 1 << 20


def with_holes(*mib: int) -> tuple[CachingAllocator, list[int]]:
    """An allocator with holes of these sizes, between blocks in use, and where each begins."""
    allocator = CachingAllocator()
    holes = []
    for size in mib:
        holes.append(allocator.allocate(size * MIB))
        allocator.allocate(2 * MIB)
    for hole in holes:
        allocator.release(hole)
    return allocator, [hole.address for hole in holes]


def allocated(number: int, mib: int) -> Event:
    return Event("op", number, mib * MIB, allocated=True)


def freed(event: Event) -> Event:
    return Event("op", event.address, event.size_bytes, allocated=False)


def addresses_of(allocator: CachingAllocator, events: dict[int, Event]) -> dict[int, int]:
    """Where an op's blocks come to lie."""
    blocks: dict[int, AddressRange] = {}
    found = {}
    for number, event in events.items():
        if event.allocated:
            blocks[event.address] = allocator.allocate(event.size_bytes)
            found[number] = blocks[event.address].address
        else:
            allocator.release(blocks.pop(event.address))
    return found


def test_two_blocks_of_one_op_lie_where_both_are_planned() -> None:
    allocator, (wide, narrow, widest) = with_holes(30, 20, 60)
    one, two = allocated(0, 8), allocated(1, 18)
    events = {0: one, 1: two}
    program, _ = steered(allocator, events, {0: wide, 1: widest + 10 * MIB}, 1 << 40)
    assert any(number < 0 for number in program)  # the first block is rehearsed
    assert narrow not in (found := addresses_of(allocator, events)).values()
    assert found == {0: wide, 1: widest + 10 * MIB}


def test_a_scratch_block_that_an_op_frees_makes_room_for_its_result() -> None:
    allocator, (wide, _) = with_holes(40, 10)
    scratch, result = allocated(0, 9), allocated(1, 40)
    events = {0: scratch, 1: freed(scratch), 2: result}
    steered(allocator, events, {0: wide, 2: wide}, 1 << 40)
    assert addresses_of(allocator, events) == {0: wide, 2: wide}


def test_nothing_is_filled_beyond_what_may_be_in_use_while_the_op_runs() -> None:
    allocator, (wide, narrow) = with_holes(30, 20)
    events = {0: allocated(0, 10), 1: allocated(1, 15)}
    enough_bytes = allocator.allocated_bytes + (10 + 15 + 20) * MIB
    assert steered(allocator, events, {0: wide}, enough_bytes - 1) == ((), [])
    program, fillers = steered(allocator, events, {0: wide}, enough_bytes)
    assert program == (20 * MIB,)
    assert [block.address for block in fillers] == [narrow]


@pytest.mark.parametrize("seed", range(20))
def test_a_program_does_again_what_steering_did(seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice((3, 5, 8, 13, 40)) for _ in range(6)]
    (one, holes), (other, _) = with_holes(*sizes), with_holes(*sizes)
    events: dict[int, Event] = {}
    for number in range(5):
        events[len(events)] = event = allocated(number, random.choice((2, 3, 5, 8)))
        if random.random() < 0.4:
            events[len(events)] = freed(event)
    planned = {n: random.choice(holes) for n, event in events.items() if event.allocated and random.random() < 0.7}
    most_bytes = one.allocated_bytes + random.choice((40, 60, 1000)) * MIB
    program, fillers = steered(one, events, planned, most_bytes)
    again = carried_out(program, other.allocate, other.release)
    assert [block.address for block in again] == [block.address for block in fillers]
    assert addresses_of(one, events) == addresses_of(other, events)
    assert other.reserved_bytes == one.reserved_bytes
