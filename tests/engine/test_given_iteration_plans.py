"""A plan of an iteration is saved, read, and run by a fresh model as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.core.plan import Plan
from shoal.engine.iteration import variants
from shoal.errors import PlanError
from tests.engine.test_iteration_variants import (
    VARIANTS,
    Refined,
    Step,
    always,
    gradients,
    of_two_calls,
    of_two_graphs,
    two_graphs,
)
from tests.engine.training_laws import needs_compiler

pytestmark = needs_compiler
OF = {"graphs": (two_graphs, of_two_graphs), "calls": (Refined, of_two_calls)}


def planned(make: Callable[[], nn.Module], step: Step, folder: Path, share: float = 0.8) -> tuple[nn.Module, Plan]:
    """A fresh model, and the plan that one like it has trained by, from its file."""
    torch.manual_seed(0)
    fresh = make()
    roomy = shoal.compile(copy.deepcopy(fresh), "1GiB", allow="exact")
    gradients(roomy, step, 3)
    budget_bytes = int(share * roomy.shoal.predicted_peak_bytes)
    model = shoal.compile(copy.deepcopy(fresh), budget_bytes, allow="exact")
    gradients(model, step, 3)
    return fresh, Plan.load(model.shoal.plan.save(folder / "plan.json"))


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("variant", [None, "fused", "slices"])
def test_it_runs_from_the_first_iteration_on(
    of: str, variant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, step = OF[of]
    if variant is not None:
        monkeypatch.setattr(variants, "best_variant", always(VARIANTS[variant]))
    fresh, plan = planned(make, step, tmp_path, 0.8 if variant is None else 1.2)
    assert any(plan.residences.values()) if variant is None else plan.variant == VARIANTS[variant]
    monkeypatch.setattr(variants, "best_variant", None)  # nothing is searched
    model = shoal.compile(copy.deepcopy(fresh), options=shoal.Options(plan=plan))
    found = gradients(model, step, 1)
    captures = model.shoal.captures
    assert model.shoal.plan.residences == plan.residences
    assert model.shoal.plan.variant == plan.variant
    assert model.shoal.measured_peak_bytes <= plan.predicted_peak_bytes
    found = gradients(model, step, 2)
    assert model.shoal.captures == captures
    expected = gradients(fresh, step, 3)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_one_that_passes_the_budget_is_refused_before_anything_runs(tmp_path: Path) -> None:
    fresh, plan = planned(two_graphs, of_two_graphs, tmp_path)
    options = shoal.Options(plan=plan)
    model = shoal.compile(fresh, plan.predicted_peak_bytes - 1, options=options)
    with pytest.raises(PlanError):
        gradients(model, of_two_graphs, 1)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("other", [Refined, lambda: nn.Sequential(nn.Linear(24, 24)), two_graphs])
def test_one_of_another_model_or_loop_is_refused(other: Callable[[], nn.Module], tmp_path: Path) -> None:
    _, plan = planned(two_graphs, of_two_graphs, tmp_path)
    torch.manual_seed(0)
    model = shoal.compile(other(), options=shoal.Options(plan=plan))
    step = of_two_graphs if other is not two_graphs else of_two_calls_of_images
    with pytest.raises(PlanError):
        gradients(model, step, 1)


def of_two_calls_of_images(model: nn.Module) -> None:
    x = torch.randn(8, 3, 24, 24)
    (model(x) + model(x)).square().mean().backward()


def test_a_plan_of_one_graph_is_for_one_graph(tmp_path: Path) -> None:
    x = torch.randn(8, 3, 24, 24)
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Flatten())
    model = shoal.compile(two_graphs(), options=shoal.Options(plan=shoal.plan(net, x)))
    with pytest.raises(shoal.errors.ShoalError):
        gradients(model, of_two_graphs, 1)
