"""Training with ops in another order than captured: the same bits as plain PyTorch, inside the budget."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.hardware import Hardware, Link
from shoal.core.order import op_names, reordered
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_order
from shoal.errors import BudgetError, PlanError
from shoal.planners.just_in_time import just_in_time
from shoal.planners.later_readers import with_later_readers
from shoal.planners.limits import Effort, Guard
from shoal.planners.simulated import simulated
from shoal.planners.transfer_places import with_offloads
from tests.engine.several_graphs import computes_eagerly
from tests.engine.test_iteration_variants import Pair, Refined, gradients, of_two_calls, of_two_models
from tests.engine.training_laws import (
    assert_same_training,
    conv_bn_relu,
    differences,
    images,
    needs_compiler,
    ordered_by_chance,
    train,
)


class Inception(nn.Module):
    """Three branches; the third layer of the last shares its weights with the second."""

    def __init__(self, inputs: int, wide: int, narrow: int) -> None:
        super().__init__()
        self.one = conv_bn_relu(inputs, narrow)
        self.two = nn.Sequential(conv_bn_relu(inputs, wide), nn.Dropout(0.3), conv_bn_relu(wide, narrow))
        shared = conv_bn_relu(wide, wide)
        self.three = nn.Sequential(conv_bn_relu(inputs, wide), shared, shared, conv_bn_relu(wide, narrow))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.two(x), self.three(x)], 1)


class UNet(nn.Module):
    """One level down and up, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = conv_bn_relu(3, 8), conv_bn_relu(8, 16)
        self.dropout = nn.Dropout2d(0.4)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), conv_bn_relu(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.down(x)
        inner = self.dropout(self.inner(nn.functional.max_pool2d(kept, 2)))
        return self.out(torch.cat([kept, self.up(inner)], 1))


class Exchange(nn.Module):
    """Two resolutions that exchange their features, with the sums in place."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = conv_bn_relu(3, 8), nn.Conv2d(3, 16, 3, 2, 1)
        self.up, self.down = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high, low = self.high(x), self.low(x)
        to_low = self.down(high)
        high = high + nn.functional.interpolate(self.up(low), scale_factor=2)
        low = low + to_low
        return torch.relu_(high), torch.tanh(low)


def inception() -> nn.Module:
    """Large weights after small activations, so that weight gradients may wait."""
    head = [nn.MaxPool2d(4), nn.Conv2d(24, 256, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 5)]
    return nn.Sequential(Inception(3, 16, 8), *head)


NETWORKS = {"inception": inception, "unet": UNet, "exchange": Exchange}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_order_trains_as_plain_pytorch_does(network: str, seed: int) -> None:
    torch.manual_seed(0)
    planned = assert_same_training(NETWORKS[network](), images(2, 2, 3, 16, 16), ordered_by_chance(seed))
    plan = planned.shoal.plan
    assert plan.captured_order and op_names(plan.graph) != plan.captured_order


@pytest.mark.slow
def test_joint_orders_a_step_runs_it_and_its_file_runs_it_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = inception(), images(2, 4, 3, 32, 32)
    expected = train(inception_copy(model), batches)
    budget = int(0.95 * shoal.plan(model, batches[0]).predicted_peak_bytes)
    planned = shoal.compile(inception_copy(model), budget=budget, allow="bitwise")
    assert not differences(train(planned, batches), expected)
    status = planned.shoal
    assert status.plan.captured_order and "earlier or later than captured" in status.plan.explain()
    assert status.measured_peak_bytes <= budget
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)

    path = status.plan.save(tmp_path / "plan.json")
    again = shoal.compile(inception_copy(model), options=shoal.Options(plan=Plan.load(path)))
    assert not differences(train(again, batches), expected)
    order = op_names(again.shoal.plan.graph)
    assert again.shoal.plan.captured_order and order == tuple(n for n in op_names(status.plan.graph) if n in order)


def later_readers(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """Everything that can waits on the host, in the order for a link that is much slower than this one."""
    link = Link("slow", 1e9, max(s.nbytes for s in graph.storages) / graph.plain_seconds, 0.0)
    slow, every = replace(graph, link=link), range(len(graph.storages))
    found = simulated(slow, with_offloads(slow, just_in_time(slow, every), every))
    later = with_later_readers(found, budget_bytes, Effort("order of ops", 100_000, Guard(1e9)))
    ordered = replace(later.graph, link=graph.link)
    return Plan(ordered, later.residences, "mine", hardware.name, budget_bytes, captured_order=op_names(graph))


def test_readers_that_run_later_for_their_copies_train_as_plain_pytorch_does_in_the_bytes_predicted() -> None:
    torch.manual_seed(0)
    model, batches = inception(), images(3, 4, 3, 32, 32)
    expected = train(inception_copy(model), batches)
    planned = shoal.compile(
        inception_copy(model), budget="1GiB", offload_to="host", options=shoal.Options(planner=later_readers)
    )
    assert not differences(train(planned, batches), expected)
    status = planned.shoal
    assert status.plan.offloaded and status.plan.captured_order
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)


def inception_copy(model: nn.Module) -> nn.Module:
    """A model of its own with the same parameters."""
    made = inception()
    made.load_state_dict(model.state_dict())
    return made


def test_a_planner_whose_order_cannot_run_is_refused() -> None:
    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        names = [op.name for op in graph.ops]
        names[0], names[graph.n_forward - 1] = names[graph.n_forward - 1], names[0]
        return Plan(reordered(graph, names), {}, "mine", captured_order=op_names(graph))

    with pytest.raises(PlanError):
        shoal.plan(UNet(), images(1, 2, 3, 16, 16)[0], "1GiB", options=shoal.Options(planner=planner))


class Broken(nn.Module):
    """Two graphs with eager code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = conv_bn_relu(3, 8), Inception(8, 16, 8)
        self.head = nn.Sequential(
            nn.MaxPool2d(4), nn.Conv2d(24, 128, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(computes_eagerly(self.stem(x))))


def of_images(model: nn.Module) -> None:
    model(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))).square().mean().backward()


ITERATIONS = {"graphs": (Broken, of_images), "calls": (Refined, of_two_calls), "models": (Pair, of_two_models)}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("of", ITERATIONS)
def test_an_iteration_in_a_random_order_trains_as_plain_pytorch_does_in_the_bytes_predicted(of: str) -> None:
    make, step = ITERATIONS[of]
    torch.manual_seed(0)
    plain: nn.Module = make()
    model, options = copy.deepcopy(plain), shoal.Options(planner=ordered_by_chance(1))
    budget: Any = shoal.Budget("1GiB") if of == "models" else "1GiB"
    for one in model.children() if of == "models" else (model,):
        status = shoal.compile(one, budget, options=options).shoal
    torch.manual_seed(7)
    gradients(model, step, 2)
    status.measured_peak_bytes = None  # of iterations before the plan
    found = gradients(model, step, 2)
    plan = status.plan
    assert plan.captured_order and op_names(plan.graph) != plan.captured_order
    check_order(plan.captured_graph, plan.graph)
    assert status.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    torch.manual_seed(7)
    assert not differences(found, gradients(plain, step, 4))


@pytest.mark.slow
@needs_compiler
def test_joint_orders_an_iteration_that_would_not_fit_as_captured_and_its_file_runs_it_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Broken(), images(3, 4, 3, 32, 32)
    expected = train(copy.deepcopy(model), batches)
    roomy = shoal.compile(copy.deepcopy(model), "1GiB", allow="bitwise")
    train(roomy, batches[:2])
    planned = shoal.compile(copy.deepcopy(model), int(0.85 * roomy.shoal.predicted_peak_bytes), allow="bitwise")
    assert not differences(train(planned, batches), expected)
    status, plan = planned.shoal, planned.shoal.plan
    assert plan.captured_order and " instead of " in plan.order
    assert status.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)

    again = shoal.compile(
        copy.deepcopy(model), options=shoal.Options(plan=Plan.load(plan.save(tmp_path / "plan.json")))
    )
    assert not differences(train(again, batches), expected)
    assert op_names(again.shoal.plan.graph) == op_names(plan.graph)
    assert again.shoal.plan.captured_order == plan.captured_order
    assert again.shoal.measured_peak_bytes <= status.budget_bytes


@pytest.mark.slow
@needs_compiler
def test_an_iteration_trains_in_less_than_it_needs_as_captured() -> None:
    torch.manual_seed(0)
    fresh, batches = Broken(), images(2, 4, 3, 32, 32)

    def trained(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters())
        torch.manual_seed(7)
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def planned(budget: int, allow: str) -> nn.Module:
        return shoal.compile(copy.deepcopy(fresh), budget, allow=allow, optimizer="adamw")

    with pytest.raises(BudgetError) as refused:
        trained(planned(2_300_000, "recompute"))
    budget = int(0.97 * (refused.value.least_feasible_bytes or 0))
    model = planned(budget, "recompute, order")
    assert not differences(trained(model), trained(copy.deepcopy(fresh)))
    assert model.shoal.measured_peak_bytes <= budget
