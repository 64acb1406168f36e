"""What is allocated before an op, so that the allocator puts the op's blocks where they are planned.

A program is a row of numbers. One above zero allocates a block of that many bytes; one below zero, `~k`, releases the
block of the program's k-th number. What is left is released after the op. Nothing is ever written to these blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from shoal.memory.layout.caching_allocator import LARGEST_SMALL_BYTES, AddressRange, CachingAllocator, block_bytes

Program = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """One thing that the allocator did.

    Attributes:
        op: that ran; "" for what runs outside the planned ops, such as the loss.
        address: where the block was.
        size_bytes: its size, as it was asked for.
        allocated: whether it was allocated; else freed.
    """

    op: str
    address: int
    size_bytes: int
    allocated: bool


def carried_out(program: Program, allocate: Callable[[int], T], release: Callable[[T], None]) -> list[T]:
    """The blocks that a program leaves."""
    held: list[T | None] = []
    for number in program:
        if number > 0:
            held.append(allocate(number))
        else:
            release(cast(T, held[~number]))
            held[~number] = None
            held.append(None)
    return [block for block in held if block is not None]


def steered(
    allocator: CachingAllocator, events: Mapping[int, Event], planned: Mapping[int, int], most_bytes: int
) -> tuple[Program, list[AddressRange]]:
    """Fill holes before an op so that its blocks lie as near to their planned addresses as can be.

    The op is rehearsed: before each block that is planned the holes are filled that the allocator would prefer, which
    stay filled while the op runs.

    Args:
        allocator: as it is before the op; the fillers are in use then.
        events: what the op does, by number.
        planned: of some of the blocks, by the number of the event that allocates each.
        most_bytes: that may be in use while the op runs, with the fillers.

    Returns:
        The program, and the blocks that it leaves.
    """
    program: list[int] = []
    fillers: dict[int, AddressRange] = {}  # by their places in the program
    rehearsed: dict[int, tuple[AddressRange, int]] = {}  # address in the record → block, its place in the program
    length = 0
    left_bytes = most_bytes - allocator.allocated_bytes - _most_at_once(events.values())
    for number, event in events.items():
        if not event.allocated:
            if event.address in rehearsed:
                block, place = rehearsed.pop(event.address)
                allocator.release(block)
                program.append(~place)
            continue
        if number in planned:
            for block in _fill(allocator, planned[number], block_bytes(event.size_bytes), left_bytes):
                fillers[len(program)] = block
                left_bytes -= block.size_bytes
                program.append(block.size_bytes)
                length = len(program)
        block = allocator.allocate(event.size_bytes)
        rehearsed[event.address] = block, len(program)
        program.append(block.size_bytes)
    for block, _ in rehearsed.values():
        allocator.release(block)
    del program[length:]  # nothing is filled after it
    still = [place for place, entry in enumerate(program) if entry > 0 and ~place not in program]
    return (*program, *(~place for place in still if place not in fillers)), list(fillers.values())


def _most_at_once(events: Iterable[Event]) -> int:
    """The most bytes in use at once of those that an op allocates."""
    in_use: dict[int, int] = {}
    most_bytes = 0
    for event in events:
        if event.allocated:
            in_use[event.address] = block_bytes(event.size_bytes)
            most_bytes = max(most_bytes, sum(in_use.values()))
        else:
            in_use.pop(event.address, None)
    return most_bytes


def _fill(allocator: CachingAllocator, planned: int, size_bytes: int, most_bytes: int) -> list[AddressRange]:
    """Allocate, in no more than that many bytes, what makes the next block lie as near to `planned` as can be."""
    near = (_nearest(hole, planned, size_bytes) for hole in allocator.holes(size_bytes))
    wanted = min(near, key=lambda place: (abs(place[1] - planned), place), default=None)
    if wanted is None:
        return []
    hole, address = wanted
    filled: list[AddressRange] = []
    left_bytes = most_bytes

    def fill_until(chosen: int, wanted_bytes: int) -> bool:
        nonlocal left_bytes
        while (choice := allocator.choice(wanted_bytes)) is not None and choice.address != chosen:
            if choice.size_bytes > left_bytes:
                return False
            left_bytes -= choice.size_bytes
            filled.append(allocator.allocate(choice.size_bytes))
        return choice is not None

    before_bytes = address - hole
    done = before_bytes == 0
    if not done and fill_until(hole, before_bytes):
        done = before_bytes <= left_bytes
        if done:
            left_bytes -= before_bytes
            filled.append(allocator.allocate(before_bytes))
    if done and fill_until(address, size_bytes):
        return filled
    for block in filled:
        allocator.release(block)
    return []


def _nearest(hole: AddressRange, planned: int, size_bytes: int) -> tuple[int, int]:
    """Where the hole begins, and where in it the block lies nearest to where it is planned.

    What fills the hole before it has to be a large block, too.
    """
    address = min(max(planned, hole.address), hole.end - size_bytes)
    if address - hole.address <= LARGEST_SMALL_BYTES:
        address = hole.address
    return hole.address, address
