"""The tables name the largest storages and account for every saved byte and every second."""

from __future__ import annotations

from dataclasses import replace

from shoal.plan import Plan
from shoal.report.tables import MOST_PARTS, largest_storages, parts_of_model, short_target
from shoal.sizes import parse_bytes
from shoal.step import Op, StepGraph, Storage
from shoal.timeline import Timeline


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
        "Held for the optimizer until the step ends",
        "Handed from one backward op to the next, then freed",
        "Handed to the caller, who holds it until the step ends",
    } <= fates


def test_what_is_there_at_the_peak_is_what_the_timeline_counts(plan: Plan) -> None:
    for each in (plan, replace(plan, residences={})):
        rows = largest_storages(each, count=len(each.graph.storages))
        counted = each.predicted_peak_bytes - each.timeline.peak.workspace_bytes - each.graph.standing_bytes
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
    assert [row.name for row in table.rows][:4] == ["conv1", "relu", "layer1.0", "layer1.1"]
    assert table.sizes_known and len(table.rows) <= MOST_PARTS
    assert not parts_of_model(plan.timeline, None).sizes_known


def test_the_saved_bytes_are_all_in_one_column_or_the_other(plan: Plan) -> None:
    rows = parts_of_model(plan.timeline, plan).rows
    printed = sum(parse_bytes(size) for row in rows for size in (row.kept, row.given_up) if size != "0 B")
    saved = sum(plan.graph.storages[i].nbytes for i in plan.graph.saved)
    assert abs(printed / saved - 1) < 1e-3


def test_many_flat_layers_are_added_up_in_a_last_row(plan: Plan) -> None:
    moments = tuple(replace(m, layer=str(i % 40)) for i, m in enumerate(plan.timeline.moments))
    rows = parts_of_model(Timeline("flat", moments), None).rows
    assert len(rows) == MOST_PARTS
    assert rows[-1].name == f"{40 - MOST_PARTS + 1} others"


def test_targets_without_their_namespace() -> None:
    assert short_target("aten.convolution.default") == "convolution"
    assert short_target("shoal::encode") == "shoal::encode"
