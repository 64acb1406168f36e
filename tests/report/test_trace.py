"""The trace is a valid Chrome trace that adds up to its timeline."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.plan import Plan
from shoal.core.timeline import Moment, MomentPhase, Timeline, Transfer, TransferWay
from shoal.errors import InputError
from shoal.report import save_trace
from shoal.report.trace import trace_events

_WAIT_AND_SECONDS = st.tuples(st.just(0.0) | st.floats(0, 3), st.floats(0, 5))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Moments end to end, and transfers in each direction one after another, with times and bytes of any size."""
    durations = draw(st.lists(st.floats(0, 10), min_size=1, max_size=30))
    phases = st.sampled_from(get_args(MomentPhase))
    start, moments = 0.0, []
    for i, seconds in enumerate(durations):
        sizes = draw(st.lists(st.integers(0, 2**40), min_size=6, max_size=7))
        moments.append(Moment(f"op{i}", "aten.relu.default", "layer", draw(phases), start, seconds, *sizes))
        start += seconds
    transfers = []
    for way in get_args(TransferWay):
        now = draw(st.floats(0, 5))
        for i, (wait, seconds) in enumerate(draw(st.lists(_WAIT_AND_SECONDS, max_size=8))):
            transfers.append(Transfer(f"x{i}", "layer", way, draw(st.integers(0, 2**40)), now + wait, seconds))
            now += wait + seconds
    transfers.sort(key=lambda transfer: transfer.start_seconds)
    return Timeline("random", tuple(moments), draw(st.sampled_from([0, 2**30])), tuple(transfers))


@given(timelines())
def test_time_stamps_never_go_back_and_ops_never_overlap(timeline: Timeline) -> None:
    events = trace_events(timeline)
    stamps = [event["ts"] for event in events]
    assert stamps == sorted(stamps)
    ways = get_args(TransferWay)
    for track in (
        get_args(MomentPhase),
        *((way,) for way in ways),
    ):  # the device does one thing at a time, in any phase
        shown = [event for event in events if event["ph"] == "X" and event["cat"] in track]
        spans = [(round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in shown]
        assert all(end >= start for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@given(timelines())
def test_every_moment_is_one_event_whose_bytes_add_up(timeline: Timeline) -> None:
    events = trace_events(timeline)
    ops = [event for event in events if event["ph"] == "X" and event["cat"] in get_args(MomentPhase)]
    assert [event["name"] for event in ops] == [moment.op for moment in timeline.moments]
    assert [event["args"]["bytes"] for event in ops] == [moment.total_bytes for moment in timeline.moments]
    for event in ops:
        parts = [size for key, size in event["args"].items() if key.endswith("_bytes")]
        assert sum(parts) == event["args"]["bytes"]
    stacked = [sum(event["args"].values()) for event in events if event["name"] == "bytes in use by category"]
    assert stacked == [moment.total_bytes for moment in timeline.moments]


@given(timelines())
def test_every_transfer_is_one_event_on_the_track_of_its_direction(timeline: Timeline) -> None:
    events = [event for event in trace_events(timeline) if event["ph"] == "X"]
    for way in get_args(TransferWay):
        shown = [(e["name"], e["args"]["bytes"], e["args"]["layer"]) for e in events if e["cat"] == way]
        assert shown == [(t.storage, t.nbytes, t.layer) for t in timeline.transfers if t.way == way]


@given(timelines())
def test_tracks_are_named_before_they_are_used_and_none_is_empty(timeline: Timeline) -> None:
    events = trace_events(timeline)
    named = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {named[event["tid"]] for event in events if event["ph"] == "X"} == set(named.values())
    assert all(named[event["tid"]] == event["cat"] for event in events if event["ph"] == "X")


def test_the_durations_add_up_to_the_step(plan: Plan) -> None:
    micros = sum(event["dur"] for event in trace_events(plan.timeline) if event["ph"] == "X")
    assert micros == pytest.approx(1e6 * plan.predicted_seconds, rel=1e-6)


def test_transfers_and_stalls_last_as_long_as_in_the_timeline(offload_plan: Plan) -> None:
    timeline = offload_plan.timeline
    micros: Counter[str] = Counter()
    for event in trace_events(timeline):
        if event["ph"] == "X":
            micros[event["cat"]] += event["dur"]
    assert micros["stall"] == pytest.approx(1e6 * timeline.stall_seconds, rel=1e-4)
    for way in get_args(TransferWay):
        seconds = sum(transfer.seconds for transfer in timeline.transfers if transfer.way == way)
        assert micros[way] == pytest.approx(1e6 * seconds, rel=1e-4)
    assert timeline.stall_seconds > 0 and timeline.transfers


def test_the_speed_of_a_transfer_is_what_the_link_gives_after_its_latency(offload_plan: Plan) -> None:
    link = offload_plan.graph.link
    assert link is not None
    shown = [event for event in trace_events(offload_plan.timeline) if event.get("cat") == "to host"]
    speeds = [event["args"]["bytes_per_second"] for event in shown]
    assert 0.7 * link.to_host_bytes_per_second < min(speeds) <= max(speeds) < link.to_host_bytes_per_second


def test_neighbours_touch_where_a_rounding_would_make_them_overlap(plan: Plan) -> None:
    first, second = Transfer("a", "", "to host", 8, 0.0, 2.6e-9), Transfer("b", "", "to host", 8, 2.4e-9, 1e-9)
    events = trace_events(replace(plan.timeline, transfers=(first, second)))
    spans = [(event["ts"], event["dur"]) for event in events if event.get("cat") == "to host"]
    assert spans == [(0.0, 0.002), (0.002, 0.001)]


def test_without_offloads_no_track_of_the_link_is_there(plan: Plan) -> None:
    events = trace_events(plan.timeline)
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named == {"forward", "loss", "recompute", "backward"}
    assert not any("fetched_bytes" in event["args"] for event in events)


def test_the_file_is_the_json_object_form(plan: Plan, tmp_path: Path) -> None:
    path = plan.save_trace(tmp_path / "step.json")
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
    with pytest.raises(InputError):
        save_trace(plan.timeline, tmp_path / "gone" / "step.json")
    with pytest.raises(InputError):
        save_trace(Timeline("empty", ()), tmp_path / "step.json")
