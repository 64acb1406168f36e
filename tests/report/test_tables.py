"""The tables name the largest storages and account for every saved byte and every second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.plan import Plan
from shoal.core.residence import Offload
from shoal.core.sizes import parse_bytes
from shoal.core.step import Op, StepGraph, Storage
from shoal.core.timeline import Timeline
from shoal.core.variant import WHOLE, Candidate, Variant
from shoal.report.data import Report
from shoal.report.page import save_html
from shoal.report.tables import MOST_PARTS, largest_storages, parts_of_model, short_target, variants_of_step
from tests.engine.lossy_steps import chain, plan_encoding_everything
from tests.random_steps import SLOW_LINK, offloads, steps

_UNITS = {"s": 1.0, "ms": 1e-3, "\u00b5s": 1e-6}


def printed_bytes(size: str) -> int:
    return 0 if size == "0 B" else parse_bytes(size)


def test_the_largest_come_first_with_their_fate(plan: Plan) -> None:
    rows = largest_storages(plan)
    sizes = [parse_bytes(row.size) for row in rows]
    assert len(rows) == 10 and sizes == sorted(sizes, reverse=True)
    assert sizes[0] == max(storage.nbytes for storage in plan.graph.storages)
    assert rows[0].fate == "Kept until the backward pass of relu"
    assert rows[1].fate == "Recomputed before the backward pass of layer1.0.bn1"
    assert rows[1].content == "convolution, 128×64×32×32 float32"


def test_storages_no_plan_decides_about_have_a_fate_too(plan: Plan) -> None:
    fates = {row.fate for row in largest_storages(plan, count=len(plan.graph.storages))}
    assert {
        "Resident: a parameter",
        "Resident: the input batch",
        "Parameter gradient: in use until the step ends",
        "Activation gradient: freed after the next backward op",
        "Returned to the caller: in use until the step ends",
    } <= fates


def test_what_is_there_at_the_peak_is_what_the_timeline_counts(plan: Plan) -> None:
    for each in (plan, replace(plan, residences={})):
        rows = largest_storages(each, count=len(each.graph.storages))
        counted = each.predicted_peak_bytes - each.timeline.peak.workspace_bytes - each.graph.static_bytes
        # Sizes are printed with four digits.
        assert abs(sum(parse_bytes(row.size) for row in rows if row.at_peak) / counted - 1) < 1e-3


def test_a_storage_whose_block_was_taken_over_is_gone_at_the_peak() -> None:
    source, target = (Storage(i, name, 4096, "activation", name, (1024,), "float32") for i, name in enumerate("ab"))
    ops = (
        Op(0, "a", "aten.empty.default", "forward", "", (), (0,)),
        Op(1, "b", "aten.relu.default", "forward", "", (0,), (1,), overwrites=0, workspace_bytes=1),
    )
    plan = Plan(StepGraph("in place", ops, (source, target)), {}, "keep_all")
    assert {row.layer: row.at_peak for row in largest_storages(plan)} == {"a": False, "b": True}


def test_without_a_plan_no_storage_is_known() -> None:
    assert largest_storages(None) == []


def test_parts_come_in_forward_order_and_few(plan: Plan) -> None:
    table = parts_of_model(plan.timeline, plan)
    assert [row["name"] for row in table.rows][:4] == ["conv1", "relu", "layer1.0", "layer1.1"]
    assert len(table.rows) <= MOST_PARTS
    assert list(table.columns.values()) == ["Saved, kept", "Saved, freed", "Forward", "Recompute", "Backward"]
    assert list(parts_of_model(plan.timeline, None).columns) == ["forward", "recompute", "backward"]


def test_the_saved_bytes_are_all_in_one_column_or_the_other(plan: Plan) -> None:
    rows = parts_of_model(plan.timeline, plan).rows
    printed = sum(printed_bytes(size) for row in rows for size in (row["kept"], row["recomputed"]))
    saved = sum(plan.graph.storages[i].nbytes for i in plan.graph.saved)
    assert abs(printed / saved - 1) < 1e-3


def test_many_flat_layers_are_added_up_in_a_last_row(plan: Plan) -> None:
    moments = tuple(replace(m, layer=str(i % 40)) for i, m in enumerate(plan.timeline.moments))
    rows = parts_of_model(Timeline("flat", moments), None).rows
    assert len(rows) == MOST_PARTS
    assert rows[-1]["name"] == f"{40 - MOST_PARTS + 1} others"


def test_targets_without_their_namespace() -> None:
    assert short_target("aten.convolution.default") == "convolution"
    assert short_target("shoal::encode") == "shoal::encode"


def test_an_offloaded_storage_tells_where_it_leaves_and_returns(offload_plan: Plan) -> None:
    fates = {row.layer: row.fate for row in largest_storages(offload_plan)}
    assert (
        fates["layer1.1.conv1"]
        == "On the host from after layer1.1.bn2 until before the backward pass of layer1.1.conv2"
    )


@given(st.data())
def test_offloads_are_at_the_peak_where_the_timeline_counts_them(data: st.DataObject) -> None:
    graph = replace(data.draw(steps()), link=SLOW_LINK)
    plan = Plan(graph, data.draw(offloads(graph)), "random")
    peak = plan.timeline.peak
    rows = largest_storages(plan, count=len(graph.storages))
    counted = peak.total_bytes - peak.workspace_bytes - graph.static_bytes
    assert sum(printed_bytes(row.size) for row in rows if row.at_peak) == counted
    told = [row for row in rows if row.fate.startswith("On the host")]
    assert len(told) == len(plan.offloaded)


def test_a_wait_at_the_peak_has_what_is_fetched_and_not_what_is_written_next(offload_plan: Plan) -> None:
    moments = offload_plan.timeline.moments
    n = next(i for i, m in enumerate(moments) if m.phase == "stall" and m.fetched_bytes)
    waiting = replace(offload_plan, planner="the peak is a wait")
    # The same step, with the wait made its peak.
    most = replace(moments[n], workspace_bytes=offload_plan.predicted_peak_bytes)
    vars(waiting)["timeline"] = replace(offload_plan.timeline, moments=(*moments[:n], most, *moments[n + 1 :]))
    rows = largest_storages(waiting, count=len(waiting.graph.storages))
    counted = moments[n].total_bytes - waiting.graph.static_bytes
    assert sum(parse_bytes(row.size) for row in rows if row.at_peak) == pytest.approx(counted, rel=1e-3)


def test_what_was_given_up_splits_into_recomputed_and_offloaded(offload_plan: Plan) -> None:
    table = parts_of_model(offload_plan.timeline, offload_plan)
    assert list(table.columns.values()) == [
        *("Saved, kept", "Saved, recomputed", "Saved, offloaded", "Forward", "Recompute", "Backward", "Stalls")
    ]
    shown = {f: sum(printed_bytes(row[f]) for row in table.rows) for f in ("kept", "recomputed", "offloaded")}
    saved = sum(offload_plan.graph.storages[i].nbytes for i in offload_plan.graph.saved)
    assert shown["offloaded"] == pytest.approx(offload_plan.host_bytes, rel=1e-3)
    assert sum(shown.values()) == pytest.approx(saved, rel=1e-3)


def test_columns_of_zeros_are_left_out_beside_offloads(offload_plan: Plan) -> None:
    residences = {name: r for name, r in offload_plan.residences.items() if isinstance(r, Offload)}
    only = replace(offload_plan, residences=residences)
    assert not {"recomputed", "recompute"} & parts_of_model(only.timeline, only).columns.keys()


def test_every_second_of_the_step_is_in_a_column(plan: Plan, offload_plan: Plan) -> None:
    def seconds(each: Plan, fields: list[str]) -> float:
        rows = parts_of_model(each.timeline, each).rows
        cells = [row[field].split() for row in rows for field in fields]
        return sum(float(number) * _UNITS[unit] for number, unit in cells)

    for each in (plan, offload_plan):
        columns = parts_of_model(each.timeline, each).columns
        times = [field for field in columns if field not in ("kept", "recomputed", "offloaded")]
        assert seconds(each, times) == pytest.approx(each.predicted_seconds, rel=2e-3)
    assert seconds(offload_plan, ["stall"]) == pytest.approx(offload_plan.timeline.stall_seconds, rel=2e-3)


def test_an_encoded_storage_says_in_what_and_how_small(tmp_path: Path) -> None:
    plan = plan_encoding_everything(chain(3, 4, 4, 6), torch.zeros(2, 3, 16, 16), "linear", block_elems=512)
    fates = [row.fate for row in largest_storages(plan, count=len(plan.graph.storages))]
    assert fates.count("Encoded in linear, 2.016 KiB, kept") == 2
    page = save_html(Report(plan.timeline, plan=plan), tmp_path / "page.html").read_text()
    assert "Encoded in linear" in page and "Largest encoding error" in page
    assert parts_of_model(plan.timeline, plan).rows


def test_the_variants_that_were_considered_are_listed_with_their_outcome(plan: Plan, tmp_path: Path) -> None:
    rows = (
        Candidate(WHOLE, 40, 0.02, 2**21, 0.021, 0.022, 2**20, "slower"),
        Candidate(Variant(fuse="icf"), 30, 0.01, 2**20, 0.01, 0.01, 2**20, "chosen"),
        Candidate(Variant(depth=0.5, grid=(2, 2)), 0, 0.0, 0, None, None, None, "computes 90 % more"),
    )
    page = save_html(Report(plan.timeline, plan=replace(plan, candidates=rows)), tmp_path / "page.html").read_text()
    assert (
        variants_of_step(plan).rows == []
        and "candidates-title" not in save_html(Report(plan.timeline, plan=plan), tmp_path / "page.html").read_text()
    )
    for cell in (
        "unmodified",
        "22.0",
        "batch norm fused (icf)",
        "chosen",
        "50 % of the convolutions",
        "computes 90 % more",
    ):
        assert cell in page
