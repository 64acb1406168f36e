"""Copies of one direction follow one another, the two directions run at once, and a wait is what is left of a copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Link
from shoal.core.link_queue import LinkQueue
from shoal.errors import PlanError
from tests.random_steps import plain_chain

LINK = Link("link", to_host_bytes_per_second=1000.0, to_device_bytes_per_second=500.0, latency_seconds=0.5)
GRAPH = replace(plain_chain(4, nbytes=1000), link=LINK)
FIRST, SECOND = (s.id for s in GRAPH.storages if s.name in ("conv_0.out", "conv_1.out"))


def test_a_copy_takes_its_latency_and_its_bytes_over_the_rate_of_its_direction() -> None:
    queue = LinkQueue(GRAPH)
    assert queue.offload(FIRST, 2.0) == (2.0, 3.5)
    assert queue.fetch(FIRST, 10.0) == (10.0, 12.5)


def test_copies_of_one_direction_follow_one_another_and_those_of_the_other_do_not() -> None:
    queue = LinkQueue(GRAPH)
    queue.offload(FIRST, 0.0)
    assert queue.offload(SECOND, 1.0) == (1.5, 3.0)
    assert queue.fetch(FIRST, 1.0) == (1.0, 3.5)


def test_the_device_waits_for_what_is_left_of_the_latest_copy() -> None:
    queue = LinkQueue(GRAPH)
    queue.offload(FIRST, 0.0)
    assert queue.stall(FIRST, 1.0) == pytest.approx(0.5)
    assert queue.stall(FIRST, 2.0) == 0.0
    queue.fetch(FIRST, 2.0)
    assert queue.stall(FIRST, 2.0) == pytest.approx(2.5)


@pytest.mark.parametrize(("overlaps", "waits"), [(True, 0.0), (False, 1.5)])
def test_a_link_that_does_not_overlap_is_waited_for_at_once(overlaps: bool, waits: float) -> None:
    queue = LinkQueue(replace(GRAPH, link=replace(LINK, overlaps=overlaps)))
    queue.offload(FIRST, 0.0)
    assert queue.stall_at_once(FIRST, 0.0) == pytest.approx(waits)


@given(st.lists(st.tuples(st.sampled_from([FIRST, SECOND]), st.floats(0.0, 3.0)), max_size=12))
def test_a_direction_carries_one_copy_at_a_time_and_is_idle_only_when_nothing_waits(
    asked: list[tuple[int, float]],
) -> None:
    queue, now, until = LinkQueue(GRAPH), 0.0, 0.0
    for storage, later in asked:
        now += later
        start, end = queue.offload(storage, now)
        assert start == max(now, until)
        assert end - start == pytest.approx(1.5)
        until = end


def test_a_step_without_a_link_says_what_to_give() -> None:
    with pytest.raises(PlanError, match=r"no link to the host; give hardware=, or offload_to="):
        LinkQueue(plain_chain(2))
