"""Iterations of several graphs, several models and several calls are planned in the variants of one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.variant import Variant
from shoal.engine.iteration import variants
from shoal.engine.search.search_state import Best
from shoal.errors import BudgetError
from tests.engine.several_graphs import Chain, breaks
from tests.engine.training_laws import blocks, images, needs_compiler
from tests.float32_rule import too_far
from tests.scratch import needs_little_scratch

pytestmark = needs_compiler

Step = Callable[[nn.Module], None]
VARIANTS = {
    "fused": Variant(fuse="bnff"),
    "slices": Variant(depth=1.0, slices=4),
    "patches": Variant(depth=0.5, grid=(2, 2)),
}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def divides(x: torch.Tensor) -> torch.Tensor:
    return x / torch.tensor(2.0)  # not a number: the backward pass reads it


class Divided(Chain):
    """Three graphs, of which the first does not read its result in the backward pass if it runs on slices."""

    def __init__(self) -> None:
        super().__init__(divides, blocks(3, 16, 16, 16), 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages[:2]:
            x = self.then(stage(x))
        return self.head(self.then(self.stages[2](x)).mean((2, 3)))


def two_graphs() -> nn.Module:
    return Chain(breaks, [nn.Sequential(*blocks(3, 8, 8)), nn.Sequential(*blocks(8, 8, 8))], 8)


class Pair(nn.Module):
    """Two models for one budget; not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(*blocks(3, 8, 8, 8)) for _ in range(2))


class Refined(nn.Module):
    """Its own result is its next input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*blocks(3, 8, 8), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.layers(x)


def batch(model: nn.Module) -> torch.Tensor:
    (x,) = images(1, 8, 3, 24, 24)
    return x.to(next(model.parameters()).dtype)


def of_two_graphs(model: nn.Module) -> None:
    model(batch(model)).square().mean().backward()


def of_two_models(model: Any) -> None:
    x = batch(model)
    (model.one(x) - model.other(x)).square().mean().backward()


def of_one_of_two_models(model: Any) -> None:
    x = batch(model)
    (model.one(x) - model.other(x).detach()).square().mean().backward()


def of_two_calls(model: nn.Module) -> None:
    model(model(batch(model))).square().mean().backward()


def gradients(model: nn.Module, step: Step, steps: int) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        model.zero_grad()
        step(model)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def always(variant: Variant) -> Callable[..., Any]:
    """`best_variant` of one that is decided, whatever it costs."""

    def best_variant(candidates: Any, price: Any, budget_bytes: int, name: str) -> Best[Any, Any]:
        graph = candidates.graph(variant)
        made, plan = price(graph).plan(budget_bytes)
        return Best(variant, graph, made, replace(plan, variant=variant))

    return best_variant


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "step", "variant"),
    [
        *((two_graphs, of_two_graphs, variant) for variant in VARIANTS.values()),
        (Pair, of_two_models, VARIANTS["fused"]),
        (Pair, of_one_of_two_models, VARIANTS["slices"]),
        (Refined, of_two_calls, VARIANTS["slices"]),
    ],
    ids=[*VARIANTS, "models, fused", "a model that is not sent back, slices", "calls, slices"],
)
def test_an_iteration_trains_as_planned_in_each_variant(
    make: Callable[[], nn.Module], step: Step, variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = make()
    monkeypatch.setattr(variants, "best_variant", always(variant))
    model, budget = copy.deepcopy(plain), 3 * 2**20
    if isinstance(model, Pair):
        shared = shoal.Budget(budget)
        shoal.compile(model.one, budget=shared, allow="exact")
        status = shoal.compile(model.other, budget=shared, allow="exact").shoal
    else:
        status = shoal.compile(model, budget=budget, allow="exact").shoal
    gradients(model, step, 2)
    found = gradients(model, step, 3)
    assert status.plan.variant == variant
    assert status.measured_peak_bytes == pytest.approx(status.plan.predicted_peak_bytes, abs=2048)
    assert status.plan.predicted_peak_bytes <= budget
    exact, expected = gradients(copy.deepcopy(plain).double(), step, 5), gradients(plain, step, 5)
    assert too_far(found, expected, exact) == {}
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, plain.get_buffer(name))


@pytest.mark.slow
@pytest.mark.usefixtures("few_variants")
def test_the_plan_says_which_variants_were_considered() -> None:
    torch.manual_seed(0)
    model = shoal.compile(two_graphs(), budget="3MiB", allow="exact")
    gradients(model, of_two_graphs, 3)
    asked = {candidate.variant for candidate in model.shoal.plan.candidates}
    assert {Variant(), Variant(fuse="bnff")} <= asked
    assert "batch norm fused" in model.shoal.plan.explain()


@pytest.mark.slow
def test_a_graph_that_is_not_what_it_was_planned_as_is_said_and_planned_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned = variants.plan_best_variant

    def mistaken(*args: Any) -> Any:
        found = planned(*args)
        return replace(found, variants=tuple(replace(one, fingerprint="another") for one in found.variants))

    monkeypatch.setattr("shoal.engine.iteration.planned.plan_best_variant", mistaken)
    torch.manual_seed(0)
    plain = two_graphs()
    model = shoal.compile(copy.deepcopy(plain), budget="3MiB", allow="bitwise")
    found = gradients(model, of_two_graphs, 5)
    assert "planned unmodified" in caplog.text
    assert model.shoal.plan.candidates == ()
    assert model.shoal.measured_peak_bytes <= 3 * 2**20
    expected = gradients(plain, of_two_graphs, 3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Sometimes(Chain):
    """What follows its first graph depends on a flag that Dynamo does not see."""

    longer = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.then(self.stages[0](x))
        if flag(self):
            x = self.then(self.stages[1](x))
        return self.head(x.mean((2, 3)))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flag(model: Sometimes) -> bool:
    return model.longer


@pytest.mark.slow
@pytest.mark.usefixtures("few_variants")
def test_graphs_that_are_followed_by_others_now_and_then_stay_as_they_are() -> None:
    torch.manual_seed(0)
    plain = Sometimes(breaks, [nn.Sequential(*blocks(3, 8, 8)), nn.Sequential(*blocks(8, 8, 8))], 8)
    model = shoal.compile(copy.deepcopy(plain), budget="3MiB", allow="exact")
    for longer in (False, False, True, False, True, True, False):
        for one in (plain, model):
            one.longer = longer
            one.zero_grad()
            of_two_graphs(one)
    assert model.shoal.measured_peak_bytes is not None and model.shoal.measured_peak_bytes <= 3 * 2**20
    for name, p in model.named_parameters():
        if (expected := plain.get_parameter(name).grad) is not None:
            torch.testing.assert_close(p.grad, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@needs_little_scratch
@pytest.mark.usefixtures("few_variants")
def test_the_minimum_that_is_named_is_met_by_the_first_iteration_of_another_run() -> None:
    """In more bytes a graph that ran on slices runs unmodified at first, and keeps its result."""
    torch.manual_seed(0)
    plain = Divided()
    with pytest.raises(BudgetError) as refused:
        gradients(shoal.compile(copy.deepcopy(plain), "1100KiB"), of_two_graphs, 2)
    assert "variant with the minimum" in refused.value.details
    model = shoal.compile(copy.deepcopy(plain), refused.value.least_feasible_bytes)
    gradients(model, of_two_graphs, 3)
    assert model.shoal.measured_peak_bytes <= refused.value.least_feasible_bytes and not model.shoal.repairs


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Chain(breaks, [nn.Sequential(*blocks(3, 16, 16)), nn.Sequential(*blocks(16, 16))], 16)


@pytest.fixture(scope="module")
def too_little_unmodified() -> int:
    """A budget in which `deep` does not run as it is written."""

    def trained(budget: int) -> None:
        gradients(shoal.compile(deep(), budget, allow="bitwise"), of_two_graphs, 3)

    with pytest.raises(BudgetError) as refused:
        trained(2**20)
    assert refused.value.least_feasible_bytes is not None
    budget_bytes = int(0.8 * refused.value.least_feasible_bytes)
    with pytest.raises(BudgetError):
        trained(budget_bytes)
    return budget_bytes


@pytest.mark.slow
@needs_little_scratch
@pytest.mark.usefixtures("few_variants")
@pytest.mark.parametrize("shared", [False, True], ids=["one model", "a shared budget"])
def test_a_graph_that_does_not_fit_unmodified_runs_its_first_iteration_in_another_variant(
    shared: bool, too_little_unmodified: int
) -> None:
    model = deep()
    shoal.compile(model, shoal.Budget(too_little_unmodified) if shared else too_little_unmodified, allow="exact")
    found = gradients(model, of_two_graphs, 3)
    assert model.shoal.measured_peak_bytes <= too_little_unmodified and model.shoal.repairs == 0
    assert model.shoal.plan.variant.slices
    exact, expected = gradients(deep().double(), of_two_graphs, 3), gradients(deep(), of_two_graphs, 3)
    assert too_far(found, expected, exact) == {}
