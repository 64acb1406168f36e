"""A plan of an iteration is saved, read, and run by a fresh model as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.core.plan import Plan
from shoal.engine.iteration import variants
from shoal.errors import InputError, PlanError
from tests.engine.several_graphs import Chain, breaks
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
from tests.engine.training_laws import blocks, needs_compiler
from tests.raising import raising

pytestmark = needs_compiler
OF = {"graphs": (two_graphs, of_two_graphs), "calls": (Refined, of_two_calls)}
ITERATIONS = 2  # until they are planned: that several calls make one shows in the first


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def planned(make: Callable[[], nn.Module], step: Step, path: Path, share: float, allow: str) -> Plan:
    """Of an iteration, from its file."""
    roomy = shoal.compile(seeded(make), "1GiB", allow=allow)
    gradients(roomy, step, ITERATIONS)
    model = shoal.compile(seeded(make), int(share * roomy.shoal.predicted_peak_bytes), allow=allow)
    gradients(model, step, ITERATIONS)
    return Plan.load(model.shoal.plan.save(path))


@pytest.fixture(scope="module")
def plan_of_two_graphs(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(two_graphs, of_two_graphs, tmp_path_factory.mktemp("plan") / "plan.json", 0.8, "recompute")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "variant"), [("graphs", None), ("graphs", "fused"), ("calls", None), ("calls", "slices")]
)
def test_it_runs_from_the_first_iteration_on(
    of: str,
    variant: str | None,
    plan_of_two_graphs: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, step = OF[of]
    if variant is not None:
        monkeypatch.setattr(variants, "best_variant", always(VARIANTS[variant]))
        plan = planned(make, step, tmp_path / "plan.json", 1.2, "exact")
        assert plan.variant == VARIANTS[variant]
    else:
        plan = plan_of_two_graphs if of == "graphs" else planned(make, step, tmp_path / "plan.json", 0.8, "recompute")
        assert any(plan.residences.values())
    monkeypatch.setattr(variants, "best_variant", None)  # nothing is searched
    model = shoal.compile(seeded(make), options=shoal.Options(plan=plan))
    found = gradients(model, step, 1)
    captures = model.shoal.captures
    assert model.shoal.plan.residences == plan.residences
    assert model.shoal.plan.variant == plan.variant
    assert model.shoal.measured_peak_bytes <= plan.predicted_peak_bytes
    found = gradients(model, step, 2)
    assert model.shoal.captures == captures
    expected = gradients(seeded(make), step, 3)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_one_that_passes_the_budget_is_refused_before_anything_runs(plan_of_two_graphs: Plan) -> None:
    options = shoal.Options(plan=plan_of_two_graphs)
    model = shoal.compile(two_graphs(), plan_of_two_graphs.predicted_peak_bytes - 1, options=options)
    with pytest.raises(PlanError):
        gradients(model, of_two_graphs, 1)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("other", [Refined, two_graphs])
def test_one_of_another_model_or_loop_is_refused(other: Callable[[], nn.Module], plan_of_two_graphs: Plan) -> None:
    model = shoal.compile(other(), options=shoal.Options(plan=plan_of_two_graphs))
    step = of_two_graphs if other is not two_graphs else of_two_calls_of_images
    with pytest.raises(PlanError):
        gradients(model, step, 1)


def test_one_of_other_graphs_is_refused_before_any_of_them_runs(plan_of_two_graphs: Plan) -> None:
    deeper = Chain(breaks, [nn.Sequential(*blocks(3, 8, 8, 8)), nn.Sequential(*blocks(8, 8, 8))], 8)
    model = shoal.compile(deeper, options=shoal.Options(plan=plan_of_two_graphs))
    with raising(PlanError, "Chain") as refused:
        gradients(model, of_two_graphs, 1)
    assert refused.value.details["graph"] == "1"
    assert not any(norm.num_batches_tracked for norm in deeper.modules() if isinstance(norm, nn.BatchNorm2d))


def of_two_calls_of_images(model: nn.Module) -> None:
    x = torch.randn(8, 3, 24, 24)
    (model(x) + model(x)).square().mean().backward()


def test_a_plan_of_one_graph_is_for_one_graph(tmp_path: Path) -> None:
    x = torch.randn(8, 3, 24, 24)
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Flatten())
    model = shoal.compile(two_graphs(), options=shoal.Options(plan=shoal.plan(net, x)))
    with pytest.raises(shoal.errors.ShoalError):
        gradients(model, of_two_graphs, 1)


def two_towers(budget: shoal.Budget, plan: Plan | None = None) -> list[nn.Module]:
    """Two models that share a budget, and a plan where it is given."""
    torch.manual_seed(0)
    towers = [nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.GELU()))) for _ in range(2)]
    options = None if plan is None else shoal.Options(plan=plan)
    for name, tower in zip(("image", "text"), towers, strict=True):
        shoal.compile(tower, budget, name=name, options=options)
    return towers


def train(towers: list[nn.Module], iterations: int) -> list[torch.Tensor | None]:
    """The gradients of the last iteration of a contrastive loss."""
    for x in torch.randn(iterations, 2, 512, 24, generator=torch.Generator().manual_seed(1)):
        for tower in towers:
            tower.zero_grad()
        image, text = (tower(one) for tower, one in zip(towers, x, strict=True))
        (image * text).sum(1).logsumexp(0).backward()
        del image, text
    return [parameter.grad for tower in towers for parameter in tower.parameters()]


@pytest.mark.slow
def test_models_that_share_a_budget_run_by_a_given_plan(tmp_path: Path) -> None:
    roomy = shoal.Budget("1GiB")
    train(two_towers(roomy), 3)
    assert roomy.peak_bytes is not None
    budget_bytes = int(0.8 * roomy.peak_bytes)
    planned_here = two_towers(shoal.Budget(budget_bytes))
    train(planned_here, 3)
    plan = Plan.load(planned_here[0].shoal.plan.save(tmp_path / "plan.json"))
    assert any(plan.residences.values())
    shared = shoal.Budget(budget_bytes)
    towers = two_towers(shared, plan)
    train(towers, 1)
    captures = towers[0].shoal.captures
    assert shared.peak_bytes is not None and shared.peak_bytes <= budget_bytes
    found = train(towers, 3)
    assert towers[0].shoal.captures == captures
    assert towers[0].shoal.plan.residences == plan.residences
    expected = train(two_towers(roomy := shoal.Budget("1GiB")), 3)
    assert roomy.peak_bytes is not None
    for gradient, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-6)
    with raising(InputError, "plan="):
        shoal.compile(nn.Linear(2, 2), shared)
