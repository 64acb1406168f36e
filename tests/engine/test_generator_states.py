"""States of the random generator that a plan keeps to repeat random ops: they count, in whatever makes the plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.engine.generator_states import counting_states, states_of
from shoal.errors import BudgetError
from tests.engine.training_laws import costs_that_do_not_matter, keep_nothing, needs_compiler

EACH_BYTES = torch.get_rng_state().nbytes
X = torch.zeros(64, 32)


def dropping(dropouts: int) -> nn.Module:
    """Layers of which the last ones drop: what they drop may be kept or drawn again."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Sigmoid()) for _ in range(dropouts)]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def step_of(model: Any) -> None:
    model(X).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("dropouts", [0, 1, 3])
def test_a_plan_that_is_not_run_counts_one_for_each_random_op_and_one_to_put_back(dropouts: int) -> None:
    with costs_that_do_not_matter():
        plan = shoal.plan(dropping(dropouts), X, "1GiB", planner=keep_nothing)
    assert states_of(plan) == (dropouts + 1 if dropouts else 0)
    assert plan.graph.static_bytes == states_of(plan) * EACH_BYTES


def test_on_a_gpu_they_are_on_the_host() -> None:
    plan = shoal.plan(dropping(3), X, "1GiB", planner=keep_nothing, hardware="p100-nvlink")
    assert states_of(plan)
    assert plan.graph.static_bytes == 0


@needs_compiler
def test_the_peak_of_a_plan_is_that_of_the_step_that_runs_by_it() -> None:
    plan = shoal.plan(dropping(3), X, "1GiB", planner=keep_nothing)
    model: Any = shoal.compile(dropping(3), plan=plan)
    for _ in range(3):
        step_of(model)
    assert model.shoal.plan.graph.static_bytes >= plan.graph.static_bytes
    assert 0 <= model.shoal.predicted_peak_bytes - model.shoal.measured_peak_bytes < EACH_BYTES


@needs_compiler
def test_the_least_budget_of_a_plan_is_enough_to_train_in_beside_what_the_loop_holds() -> None:
    net = dropping(4)
    with pytest.raises(BudgetError) as refused:
        shoal.plan(net, X, "1KiB", allow="bitwise")
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None
    model: Any = shoal.compile(copy.deepcopy(net), least_bytes + 2 * X.nbytes, allow="bitwise")
    for _ in range(3):
        step_of(model)
    assert model.shoal.measured_peak_bytes <= least_bytes + 2 * X.nbytes


def test_of_a_step_of_many_only_those_that_are_repeated_take_room() -> None:
    """The first plan counts none and repeats one op; the second has room for two states less, and is the answer."""
    with costs_that_do_not_matter():
        step = shoal.plan(dropping(8), X).graph
    asked: list[int] = []

    def repeats_one(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        asked.append(graph.static_bytes)
        every = keep_nothing(graph, hardware, budget_bytes)
        random = {s.name for s in every.recomputed if graph.ops[graph.producer[s.id]].random}
        but_one = {name: one for name, one in every.residences.items() if name not in sorted(random)[1:]}
        return Plan(graph, but_one, "repeats_one", hardware.name, budget_bytes)

    hardware = shoal.core.presets.get("p100-nvlink")
    peak_bytes = repeats_one(step, hardware, 0).predicted_peak_bytes
    asked.clear()
    plan = counting_states(repeats_one, 100)(step, hardware, peak_bytes)
    assert asked == [0, 200]
    assert plan.graph.static_bytes == 200
