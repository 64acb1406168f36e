"""The trace is a valid Chrome trace that adds up to its timeline."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.plan import Plan
from shoal.report import save_trace
from shoal.report.trace import trace_events
from shoal.timeline import Moment, MomentPhase, Timeline


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Moments end to end, with times of any scale and bytes of any size."""
    durations = draw(st.lists(st.floats(0, 10), min_size=1, max_size=30))
    phases = st.sampled_from(get_args(MomentPhase))
    start, moments = 0.0, []
    for i, seconds in enumerate(durations):
        sizes = draw(st.lists(st.integers(0, 2**40), min_size=6, max_size=6))
        moments.append(Moment(f"op{i}", "aten.relu.default", "layer", draw(phases), start, seconds, *sizes))
        start += seconds
    return Timeline("random", tuple(moments), draw(st.sampled_from([0, 2**30])))


@given(timelines())
def test_time_stamps_never_go_back_and_ops_never_overlap(timeline: Timeline) -> None:
    events = trace_events(timeline)
    stamps = [event["ts"] for event in events]
    assert stamps == sorted(stamps)
    spans = [(round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in events if e["ph"] == "X"]
    assert all(end >= start for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@given(timelines())
def test_every_moment_is_one_event_whose_bytes_add_up(timeline: Timeline) -> None:
    events = trace_events(timeline)
    ops = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in ops] == [moment.op for moment in timeline.moments]
    assert [event["args"]["bytes"] for event in ops] == [moment.total_bytes for moment in timeline.moments]
    for event in ops:
        parts = [size for key, size in event["args"].items() if key.endswith("_bytes")]
        assert sum(parts) == event["args"]["bytes"]
    stacked = [sum(event["args"].values()) for event in events if event["name"] == "bytes in use by category"]
    assert stacked == [moment.total_bytes for moment in timeline.moments]


@given(timelines())
def test_tracks_are_named_before_they_are_used_and_none_is_empty(timeline: Timeline) -> None:
    events = trace_events(timeline)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {named[event["tid"]] for event in events if event["ph"] == "X"} == set(named.values())
    assert all(named[event["tid"]] == event["cat"] for event in events if event["ph"] == "X")


def test_the_durations_add_up_to_the_step(plan: Plan) -> None:
    micros = sum(event["dur"] for event in trace_events(plan.timeline) if event["ph"] == "X")
    assert micros == pytest.approx(1e6 * plan.predicted_seconds, rel=1e-6)


def test_the_file_is_the_json_object_form(plan: Plan, tmp_path: Path) -> None:
    path = plan.timeline.save_trace(tmp_path / "step.json")
    trace = json.loads(path.read_text())
    assert trace["otherData"]["peak_bytes"] == plan.predicted_peak_bytes
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    assert all({"name", "ph", "pid", "tid", "ts"} <= event.keys() for event in trace["traceEvents"])
    budgets = [event["args"]["bytes"] for event in trace["traceEvents"] if event["name"] == "budget"]
    assert budgets == [plan.budget_bytes] * 2  # at both ends, so that the line spans the step


def test_without_a_budget_there_is_no_budget_track(plan: Plan) -> None:
    names = {event["name"] for event in trace_events(Timeline("free", plan.timeline.moments))}
    assert "budget" not in names and "bytes in use" in names


def test_bad_paths_and_empty_timelines_are_input_errors(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        save_trace(plan.timeline, tmp_path / "gone" / "step.json")
    with pytest.raises(InputError, match="no moments"):
        save_trace(Timeline("empty", ()), tmp_path / "step.json")
