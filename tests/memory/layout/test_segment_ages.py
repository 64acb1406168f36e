"""Segments are put in the order in which the allocator takes their holes, and the allocator is left as it was."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.memory.layout import caching_allocator
from shoal.memory.layout.caching_allocator import CachingAllocator
from shoal.memory.layout.segment_ages import in_order_of_choice

MIB = 1 << 20
PAGE = 20 * MIB


def segment(number: int, holes: list[int], *, kind: str = "large", grows: bool = False) -> dict[str, Any]:
    """A segment with these holes, blocks in use of 512 bytes between them, and one after them that fills it up."""
    start = address = number * 100 * PAGE
    blocks = []
    for nbytes in holes:
        for size, state in ((512, "active_allocated"), (nbytes, "inactive")):
            blocks.append({"address": address, "size": size, "state": state})
            address += size
    total_bytes = -(-(address + 512 - start) // PAGE) * PAGE
    blocks.append({"address": address, "size": start + total_bytes - address, "state": "active_allocated"})
    return {
        "address": start,
        "segment_type": kind,
        "is_expandable": grows,
        "total_size": total_bytes,
        "blocks": blocks,
    }


def tried(shown: list[dict[str, Any]], truth: list[dict[str, Any]]) -> list[int]:
    """The addresses of the segments that are shown, in the order found out by an allocator that knows the true one."""
    allocator = CachingAllocator.of_snapshot(truth)
    before = [(block.address, block.size_bytes) for block in allocator.holes(0)]
    found = in_order_of_choice(
        shown,
        lambda nbytes: allocator.allocate(nbytes).address,
        lambda address: allocator.release(next(block for block in allocator.in_use() if block.address == address)),
    )
    assert [(block.address, block.size_bytes) for block in allocator.holes(0)] == before
    assert allocator.peak_reserved_bytes == sum(int(one["total_size"]) for one in truth)
    return [int(one["address"]) for one in found]


@pytest.fixture(autouse=True)
def oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching_allocator, "OLDEST_FIRST", True)


@given(
    st.lists(
        st.lists(st.sampled_from([2048, 9 * MIB // 8, 5 * MIB // 4, 3 * MIB, 7 * MIB]), min_size=1, max_size=3),
        min_size=2,
        max_size=7,
    ),
    st.integers(0, 1 << 30),
)
def test_segments_that_the_allocator_chooses_between_are_in_its_order(holes: list[list[int]], seed: int) -> None:
    shown = [segment(number, some) for number, some in enumerate(holes)]
    shown.append(segment(len(shown), [3 * MIB, 5 * MIB], grows=True))
    truth = Random(seed).sample(shown, len(shown))
    age = {int(one["address"]): number for number, one in enumerate(truth)}
    by_address = {int(one["address"]): one for one in shown}
    order = [address for address in tried(shown, truth) if not by_address[address]["is_expandable"]]
    for place, one in enumerate(order):
        for other in order[place + 1 :]:
            sizes = [{b["size"] for b in by_address[a]["blocks"] if b["state"] == "inactive"} for a in (one, other)]
            if {size for size in sizes[0] if size > MIB} & {size for size in sizes[1] if size > MIB}:
                assert age[one] < age[other]


def test_a_step_on_the_segments_in_order_lies_where_the_allocator_puts_it() -> None:
    random = Random(3)
    shown = [segment(number, [9 * MIB // 8, 9 * MIB // 8 * (1 + number % 3)]) for number in range(6)]
    truth = random.sample(shown, 6)
    order = tried(shown, truth)
    allocator = CachingAllocator.of_snapshot(truth)
    found = CachingAllocator.of_snapshot(sorted(shown, key=lambda one: order.index(int(one["address"]))))
    sizes = [random.choice([9 * MIB // 8, 2 * MIB, 3 * MIB]) for _ in range(40)]
    assert [found.allocate(size).address for size in sizes] == [allocator.allocate(size).address for size in sizes]
    assert order != sorted(order)


def test_small_segments_are_put_in_order_as_well_and_apart_from_large_ones() -> None:
    shown = [segment(number, [1024], kind="small") for number in range(3)]
    shown += [segment(number, [2 * MIB]) for number in range(3, 6)]
    truth = [shown[number] for number in (2, 5, 0, 4, 1, 3)]
    assert [address // (100 * PAGE) for address in tried(shown, truth)] == [2, 0, 1, 5, 4, 3]


def test_where_blocks_come_from_elsewhere_the_order_stays_and_what_was_taken_is_given_back() -> None:
    shown = [segment(number, [2 * MIB]) for number in range(3)]
    taken: list[int] = []

    def allocate(nbytes: int) -> int:
        taken.append(-1 - len(taken))
        return taken[-1]

    assert in_order_of_choice(shown, allocate, taken.remove) == shown
    assert not taken
