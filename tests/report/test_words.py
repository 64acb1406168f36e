"""What the page says of a run, sentence by sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Link
from shoal.core.order import op_names, reordered
from shoal.core.plan import Plan
from shoal.core.residence import Offload
from shoal.core.sizes import format_bytes
from shoal.report import Report
from shoal.report.words import (
    category_bytes,
    fillings,
    format_percent,
    format_rate,
    format_seconds,
    glossary,
    headline,
    lede,
    name_of,
    place_of,
    scales,
    settings,
    tiles,
)
from tests.engine.lossy_steps import chain, plan_encoding_everything
from tests.random_steps import any_order, inception_like


def said(report: Report) -> str:
    return headline(report).replace("\u00a0", " ")


def test_the_headline_states_size_slowdown_and_budget(report: Report) -> None:
    assert said(report) == "369 MiB of plain PyTorch’s 695 MiB, 29 % slower, within budget"


def test_a_peak_over_budget_is_reported_with_its_bytes(plan: Plan, report: Report) -> None:
    over = replace(report, measured_peak_bytes=plan.budget_bytes + 3 * 2**20)
    assert said(over).endswith("over budget by 3.00 MiB")
    assert [tile.tone for tile in tiles(over) if tile.label == "Measured peak"] == ["bad"]


def test_a_prediction_is_called_one(plan: Plan, report: Report) -> None:
    assert said(replace(report, measured_peak_bytes=None)).endswith("predicted to fit the budget")
    tight = replace(
        report, measured_peak_bytes=None, timeline=replace(plan.timeline, budget_bytes=plan.predicted_peak_bytes - 1024)
    )
    assert said(tight).endswith("predicted to exceed the budget by 1.00 KiB")


def test_keeping_everything_is_no_slower(plan: Plan) -> None:
    keep_all = replace(plan, residences={}, budget_bytes=0)
    report = Report(keep_all.timeline, plan=keep_all)
    assert said(report) == "695 MiB, as much as plain PyTorch, no slower"
    assert "nothing is recomputed" in lede(report)


def test_the_name_is_the_title_or_the_model_with_the_batch(plan: Plan, report: Report) -> None:
    assert name_of(report) == "ResNet-18, batch 128"
    assert name_of(replace(report, title="Night run", settings={})) == "Night run"
    shared = replace(report, settings={"batch": "128", "ranks": "2"})
    assert name_of(shared) == "ResNet-18, batch 128 on 2 ranks"
    assert name_of(Report(replace(plan.timeline, model=""))) == "Unnamed model"


def test_the_lede_names_op_layer_and_pass_of_the_peak(report: Report) -> None:
    assert lede(report).startswith("Memory peaks at add_backward_92 of layer2.1, in the backward pass.")
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
        "+29 % of a step, at least 4.00 ms for any plan in this order of ops"
    ]


def test_the_parts_of_the_peak_fill_it(plan: Plan, offload_plan: Plan) -> None:
    for each in (plan, offload_plan):
        peak = each.timeline.peak
        assert sum(filling.share for filling in fillings(each.timeline)) == pytest.approx(1.0)
        assert sum(category_bytes(peak).values()) == peak.total_bytes
    assert "fetched" not in [filling.category for filling in fillings(plan.timeline)]
    assert [f.size for f in fillings(offload_plan.timeline) if f.category == "fetched"] == ["96.00 MiB"]


def test_the_headline_says_what_is_on_the_host(offload_plan: Plan) -> None:
    report = Report(offload_plan.timeline, plan=offload_plan)
    told = "265 MiB of plain PyTorch\u2019s 695 MiB, 512 MiB on the host, 9.9 % slower, predicted to fit the budget"
    assert said(report) == told


def test_the_lede_tells_what_was_recomputed_what_was_offloaded_and_what_the_link_did(offload_plan: Plan) -> None:
    told = lede(Report(offload_plan.timeline, plan=offload_plan))
    assert "28 storages are freed after the forward pass" in told
    assert "; 22 storages wait on the host until the backward pass needs them (512.2 MiB in all); 0 stay." in told
    assert told.endswith("The link is busy 18\u00a0% of the step, and the device waits 5.62 ms for it.")


def test_one_storage_is_told_in_the_singular(offload_plan: Plan) -> None:
    name, residence = next((n, r) for n, r in offload_plan.residences.items() if isinstance(r, Offload))
    one = replace(offload_plan, residences={name: residence})
    assert "1 storage waits on the host until the backward pass needs it (32.00 MiB in all)" in lede(
        Report(one.timeline, plan=one)
    )


def test_a_link_that_hides_everything_is_said_to(offload_plan: Plan) -> None:
    name, residence = next((n, r) for n, r in offload_plan.residences.items() if isinstance(r, Offload))
    graph = replace(offload_plan.graph, link=Link("bus", 1e12, 1e12, 0.0))
    fast = replace(offload_plan, graph=graph, residences={name: residence})
    report = Report(fast.timeline, plan=fast)
    assert lede(report).endswith("and the device never waits for it.")
    assert [(t.value, t.note) for t in tiles(report) if t.label == "Stalls"] == [
        ("0 s", "every copy overlaps computation")
    ]


def test_the_tiles_tell_host_waits_and_link(offload_plan: Plan) -> None:
    expected = [
        ("On the host", "512.2 MiB", "22 storages, at most 1.000 GiB allowed"),
        ("Stalls", "5.62 ms", "0.3 % of the step, in 3 stalls"),
        ("Link busy", "18 %", "of the step: 7.5 % to the host, 10 % back"),
    ]
    shown = tiles(Report(offload_plan.timeline, plan=offload_plan))
    assert [(tile.label, tile.value, tile.note) for tile in shown[-3:]] == expected
    alone = [(tile.label, tile.value) for tile in tiles(Report(offload_plan.timeline))]
    assert alone[-3:] == [(label, value) for label, value, _ in expected]


def test_pages_without_offloads_do_not_speak_of_them(report: Report) -> None:
    assert not {"On the host", "Stalls", "Link busy"} & {tile.label for tile in tiles(report)}
    assert not {"Offloaded", "Fetched", "Link", "Stall"} & glossary(report).keys()
    assert "Link" not in settings(report)
    assert "host" not in headline(report) + lede(report)


def test_pages_with_offloads_explain_their_words(offload_plan: Plan) -> None:
    report = Report(offload_plan.timeline, plan=offload_plan)
    assert {"Offloaded", "Fetched", "Link", "Stall"} <= glossary(report).keys()
    assert settings(report)["Link"] == "PCIe 3.0: 4 GB/s to the host, 3 GB/s back"


def test_a_wait_is_a_place_too(offload_plan: Plan) -> None:
    wait = next(moment for moment in offload_plan.timeline.moments if moment.phase == "stall")
    assert place_of(wait) == f"while {wait.target} of {wait.layer} waits for the copy of {wait.op}"


def test_the_longest_bar_is_the_whole(plan: Plan, report: Report) -> None:
    assert [round(scale.share, 2) for scale in scales(report)] == [1.0, 0.54, 0.53, 0.53]
    assert scales(Report(replace(plan.timeline, budget_bytes=0))) == []


def test_the_order_of_ops_is_a_setting_where_it_is_not_as_captured(report: Report) -> None:
    assert "Order of ops" not in settings(report)
    graph = inception_like()
    captured, names = op_names(graph), any_order(graph, 1)
    moved = sum(one != other for one, other in zip(captured, names, strict=True))
    plan = Plan(reordered(graph, names), {}, "mine", captured_order=captured)
    said = settings(Report(plan.timeline, plan=plan))["Order of ops"]
    assert moved and said.startswith(f"{moved} of {len(names)} ops run earlier or later than captured: the peak of ")
    assert said.endswith(f"instead of {format_bytes(plan.plain_peak_bytes)}")


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


@pytest.mark.parametrize(
    ("bytes_per_second", "text"),
    [(10.0, "10 B/s"), (34.1e9, "34.1 GB/s"), (6.5e9, "6.5 GB/s"), (999.7e6, "1 GB/s"), (1.2345e12, "1234 GB/s")],
)
def test_speeds_for_people(bytes_per_second: float, text: str) -> None:
    assert format_rate(bytes_per_second) == text


@pytest.fixture(scope="module")
def encoding_plan() -> Plan:
    """Encodes the inputs of two convolutions."""
    return plan_encoding_everything(chain(3, 4, 4, 6), torch.zeros(2, 3, 16, 16), "linear", block_elems=512)


def test_what_is_encoded_is_told_with_its_bytes_time_and_error(encoding_plan: Plan) -> None:
    report = Report(encoding_plan.timeline, plan=encoding_plan)
    assert "2 storages are encoded (16.00 KiB in 4.031 KiB)" in lede(report)
    shown = {tile.label: tile for tile in tiles(report)}
    assert shown["Encoded"].value == "16.00 KiB in 4.031 KiB"
    assert shown["Encoded"].note.startswith("2 storages, ") and shown["Encoded"].note.endswith(" to encode and decode")
    assert "measured on normally distributed values" in shown["Largest encoding error"].note
    measured = replace(encoding_plan, errors={"relu": 0.012, "relu_1": 0.034}, errors_measured=True)
    tile = next(t for t in tiles(Report(measured.timeline, plan=measured)) if t.label == "Largest encoding error")
    assert tile.value == "3.4 %" and tile.note.endswith("measured in a step")
    assert "Encoded" in glossary(report)


def test_where_nothing_is_encoded_the_word_does_not_come(plan: Plan) -> None:
    report = Report(plan.timeline, plan=plan)
    assert "ncoded" not in lede(report) and "Encoded" not in glossary(report)
    assert not [tile for tile in tiles(report) if "ncod" in tile.label]
