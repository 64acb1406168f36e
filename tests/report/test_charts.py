"""The charts' columns say what the timeline says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.plan import Plan
from shoal.core.timeline import Moment, Timeline
from shoal.report import Report
from shoal.report.charts import MOST_POINTS, chart_data
from tests.random_steps import SLOW_LINK, offloads, steps


def test_the_columns_add_up_to_the_timeline(plan: Plan, report: Report) -> None:
    memory = chart_data(report)["memory"]
    totals = [sum(column) for column in zip(*memory["bytes"].values(), strict=True)]
    assert totals == [moment.total_bytes for moment in plan.timeline.moments]
    assert totals[memory["peak"]] == plan.predicted_peak_bytes
    for column in ("op", "target", "layer", "phase"):
        assert [memory["texts"][i] for i in memory[column]] == [getattr(m, column) for m in plan.timeline.moments]


def test_plain_pytorch_stands_at_the_ops_it_shares_with_the_plan(plan: Plan, report: Report) -> None:
    plain = chart_data(report)["plain"]
    assert max(plain["bytes"]) == plan.plain_peak_bytes
    assert [plan.timeline.moments[i].op for i in plain["at"]] == [op.name for op in plan.graph.ops]


def test_plain_pytorch_is_drawn_beside_a_plan_that_runs_its_ops_in_another_order(plan: Plan) -> None:
    first, second, *rest = plan.timeline.moments
    swapped = replace(plan.timeline, moments=(second, first, *rest))
    plain, in_order = (chart_data(Report(timeline, plan=plan))["plain"] for timeline in (swapped, plan.timeline))
    assert plain == in_order and plain["at"][:2] == [0, 1]


def test_plain_pytorch_stands_at_its_ops_where_the_device_waits_in_between(offload_plan: Plan) -> None:
    plain = chart_data(Report(offload_plan.timeline, plan=offload_plan))["plain"]
    assert [offload_plan.timeline.moments[i].op for i in plain["at"]] == [op.name for op in offload_plan.graph.ops]
    assert offload_plan.timeline.stall_seconds > 0


@given(st.data())
def test_the_columns_of_any_plan_with_offloads_add_up(data: st.DataObject) -> None:
    graph = replace(data.draw(steps()), link=SLOW_LINK)
    plan = Plan(graph, data.draw(offloads(graph)), "random")
    charts = chart_data(Report(plan.timeline, plan=plan))
    totals = [sum(column) for column in zip(*charts["memory"]["bytes"].values(), strict=True)]
    assert totals == [moment.total_bytes for moment in plan.timeline.moments]
    assert charts["plain"] is not None
    assert ("fetched" in charts["memory"]["bytes"]) == bool(plan.offloaded)
    lanes = charts["link"] or []
    assert sum(len(lane["start"]) for lane in lanes) == 2 * len(plan.offloaded)
    for lane in lanes:
        spans = list(zip(lane["start"], lane["seconds"], strict=True))
        assert all(start + seconds <= following + 2e-9 for (start, seconds), (following, _) in pairwise(spans))
        assert all(start + seconds <= charts["memory"]["end"] + 2e-9 for start, seconds in spans)


def test_a_lane_tells_each_copy_and_how_busy_it_is(offload_plan: Plan) -> None:
    lanes = chart_data(Report(offload_plan.timeline))["link"]
    assert [lane["way"] for lane in lanes] == ["to host", "to device"]
    for lane in lanes:
        transfers = [t for t in offload_plan.timeline.transfers if t.way == lane["way"]]
        told = zip(lane["storage"], lane["layer"], lane["bytes"], lane["start"], lane["seconds"], strict=True)
        for (storage, layer, nbytes, start, seconds), transfer in zip(told, transfers, strict=True):
            assert (storage, layer, nbytes) == (transfer.storage, transfer.layer, transfer.nbytes)
            assert (start, seconds) == pytest.approx((transfer.start_seconds, transfer.seconds), abs=1e-9)
    assert [lane["summary"] for lane in lanes] == [
        "512.2 MiB, busy 7.5 % of the step",
        "512.2 MiB, busy 10 % of the step",
    ]


def test_without_offloads_there_is_no_lane_and_nothing_fetched(report: Report) -> None:
    charts = chart_data(report)
    assert charts["link"] is None and "fetched" not in charts["memory"]["bytes"]


def test_a_plan_of_another_step_draws_no_plain_curve(plan: Plan) -> None:
    other = Timeline("other", plan.timeline.moments[:3])
    assert chart_data(Report(other, plan=plan))["plain"] is None


def test_losses_that_are_not_finite_leave_a_gap(report: Report) -> None:
    data = chart_data(replace(report, losses=(1.0, float("nan"), float("inf"), 2.0), accuracies=()))
    assert data["losses"]["loss"] == [1.0, None, None, 2.0]
    assert "NaN" not in json.dumps(data) and "Infinity" not in json.dumps(data)


@given(st.integers(0, 3 * MOST_POINTS + 7))
def test_long_loss_curves_keep_their_ends_and_their_mean(count: int) -> None:
    losses = tuple(float(i % 10) for i in range(count))
    moment = Moment("relu", "aten.relu.default", "", "forward", 0.0, 1.0, 5, 0, 0, 0, 0, 0)
    curve = chart_data(Report(Timeline("", (moment,)), losses=losses))["losses"]
    assert len(curve["loss"]) == len(curve["step"]) <= MOST_POINTS
    if count:
        assert curve["step"][-1] == count
        sizes = [b - a for a, b in zip([0, *curve["step"]], curve["step"], strict=False)]
        total = sum(size * loss for size, loss in zip(sizes, curve["loss"], strict=True))
        assert total == pytest.approx(sum(losses), abs=1e-6 * count)
