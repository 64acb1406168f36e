"""Iterations of several graphs, several models and several calls are planned with encoded storages, as one graph is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.capture.encode_activations import offers
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.shares import Share
from shoal.core.variant import WHOLE
from shoal.engine.iteration import variants
from shoal.engine.lossy_report import plan_of_encoded
from shoal.engine.search.choose_encoded import as_encoded
from shoal.engine.search.encoding import IF_FASTER
from shoal.engine.search.search_state import Best
from tests.engine.lossy_steps import codecs_of_no_time
from tests.engine.several_graphs import Chain, breaks
from tests.engine.test_iteration_variants import (
    Pair,
    Refined,
    Step,
    batch,
    gradients,
    of_one_of_two_models,
    of_two_calls,
    of_two_graphs,
    of_two_models,
)
from tests.engine.training_laws import needs_compiler
from tests.joint_graphs import captured_step

pytestmark = needs_compiler

ENCODE = "bitwise, encode"
BUDGET = 4 * 2**20


def convolutions(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


def two_stages(between: Callable[[torch.Tensor], None] = breaks) -> Chain:
    return Chain(between, [convolutions(3, 8, 8, 8), convolutions(8, 8, 8, 8)], 8)


def two_models() -> Pair:
    pair = Pair()
    pair.one, pair.other = convolutions(3, 8, 8, 8), convolutions(3, 8, 8, 8)
    return pair


def refined() -> Refined:
    model = Refined()
    model.layers = nn.Sequential(*convolutions(3, 8, 8, 8), nn.Conv2d(8, 3, 3, padding=1))
    return model


def encode_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant and the storages are decided, whatever they cost."""

    def best_variant(candidates: Any, price: Any, budget_bytes: int, name: str) -> Best[Any, Any]:
        graph = candidates.graph(WHOLE)
        return Best(WHOLE, graph, *price(graph).encoded.plan(budget_bytes, IF_FASTER))

    def choose_encoded(steps: Any, budget_bytes: int, plan: Any, *how: Any) -> tuple[Any, Plan]:
        names = [offer.storage for offer in steps.offers]
        return steps.traced(names), as_encoded(plan(steps.graph(names)), steps.exact, names, steps.lossy)

    monkeypatch.setattr(variants, "best_variant", best_variant)
    monkeypatch.setattr(variants, "choose_encoded", choose_encoded)


def compiled(model: nn.Module, budget: int = BUDGET) -> Any:
    """What `model.shoal` of it is."""
    if not isinstance(model, Pair):
        return shoal.compile(model, budget=budget, allow=ENCODE).shoal
    shared = shoal.Budget(budget)
    shoal.compile(model.one, budget=shared, allow=ENCODE)
    return shoal.compile(model.other, budget=shared, allow=ENCODE).shoal


@pytest.mark.parametrize(
    ("make", "step", "names"),
    [
        (two_stages, of_two_graphs, ["part0.relu", "part0.relu_1", "part1.relu", "part1.relu_1"]),
        (two_models, of_two_models, ["part0.relu", "part0.relu_1", "part1.relu", "part1.relu_1"]),
        (two_models, of_one_of_two_models, ["part0.relu", "part0.relu_1"]),
        (refined, of_two_calls, [f"part{call}.relu{n}" for call in (0, 1) for n in ("", "_1", "_2")]),
    ],
    ids=["graphs", "models", "a model that is not sent back", "calls"],
)
def test_an_iteration_trains_as_planned_with_storages_encoded(
    make: Callable[[], nn.Module], step: Step, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = make()
    encode_everything(monkeypatch)
    model = copy.deepcopy(plain)
    status = compiled(model)
    gradients(model, step, 2)
    found, expected = gradients(model, step, 3), gradients(plain, step, 5)
    plan = status.plan
    assert [storage.name for storage in plan.encoded] == names
    assert status.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, abs=2048)
    assert plan.errors.keys() == set(names) and plan.errors_measured
    assert all(0 < error < 0.02 for error in plan.errors.values())
    assert f"encoded         {len(names)} storages" in plan.explain()
    assert not any("encode" in line for line in plan.without_effect)
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert differing and all(expected[name].dim() == 4 for name in differing)
    for name in differing:
        assert (found[name] - expected[name]).norm() <= 0.02 * expected[name].norm()


@pytest.mark.slow
def test_the_gradients_are_those_of_one_graph_with_the_same_storages_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, whole = two_stages(), two_stages(lambda x: None)
    whole.load_state_dict(model.state_dict())
    captured, lossy = captured_step(whole, batch(whole)), LossyOptions("dynamic_tree")
    offered = [offer.storage for offer in offers(captured, lossy)]
    assert offered == ["relu", "relu_1", "relu_2", "relu_3", "relu_4"]
    own = [name for name in offered if name != "relu_2"]  # which crosses between the graphs, and is kept
    shoal.compile(whole, options=shoal.Options(plan=plan_of_encoded(captured, own, lossy)))
    encode_everything(monkeypatch)
    compiled(model)
    found, expected = gradients(model, of_two_graphs, 4), gradients(whole, of_two_graphs, 1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_storages_are_encoded_if_that_is_faster_and_again_in_a_later_run() -> None:
    with codecs_of_no_time():
        torch.manual_seed(0)
        first, again = two_stages(), two_stages()
        status = compiled(first, 1_200_000)
        gradients(first, of_two_graphs, 3)
        assert status.plan.encoded and status.repairs == 0
        assert status.measured_peak_bytes <= 1_200_000
        other = compiled(again, 1_200_000)
        other.encoded = {step: names[:1] for step, names in status.encoded.items()}
        gradients(again, of_two_graphs, 3)
    assert [storage.name for storage in other.plan.encoded] == [next(iter(status.encoded.values()))[0]]


@pytest.mark.slow
def test_a_graph_that_does_not_encode_what_was_planned_is_said_and_planned_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned = variants.plan_best_variant

    def mistaken(*args: Any) -> Any:
        found = planned(*args)
        residences = [share.residences for share in found.shares]
        elsewhere = ({name.replace("relu", "elsewhere"): one for name, one in own.items()} for own in residences)
        return replace(found, shares=tuple(map(Share, elsewhere)))

    encode_everything(monkeypatch)
    monkeypatch.setattr("shoal.engine.iteration.planned.plan_best_variant", mistaken)
    torch.manual_seed(0)
    plain = two_stages()
    status = compiled(model := copy.deepcopy(plain))
    found, expected = gradients(model, of_two_graphs, 5), gradients(plain, of_two_graphs, 3)
    assert "planned unmodified" in caplog.text and not status.plan.encoded
    assert status.plan.without_effect == (
        "'encode' is without effect: a model of several graphs is planned without it",
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
