"""States of the random generator that a plan keeps to repeat random ops: they count, in whatever makes the plan."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
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
from tests.engine.session_loops import true_peak
from tests.engine.training_laws import costs_that_do_not_matter, keep_by_chance, keep_nothing, needs_compiler

EACH_BYTES = torch.get_rng_state().nbytes
X = torch.zeros(64, 32)
ROWS = torch.zeros(1024, 32)
LOOP_BYTES = 512 + 4 * 64  # of the training loop, all step: the loss, and a target like the result


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
        plan = shoal.plan(dropping(dropouts), X, "1GiB", options=shoal.Options(planner=keep_nothing))
    assert states_of(plan) == (dropouts + 1 if dropouts else 0)
    assert plan.graph.static_bytes == states_of(plan) * EACH_BYTES + LOOP_BYTES


def test_they_count_where_a_step_may_recompute_alone() -> None:
    with costs_that_do_not_matter():
        plan = shoal.plan(dropping(3), X, "1GiB", allow="recompute", options=shoal.Options(planner=keep_nothing))
    assert plan.graph.static_bytes == states_of(plan) * EACH_BYTES + LOOP_BYTES


def test_on_a_gpu_they_are_on_the_host() -> None:
    plan = shoal.plan(dropping(3), X, "1GiB", hardware="p100-nvlink", options=shoal.Options(planner=keep_nothing))
    assert states_of(plan)
    assert plan.graph.static_bytes == LOOP_BYTES


@needs_compiler
def test_the_peak_of_a_plan_is_that_of_the_step_that_runs_by_it() -> None:
    plan = shoal.plan(dropping(3), X, "1GiB", options=shoal.Options(planner=keep_nothing))
    model: Any = shoal.compile(dropping(3), options=shoal.Options(plan=plan))
    for _ in range(3):
        step_of(model)
    assert model.shoal.plan.graph.static_bytes >= plan.graph.static_bytes - LOOP_BYTES
    assert 0 <= model.shoal.predicted_peak_bytes - model.shoal.measured_peak_bytes < EACH_BYTES


@needs_compiler
def test_they_still_count_once_a_metered_step_has_shown_what_the_loop_holds() -> None:
    model: Any = shoal.compile(dropping(3), "1GiB", allow="bitwise", options=shoal.Options(planner=keep_nothing))
    keeping: Any = shoal.compile(dropping(3), "1GiB", allow="bitwise", options=shoal.Options(planner="keep_all"))
    for _ in range(3):
        step_of(model), step_of(keeping)
        assert states_of(model.shoal.plan)
        assert 0 <= model.shoal.predicted_peak_bytes - model.shoal.measured_peak_bytes < EACH_BYTES
        assert model.shoal.plan.plain_peak_bytes == keeping.shoal.plan.plain_peak_bytes  # which keeps none


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
    assert asked == [LOOP_BYTES, LOOP_BYTES + 200]
    assert plan.graph.static_bytes == LOOP_BYTES + 200


def test_where_states_take_more_than_random_ops_make_none_is_repeated() -> None:
    """The planner repeats all that it may, and one state takes as much as the whole step."""
    with costs_that_do_not_matter():
        step = shoal.plan(dropping(3), X).graph
    hardware = shoal.core.presets.get("p100-nvlink")
    needed = keep_nothing(step, hardware, 0), keep_nothing(_without_repeats(step), hardware, 0)
    each_bytes = needed[1].predicted_peak_bytes

    def inside(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        plan = keep_nothing(graph, hardware, budget_bytes)
        if plan.predicted_peak_bytes > budget_bytes:
            raise BudgetError("no plan fits", least_feasible_bytes=plan.predicted_peak_bytes)
        return plan

    planner = counting_states(inside, each_bytes)
    with pytest.raises(BudgetError) as refused:
        planner(step, hardware, 1)
    assert refused.value.least_feasible_bytes == needed[1].predicted_peak_bytes
    plan = planner(step, hardware, needed[1].predicted_peak_bytes)
    assert not states_of(plan) and plan.predicted_peak_bytes == needed[1].predicted_peak_bytes
    assert [op.recomputable for op in plan.graph.ops] == [op.recomputable for op in step.ops]


def _without_repeats(step: StepGraph) -> StepGraph:
    return replace(step, ops=tuple(replace(op, recomputable=not op.random and op.recomputable) for op in step.ops))


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention_repeats_what_it_draws_only_with_dropout(dropout_p: float) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.given(x).sin().chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p).sin()

    with costs_that_do_not_matter():
        plan = shoal.plan(Attention(), torch.zeros(2, 24, 16), "1GiB", options=shoal.Options(planner=keep_nothing))
    assert bool(states_of(plan)) is bool(dropout_p)


class TwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([dropping(4), nn.Linear(1, 32), dropping(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        torch._dynamo.graph_break()
        return self.parts[2](self.parts[1](x))


def step_of_two_graphs(model: Any) -> None:
    model(ROWS).sum().backward()
    model.zero_grad()


@cache
def peak_bytes_of_two_graphs() -> int:
    model: Any = shoal.compile(TwoGraphs(), None)
    step_of_two_graphs(model)
    return int(model.shoal.measured_peak_bytes)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kept", [0, 1], ids=["the plan keeps nothing", "the plan keeps everything"])
@pytest.mark.parametrize("times", [1, 10], ids=["little is kept in the first step", "everything is"])
def test_in_a_step_of_several_graphs_those_of_its_plan_count_and_not_those_of_its_first_run(
    kept: float, times: int
) -> None:
    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        return keep_by_chance(0, kept)(graph, hardware, 0)

    budget_bytes = times * (peak_bytes_of_two_graphs() + 8 * EACH_BYTES)
    model: Any = shoal.compile(TwoGraphs(), budget_bytes, options=shoal.Options(planner=planner))
    for _ in range(3):
        step_of_two_graphs(model)
    plan, peak_bytes = model.shoal.plan, true_peak(model, lambda: step_of_two_graphs(model), [ROWS])
    assert bool(states_of(plan)) is not bool(kept)
    assert abs(plan.predicted_peak_bytes - peak_bytes) < 2 * EACH_BYTES
