"""The use of the link, compared with second-by-second counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.plan import Plan
from shoal.core.timeline import Moment, Timeline, Transfer
from shoal.report.link_use import WAYS, busy_seconds, busy_share, link_use


def copy(start: float, seconds: float) -> Transfer:
    return Transfer("x", "layer", "to host", 1, start, seconds)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9))))
def test_the_link_is_busy_in_every_second_in_which_something_runs(times: list[tuple[int, int]]) -> None:
    seconds = {second for start, length in times for second in range(start, start + length)}
    assert busy_seconds([copy(start, length) for start, length in times]) == len(seconds)


def test_each_direction_carries_every_offloaded_byte_once(offload_plan: Plan) -> None:
    for way in WAYS:
        carried = link_use(offload_plan.timeline, way)
        offloaded = offload_plan.offloaded
        assert (carried.count, carried.nbytes) == (len(offloaded), sum(s.nbytes for s in offloaded))


def test_both_directions_at_once_count_once(offload_plan: Plan) -> None:
    timeline = offload_plan.timeline
    shares = [link_use(timeline, way).busy_share for way in WAYS]
    assert 0 < max(shares) <= busy_share(timeline) <= sum(shares) + 1e-9
    both = Timeline(
        "", timeline.moments, 0, tuple(Transfer("x", "", way, 8, 0.0, timeline.seconds / 4) for way in WAYS)
    )
    assert busy_share(both) == pytest.approx(0.25)


def test_a_step_without_times_is_not_busy() -> None:
    moment = Moment("relu", "aten.relu.default", "", "forward", 0.0, 0.0, 5, 0, 0, 0, 0, 0)
    assert busy_share(Timeline("", (moment,))) == 0.0
