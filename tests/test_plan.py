"""A plan explains itself, survives a file, and refuses a damaged one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from shoal.errors import PlanError
from shoal.plan import Plan
from shoal.planners.just_in_time import just_in_time
from shoal.residence import Recompute
from shoal.step import StepGraph
from tests.random_steps import conv_bn_relu_chain, steps, unhurried


def _plan() -> Plan:
    graph = conv_bn_relu_chain(3)
    convolutions = [s.id for s in graph.storages if s.name.startswith("conv") and s.kind == "activation"]
    return Plan(graph, just_in_time(graph, convolutions), "by hand", "test", 9000, lower_bound_seconds=0.25)


def test_what_it_adds_is_what_it_recomputes() -> None:
    plan = _plan()
    assert plan.added_seconds == pytest.approx(plan.timeline.recompute_seconds)
    assert plan.predicted_peak_bytes < plan.plain_peak_bytes
    assert {s.name for s in plan.kept} == {"conv_0.out", "conv_3.out", "conv_6.out"}
    assert not {s.name for s in plan.recomputed} & {s.name for s in plan.kept}


def test_it_explains_where_the_peak_is_and_what_became_of_each_storage() -> None:
    plan = _plan()
    text = plan.explain()
    assert plan.timeline.peak.op in text
    assert "250.0 ms" in text
    assert "kept" in plan.fate(plan.kept[0])
    relu = next(s for s in plan.recomputed if s.name.startswith("relu"))
    assert "recomputed before the backward pass of conv" in plan.fate(relu)
    given_up = next(s for s in plan.graph.storages if s.name == "relu_2.out")
    assert given_up.layer in text


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = _plan()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.timeline == plan.timeline


@unhurried
@given(steps())
def test_every_step_survives_json(graph: StepGraph) -> None:
    copy = StepGraph.from_json(json.loads(json.dumps(graph.to_json())))
    assert copy == graph
    assert copy.fingerprint == graph.fingerprint


def _cut_short(text: str) -> str:
    return text[: len(text) // 2]


def _with(**changes: object) -> object:
    return lambda text: json.dumps({**json.loads(text), **changes})


def _other_sizes(text: str) -> str:
    value = json.loads(text)
    value["step"]["storages"][0]["nbytes"] += 1
    return json.dumps(value)


def _gives_up_for_good(text: str) -> str:
    value = json.loads(text)
    value["residences"]["conv_0.out"] = {"residence": "recompute", "before": []}
    return json.dumps(value)


@pytest.mark.parametrize(
    "damage",
    [
        _cut_short,
        lambda text: "",
        lambda text: "[]",
        lambda text: "\x00\x01",
        _with(version=99),
        _with(format="something else"),
        _with(residences={"conv_0.out": {"residence": "somewhere"}}),
        _with(residences=[1]),
        _with(step={}),
        _other_sizes,
        _gives_up_for_good,
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: object) -> None:
    path = _plan().save(tmp_path / "plan.json") or tmp_path / "plan.json"
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no-such-plan"):
        Plan.load(tmp_path / "no-such-plan.json")


def test_a_storage_that_no_one_needs_again_says_so() -> None:
    plan = _plan()
    storage = plan.kept[0]
    freed = Plan(plan.graph, {storage.name: Recompute()}, "by hand")
    assert freed.fate(storage) == "freed, not needed again"
