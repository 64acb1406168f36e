"""The caching allocator as data. `tests/cuda_standin/test_placement.py` compares it with PyTorch's own."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from shoal.memory.layout.caching_allocator import AddressRange, CachingAllocator, block_bytes

MIB = 1 << 20


def test_blocks_that_are_in_use_share_no_byte_and_all_of_them_are_reserved() -> None:
    random, allocator, live = Random(0), CachingAllocator(), list[AddressRange]()
    for _ in range(600):
        if live and random.random() < 0.5:
            allocator.release(live.pop(random.randrange(len(live))))
        else:
            live.append(allocator.allocate(random.choice((random.randrange(1, MIB), random.randrange(MIB, 40 * MIB)))))
        spans = sorted((block.address, block.end) for block in live)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size_bytes for block in live) <= allocator.reserved_bytes
    assert allocator.in_use() == sorted(live, key=lambda block: block.address)
    for block in live:
        allocator.release(block)
    assert (allocator.allocated_bytes, allocator.in_use()) == (0, [])


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    wide, _, narrow, _, tail = (allocator.allocate(size * MIB) for size in (9, 2, 5, 2, 30))
    for block in (wide, narrow, tail):
        allocator.release(block)
    assert allocator.allocate(4 * MIB).address == narrow.address
    assert allocator.allocate(6 * MIB).address == wide.address
    assert allocator.allocate(10 * MIB).address == tail.address
    assert allocator.reserved_bytes == 60 * MIB  # pages of 20 MiB


def test_a_page_that_is_not_mapped_takes_no_memory_and_is_mapped_again() -> None:
    page = 20 * MIB
    blocks = [{"address": 0, "size": page, "state": "active_allocated"}]
    behind = [{"address": 2 * page, "size": page, "state": "active_allocated"}]
    segment = {"segment_type": "large", "is_expandable": True, "total_size": page}
    allocator = CachingAllocator.of_snapshot(
        [{**segment, "address": 0, "blocks": blocks}, {**segment, "address": 2 * page, "blocks": behind}]
    )
    assert allocator.reserved_bytes == allocator.allocated_bytes == 2 * page
    assert allocator.allocate(page + 1).address == 3 * page
    assert allocator.allocate(page).address == page
    assert allocator.reserved_bytes == 5 * page


@pytest.mark.parametrize(("most_pages", "mapped_pages"), [(9, 5), (3, 3)])
def test_gaps_between_blocks_are_mapped_as_well_as_what_comes_behind_them(most_pages: int, mapped_pages: int) -> None:
    page = 20 * MIB
    blocks = [{"address": 0, "size": page, "state": "active_allocated"}]
    behind = [{"address": 3 * page, "size": page, "state": "active_allocated"}]
    segment = {"segment_type": "large", "is_expandable": True, "total_size": page}
    allocator = CachingAllocator.of_snapshot(
        [{**segment, "address": 0, "blocks": blocks}, {**segment, "address": 3 * page, "blocks": behind}]
    )
    sizes = allocator.map_up_to(5 * page, most_pages * page)
    assert sum(sizes) == (mapped_pages - 2) * page
    assert allocator.reserved_bytes == mapped_pages * page
    assert allocator.allocated_bytes == 2 * page


def test_sizes_are_rounded_to_blocks_of_512_bytes() -> None:
    assert [block_bytes(nbytes) for nbytes in (0, 1, 512, 513)] == [512, 512, 512, 1024]
