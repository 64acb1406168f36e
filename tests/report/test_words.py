"""What the page says of a run, sentence by sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan import Plan
from shoal.report import Report
from shoal.report.words import (
    category_bytes,
    fillings,
    format_percent,
    format_seconds,
    headline,
    lede,
    name_of,
    scales,
    settings,
    tiles,
)


def said(report: Report) -> str:
    return headline(report).replace("\u00a0", " ")


def test_the_headline_states_size_slowdown_and_promise(report: Report) -> None:
    assert said(report) == "369 MiB of plain PyTorch’s 695 MiB, 29 % slower, promise kept"


def test_a_broken_promise_is_said_with_its_bytes(plan: Plan, report: Report) -> None:
    over = replace(report, measured_peak_bytes=plan.budget_bytes + 3 * 2**20)
    assert said(over).endswith("promise broken by 3.00 MiB")
    assert [tile.tone for tile in tiles(over) if tile.label == "Measured peak"] == ["bad"]


def test_a_prediction_is_not_called_a_promise_kept(plan: Plan, report: Report) -> None:
    assert said(replace(report, measured_peak_bytes=None)).endswith("predicted to fit the budget")
    tight = replace(
        report, measured_peak_bytes=None, timeline=replace(plan.timeline, budget_bytes=plan.predicted_peak_bytes - 1024)
    )
    assert said(tight).endswith("predicted to pass the budget by 1.00 KiB")


def test_keeping_everything_is_no_slower(plan: Plan) -> None:
    keep_all = replace(plan, residences={}, budget_bytes=0)
    report = Report(keep_all.timeline, plan=keep_all)
    assert said(report) == "695 MiB, as much as plain PyTorch, no slower"
    assert "nothing is computed twice" in lede(report)


def test_the_name_is_the_title_or_the_model_with_the_batch(plan: Plan, report: Report) -> None:
    assert name_of(report) == "ResNet-18, batch 128"
    assert name_of(replace(report, title="Night run", settings={})) == "Night run"
    assert name_of(Report(replace(plan.timeline, model=""))) == "Unnamed model"


def test_the_lede_names_op_layer_and_pass_of_the_peak(report: Report) -> None:
    assert lede(report).startswith("Most memory is in use at add_backward_92 of layer2.1, in the backward pass.")
    assert "32 storages are freed" in lede(report)


@pytest.mark.parametrize(
    ("factor", "note"),
    [(1.05, "5.0 % above the prediction"), (0.88, "12 % below the prediction"), (1.0, "as predicted")],
)
def test_the_measured_tile_is_held_against_the_prediction(report: Report, plan: Plan, factor: float, note: str) -> None:
    measured = replace(report, measured_peak_bytes=round(factor * plan.predicted_peak_bytes))
    assert next(tile.note for tile in tiles(measured) if tile.label == "Measured peak").startswith(note)


def test_added_time_comes_with_its_lower_bound(report: Report, make_plan: Callable[..., Plan]) -> None:
    assert [t.note for t in tiles(report) if t.label == "Added time"] == [
        "+29 % of a step, at least 4.00 ms for any plan"
    ]


def test_the_parts_of_the_peak_fill_it(plan: Plan) -> None:
    peak = plan.timeline.peak
    assert sum(filling.share for filling in fillings(peak)) == pytest.approx(1.0)
    assert sum(category_bytes(peak).values()) == peak.total_bytes


def test_the_longest_bar_is_the_whole(plan: Plan, report: Report) -> None:
    assert [round(scale.share, 2) for scale in scales(report)] == [1.0, 0.54, 0.53, 0.53]
    assert scales(Report(replace(plan.timeline, budget_bytes=0))) == []


def test_settings_that_were_given_win_over_the_plans(report: Report) -> None:
    assert settings(replace(report, settings={"planner": "by hand"}))["Planner"] == "by hand"
    assert settings(report)["Times are for"] == "AMD Zen 4, 2 cores"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.5e-7, "0.25 µs"),
        (3.21e-5, "32.1 µs"),
        (0.0123, "12.3 ms"),
        (0.4, "400 ms"),
        (1.84, "1.84 s"),
        (600, "10.0 min"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1e-5, 100))
def test_a_duration_is_written_to_within_half_a_percent(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    assert float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit] == pytest.approx(seconds, rel=5.1e-3)


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.0834, "8.3 %"), (-0.452, "45 %"), (0.0996, "10 %"), (1.5, "150 %")]
)
def test_shares_for_people(share: float, text: str) -> None:
    assert format_percent(share) == text
