"""A pool leases each slab to one holder at a time, makes no more than it must and stays inside its budget."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TransferError
from shoal.offload.links.host import HostSlab
from shoal.offload.links.slab import Lease, SlabPool
from tests.raising import raising

PAGE = 4096


def pool_of(pages: int | None = None) -> SlabPool:
    return SlabPool(HostSlab, "host memory", None if pages is None else pages * PAGE)


def test_one_step_after_another_has_the_same_slab() -> None:
    pool = pool_of()
    first = pool.lease(PAGE)
    slab = first.slab
    assert pool.leased == 1
    del first
    assert pool.leased == 0
    assert pool.lease(PAGE).slab is slab
    assert pool.held_bytes == PAGE


def test_two_at_once_have_two_and_a_third_after_them_has_no_third() -> None:
    pool = pool_of()
    leases = [pool.lease(PAGE), pool.lease(PAGE)]
    slabs = {lease.slab for lease in leases}
    assert len(slabs) == 2
    leases.clear()
    assert pool.lease(PAGE).slab in slabs
    assert pool.held_bytes == 2 * PAGE


def test_the_smallest_slab_that_fits_is_leased() -> None:
    pool = pool_of()
    leases = [pool.lease(pages * PAGE) for pages in (5, 2, 3)]
    leases.clear()
    assert pool.lease(2 * PAGE).slab.nbytes == 2 * PAGE
    assert pool.lease(3 * PAGE + 1).slab.nbytes == 5 * PAGE


def test_what_is_over_the_budget_is_refused_and_what_reaches_it_is_not() -> None:
    pool = pool_of(pages=3)
    held = pool.lease(2 * PAGE)
    with raising(TransferError, "8.000 KiB", "12.00 KiB"):
        pool.lease(2 * PAGE)
    other = pool.lease(PAGE)
    assert pool.held_bytes == 3 * PAGE
    del held, other
    assert pool.lease(2 * PAGE)


def test_free_slabs_make_way_for_one_that_is_needed() -> None:
    pool = pool_of(pages=4)
    leases = [pool.lease(PAGE), pool.lease(3 * PAGE)]
    leases.clear()
    assert pool.lease(4 * PAGE).slab.nbytes == 4 * PAGE
    assert pool.held_bytes == 4 * PAGE


def test_a_reservation_is_made_at_once_and_given_back_with_the_last() -> None:
    pool = pool_of(pages=4)
    with pytest.raises(TransferError):
        pool.reserve(5 * PAGE)
    pool.reserve(PAGE)
    assert pool.held_bytes == PAGE
    pool.reserve(3 * PAGE)
    assert pool.held_bytes == 3 * PAGE, "the larger one serves both"
    pool.reserve(2 * PAGE)
    assert pool.held_bytes == 3 * PAGE
    pool.unreserve(3 * PAGE)
    assert pool.held_bytes == 3 * PAGE, "the one there is serves the others"
    pool.unreserve(2 * PAGE)
    pool.unreserve(PAGE)
    assert pool.held_bytes == 0


def test_a_slab_that_is_leased_when_its_last_reservation_ends_dies_with_its_lease() -> None:
    pool = pool_of()
    pool.reserve(PAGE)
    lease = pool.lease(PAGE)
    pool.unreserve(PAGE)
    assert pool.held_bytes == PAGE
    del lease
    assert pool.held_bytes == 0


def test_a_leased_slab_outlives_its_pool_and_not_its_lease() -> None:
    pool = pool_of()
    lease = pool.lease(PAGE)
    pool.close()
    assert pool.held_bytes == PAGE
    with pytest.raises(TransferError):
        pool.lease(PAGE)
    del lease
    assert pool.held_bytes == 0


def test_a_lease_in_a_cycle_is_free_once_collected() -> None:
    pool = pool_of(pages=1)
    cycle: list[object] = [pool.lease(PAGE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.lease(PAGE)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 9)), max_size=40), st.integers(3, 12))
def test_no_slab_has_two_holders_and_no_budget_is_exceeded(
    calls: list[tuple[int, bool, int]], budget_pages: int
) -> None:
    pool = pool_of(budget_pages)
    leases: list[Lease] = []
    for pages, ends, which in calls:
        if ends and leases:
            del leases[which % len(leases)]
            continue
        held = sum(lease.slab.nbytes for lease in leases)
        try:
            lease = pool.lease(pages * PAGE)
        except TransferError:
            assert held + pages * PAGE > budget_pages * PAGE, "refused though there was room"
            continue
        leases.append(lease)
        assert lease.slab.nbytes >= pages * PAGE
        assert len({lease.slab for lease in leases}) == len(leases) == pool.leased
        assert pool.held_bytes <= budget_pages * PAGE
        del lease
