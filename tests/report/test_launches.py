"""A step in which the device waits for the host to launch its ops, on the page and in the trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.report.charts import chart_data
from shoal.report.data import Report
from shoal.report.page import render
from shoal.report.tables import largest_storages, parts_of_model
from shoal.report.trace import trace_events
from shoal.report.words import place_of, tiles
from tests.random_steps import Builder


@pytest.fixture
def plan() -> Plan:
    """Launches of 3 s before kernels of 1 s, in two layers."""
    b = Builder()
    x = b.conv(b.input(100), 200, 1.0)
    graph = b.step(b.conv(x, 100, 1.0))
    return Plan(replace(graph, ops=tuple(replace(op, launch_seconds=3.0) for op in graph.ops)), {}, "by hand")


def test_a_tile_tells_how_long_the_device_waits(plan: Plan) -> None:
    (tile,) = [tile for tile in tiles(Report(plan.timeline, plan=plan)) if tile.label == "Waits for launches"]
    assert plan.timeline.launch_wait_seconds > 0
    assert tile.note.endswith("of the step, until the host has launched the next op")
    without = replace(plan, graph=plan.graph.without_launches())
    assert "Waits for launches" not in {tile.label for tile in tiles(Report(without.timeline, plan=without))}


def test_the_parts_of_the_model_have_a_column_for_it(plan: Plan) -> None:
    table = parts_of_model(plan.timeline, plan)
    assert table.columns["launch"] == "Waits for launches"
    assert table.rows[0]["launch"] != "0 s"
    without = replace(plan, graph=plan.graph.without_launches())
    assert "launch" not in parts_of_model(without.timeline, without).columns


def test_waits_are_on_a_track_of_their_own(plan: Plan) -> None:
    spans = [event for event in trace_events(plan.timeline) if event["ph"] == "X"]
    waits = [event for event in spans if event["cat"] == "launch"]
    assert sum(event["dur"] for event in waits) == pytest.approx(1e6 * plan.timeline.launch_wait_seconds)
    assert {event["tid"] for event in waits}.isdisjoint(event["tid"] for event in spans if event["cat"] != "launch")


def test_the_charts_hold_plain_pytorchs_ops_against_those_of_the_plan(plan: Plan) -> None:
    plain = chart_data(Report(plan.timeline, plan=plan))["plain"]
    moments = plan.timeline.moments
    assert [moments[at].phase for at in plain["at"]] == [op.phase for op in plan.graph.ops]
    assert len(plain["start"]) == len(plain["bytes"]) == len(plan.graph.ops)


def test_what_is_there_at_the_peak_is_there_although_the_device_waited_before(plan: Plan) -> None:
    without = replace(plan, graph=plan.graph.without_launches())
    rows = [{row.layer for row in largest_storages(one) if row.at_peak} for one in (plan, without)]
    assert rows[0] == rows[1]


def test_the_legend_and_the_words_name_the_wait(plan: Plan) -> None:
    assert "wait for a launch</li>" in render(Report(plan.timeline, plan=plan))
    assert place_of(plan.timeline.moments[0]) == "while the host launches conv_0 of conv_0"
