"""The charts' columns say what the timeline says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan import Plan
from shoal.report import Report
from shoal.report.charts import MOST_POINTS, chart_data
from shoal.timeline import Moment, Timeline


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
