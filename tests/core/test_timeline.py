"""What a timeline sums up is what its moments say."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.timeline import Moment, MomentPhase, Timeline
from shoal.planners.just_in_time import just_in_time
from tests.random_steps import steps

counts = st.integers(0, 1000)
moments = st.builds(
    Moment,
    st.text(max_size=3),
    st.text(max_size=3),
    st.text(max_size=3),
    st.sampled_from(get_args(MomentPhase)),
    st.floats(0, 9),
    st.floats(0, 9),
    *[counts] * 7,
)
timelines = st.builds(Timeline, st.text(max_size=3), st.lists(moments, min_size=1, max_size=8).map(tuple), counts)


@given(moments)
def test_the_bytes_of_a_moment_add_up(moment: Moment) -> None:
    categories = [getattr(moment, field.name) for field in fields(moment) if field.name.endswith("_bytes")]
    assert len(categories) == 7
    assert moment.total_bytes == sum(categories)


@given(timelines)
def test_the_peak_is_the_first_moment_with_the_most_bytes(timeline: Timeline) -> None:
    totals = [moment.total_bytes for moment in timeline.moments]
    assert timeline.peak_bytes == max(totals)
    assert timeline.peak is timeline.moments[totals.index(max(totals))]


@given(timelines)
def test_recomputation_is_the_time_of_its_moments(timeline: Timeline) -> None:
    again = [moment.seconds for moment in timeline.moments if moment.phase == "recompute"]
    assert timeline.recompute_seconds == pytest.approx(sum(again))
    assert timeline.seconds == timeline.moments[-1].start_seconds + timeline.moments[-1].seconds


@given(steps())
def test_a_simulated_step_has_no_gaps_in_time(graph: StepGraph) -> None:
    timeline = simulate(graph, just_in_time(graph, ()))
    now = 0.0
    for moment in timeline.moments:
        assert moment.start_seconds == pytest.approx(now)
        now += moment.seconds
    assert timeline.seconds == pytest.approx(now)


@given(timelines)
def test_json_holds_every_number(timeline: Timeline) -> None:
    value = json.loads(json.dumps(timeline.to_json()))
    again = [Moment(**moment) for moment in value["moments"]]
    assert Timeline(value["model"], tuple(again), value["budget_bytes"]) == timeline
