"""A plan explains itself, survives a file, and refuses a damaged one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import nn

from shoal.core.plan import Plan
from shoal.core.records import read_record
from shoal.core.residence import Encode, Keep, Offload, Recompute, Residence, residence_from_json, residence_to_json
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Candidate, Variant
from shoal.errors import PlanError
from shoal.planners.just_in_time import just_in_time
from tests.engine.lossy_steps import chain, plan_encoding_everything
from tests.random_steps import conv_bn_relu_chain, steps


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


def test_plain_is_the_step_as_its_author_wrote_it_where_another_form_was_chosen() -> None:
    form = Variant(slabs=4)
    written = Candidate(WHOLE, 9, 1.0, 20_000, None, None, None, "does not fit")
    plan = replace(_plan(), variant=form, candidates=(written, replace(written, variant=form, outcome="chosen")))
    assert (plan.plain_seconds, plan.plain_peak_bytes) == (1.0, 20_000)
    assert plan.added_seconds == plan.predicted_seconds - 1.0
    kept_seconds = plan.plain_timeline.seconds
    assert plan.least_added_seconds == pytest.approx(kept_seconds + 0.25 - 1.0)
    text = plan.explain()
    assert "of plain PyTorch's 1000.0 ms" in text and f"keeping everything takes {1e3 * kept_seconds:.1f} ms" in text
    assert (plan.rewritten_peak_bytes, plan.plain_peak) == (20_000, "19.53 KiB")
    saves = replace(plan, candidates=(replace(written, rewrites_save_bytes=5_000),))
    assert (saves.rewritten_peak_bytes, saves.plain_peak_bytes) == (20_000, 25_000)
    assert saves.plain_peak in saves.explain() and "24.41 KiB" in saves.plain_peak
    alone = replace(plan, candidates=())  # of a planner that was called by itself
    assert (alone.plain_seconds, alone.least_added_seconds) == (kept_seconds, pytest.approx(0.25))


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


@given(steps())
def test_every_step_survives_json(graph: StepGraph) -> None:
    copy = read_record(StepGraph, json.loads(json.dumps(graph.to_json())), "step")
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
    with pytest.raises(PlanError):
        Plan.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "no-such-plan.json")
    with pytest.raises(PlanError):
        Plan.load(None)


def test_a_storage_that_no_one_needs_again_says_so() -> None:
    plan = _plan()
    storage = plan.kept[0]
    freed = Plan(plan.graph, {storage.name: Recompute()}, "by hand")
    assert freed.fate(storage) == "freed, not needed again"


@pytest.fixture(scope="module")
def encoding_plan() -> Plan:
    """Encodes the inputs of two convolutions in a network that also pools."""
    layers = [*chain(3, 4, 4, 6)]
    layers.insert(2, nn.MaxPool2d(2))
    return plan_encoding_everything(nn.Sequential(*layers), torch.zeros(2, 3, 32, 32), block_elems=0, seed=3)


def test_it_tells_what_is_encoded_in_how_much_with_what_error(encoding_plan: Plan) -> None:
    plan = encoding_plan
    assert [storage.shape for storage in plan.encoded] == [(2, 4, 16, 16)] * 2
    assert plan.payload_bytes == 2 * (2 * 4 * 16 * 16 + 4)
    text = plan.explain()
    assert "encoded         2 storages, 16.00 KiB in 4.008 KiB, dynamic_tree with one scale a tensor, rounded" in text
    assert "(measured for normal numbers, until a step is run)" in text
    assert "encoded in dynamic_tree, 2.004 KiB, kept" in text
    known = replace(plan, errors=dict.fromkeys(plan.errors, 0.0125), errors_measured=True)
    assert "relative error 1.2 to 1.2 % (measured in a step)" in known.explain()
    assert "error not measured" in replace(plan, errors={}).explain()


def test_lossless_forms_are_shown_as_what_they_are(encoding_plan: Plan) -> None:
    text = encoding_plan.explain()
    small = encoding_plan.small_forms
    assert f"lossless        {len(small)} saved storages" in text
    fates = [encoding_plan.fate(storage) for storage in small]
    assert "kept (places in pooling windows, a byte each, lossless)" in fates
    assert "kept (a ReLU's mask, a byte a value, lossless)" in fates
    assert all(storage.dtype in ("uint8", "bool") for storage in small)


def test_plain_is_the_step_without_codecs(encoding_plan: Plan) -> None:
    exact = encoding_plan.exact_graph
    assert exact is not None and encoding_plan.exact_step == exact
    assert encoding_plan.plain_seconds == simulate(exact, {}).seconds
    assert encoding_plan.added_seconds == pytest.approx(encoding_plan.predicted_seconds - encoding_plan.plain_seconds)
    assert not any("encoded_activation" in op.target for op in exact.ops)
    assert _plan().exact_step is _plan().graph or _plan().exact_step == _plan().graph


def test_an_encoding_plan_survives_its_file_and_a_damaged_one_is_refused(encoding_plan: Plan, tmp_path: Path) -> None:
    path = encoding_plan.save(tmp_path / "plan.json")
    loaded = Plan.load(path)
    assert loaded == encoding_plan and loaded.errors == encoding_plan.errors
    assert loaded.explain() == encoding_plan.explain()
    value = json.loads(path.read_text())
    value["residences"]["relu_1"]["payload"] = "nowhere"
    path.write_text(json.dumps(value))
    with pytest.raises(PlanError):
        Plan.load(path)


@pytest.mark.parametrize(
    "residence",
    [
        Keep(),
        Recompute(("a", "b")),
        Offload("a", "b"),
        Encode("linear", 0, None, "x_encoded"),
        Encode("linear", 64, 7, "x_encoded", Recompute(("a",))),
        Encode("linear", 64, 7, "x_encoded", Offload("a", "b")),
    ],
)
def test_a_residence_survives_json(residence: Residence) -> None:
    assert residence_from_json(json.loads(json.dumps(residence_to_json(residence)))) == residence


def test_what_is_encoded_and_computed_again_says_both(encoding_plan: Plan) -> None:
    graph = encoding_plan.graph
    name = "relu_1"
    whole = encoding_plan.residences[name]
    assert isinstance(whole, Encode)
    decoding = graph.ops[graph.readers[graph.storage_called[whole.payload].id][0]]
    both = {**encoding_plan.residences, name: replace(whole, exact=Recompute((decoding.name,)))}
    fate = replace(encoding_plan, residences=both).fate(graph.storage_called[name])
    assert fate.startswith("encoded in dynamic_tree") and "; exact: recomputed before the backward pass of" in fate
