"""A budget of reserved bytes: who may ask for it, and how a plan is found; on a device in tests/cuda_standin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn

import shoal
from shoal.core import plan as core_plan
from shoal.engine import loop_memory, reserved_budget
from shoal.engine.compile_options import CompileOptions
from shoal.engine.reserved_budget import within_reserved
from shoal.errors import BudgetError, InputError
from shoal.memory.layout.reserved import Reserved
from tests.engine.keywords import keywords
from tests.raising import raising
from tests.random_steps import Builder


def test_on_the_cpu_it_is_refused_by_name() -> None:
    with raising(InputError, "budget_of='reserved'"):
        shoal.compile(nn.Linear(4, 4), budget="1MiB", options=shoal.Options(budget_of="reserved"))
    model = torch.compile(nn.Linear(4, 4), backend="shoal", options={"budget": "1MiB", "budget_of": "reserved"})
    with pytest.raises(InputError):
        model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"budget": "1GiB", "budget_of": "both"}, "'allocated'"),
        ({"budget_of": "reserved"}, "budget="),
    ],
)
def test_what_it_cannot_be_combined_with(given: dict[str, Any], said: str) -> None:
    with raising(InputError, said):
        CompileOptions.of(**keywords(given))


@dataclass(frozen=True)
class Graph:
    static_bytes: int


@dataclass(frozen=True)
class Plan:
    graph: Graph
    own_bytes: int
    exact_graph: None = None

    @property
    def predicted_peak_bytes(self) -> int:
        return self.own_bytes + self.graph.static_bytes


@dataclass(frozen=True)
class Basis:
    static_bytes: int

    def with_static(self, more_bytes: int) -> Basis:
        return Basis(self.static_bytes + more_bytes)


@dataclass(frozen=True)
class Planned:
    plan: Plan
    basis: Basis


BUDGET = 1000


def planned(aside_bytes: int) -> Planned:
    """A plan that fills what is not set aside."""
    if BUDGET - aside_bytes < 400:
        raise BudgetError("no plan", budget_bytes=BUDGET, least_feasible_bytes=BUDGET + 1)
    own_bytes = BUDGET - 100 - aside_bytes
    return Planned(Plan(Graph(100 + aside_bytes), own_bytes), Basis(100 + aside_bytes))


def look_with(overhead: float) -> Any:
    def look(made: Planned) -> Reserved:
        wanted = int(made.plan.predicted_peak_bytes * overhead)
        return Reserved(min(wanted, BUDGET), max(0, wanted - BUDGET))

    return look


def test_bytes_are_set_aside_until_what_is_reserved_fits_and_are_not_predicted() -> None:
    made, found = within_reserved(cast(Any, planned(0)), cast(Any, planned), look_with(1.25), BUDGET)
    assert found.short_bytes == 0
    assert 700 < made.plan.predicted_peak_bytes <= 800
    assert made.plan.graph.static_bytes == 100
    assert made.basis == Basis(100)


def test_where_nothing_is_short_the_plan_stays() -> None:
    first = planned(0)
    assert within_reserved(cast(Any, first), cast(Any, planned), look_with(1.0), BUDGET)[0] is first


def test_a_budget_that_is_too_small_is_refused_with_what_the_allocator_takes() -> None:
    with pytest.raises(BudgetError) as refused:
        within_reserved(cast(Any, planned(0)), cast(Any, planned), look_with(3.0), BUDGET)
    assert "left to the allocator" in refused.value.details


MIB = 1 << 20
LAYERS = ((45, 2), (17, 4), (14, 27), (5, 64))  # MiB of a convolution's result and of its weight


@pytest.mark.parametrize("learnt", [False, True])
def test_until_the_loop_is_known_one_that_holds_less_is_followed_too(
    learnt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients freed before the next forward pass leave a hole for activations, in which a gradient fits no more."""
    builder = Builder()
    result = builder.input(18 * MIB)
    for out_mib, weight_mib in LAYERS:
        result = builder.relu(builder.conv(result, out_mib * MIB, weight_bytes=weight_mib * MIB))
    graph = builder.step(builder.conv(result, 4, weight_bytes=4))
    weights = [torch.empty(mib * MIB // 4, device="meta", requires_grad=True) for _, mib in LAYERS]
    weights_bytes = sum(weight.nbytes for weight in weights)
    block = {"address": 0, "size": 40 * MIB, "state": "active_allocated"}
    segment = {"address": 0, "total_size": 40 * MIB, "segment_type": "large", "is_expandable": True, "blocks": [block]}
    monkeypatch.setattr(reserved_budget, "trimmed_segments", lambda device: [segment])
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 40 * MIB)

    basis = loop_memory.Basis(graph, None, {0: next(s.name for s in graph.storages if s.kind == "output")}, "captured")
    plan = core_plan.Plan(graph, {}, "none", "cuda", 0)
    loop = loop_memory.LoopMemory(learnt=learnt)
    look = reserved_budget.look_at_allocator(torch.device("cuda"), 1 << 30, weights, weights_bytes, weights_bytes, loop)

    def reserved_in(loop: loop_memory.LoopMemory) -> int:
        return look(cast(Any, Planned(cast(Any, basis.of(plan, loop)), cast(Any, basis)))).reserved_bytes

    holds_least = reserved_in(loop_memory.best_case(loop, basis.outputs))
    holds_most = reserved_in(loop)
    if learnt:  # only that loop is followed
        assert holds_most < holds_least
    else:
        assert holds_most == holds_least
