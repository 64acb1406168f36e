"""CPU offloading's simple half: inputs of convolutions and poolings leave, whatever the link and the budget are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from examples.planners.hascoet import hascoet, inputs_of_layers
from shoal.core.hardware import Link
from shoal.core.residence import Keep, Offload
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError, InputError
from tests.raising import raising
from tests.random_steps import HARDWARE, SLOW_LINK, Builder, plain_chain, steps

FAST = Link("fast", 1e12, 1e12, 0.0)


def conv_bn_relu_pool() -> StepGraph:
    b = Builder()
    x = b.pool(b.conv_bn_relu(b.input(40), 400), 100)
    return b.step(b.conv(b.conv_bn_relu(x, 100), 10))


def test_inputs_of_convolutions_and_poolings_leave_and_those_of_batch_norms_stay() -> None:
    graph = replace(conv_bn_relu_pool(), link=FAST)
    # relu_2 feeds the pooling, the pooling's result a convolution, relu_6 the last one. Convolutions feed batch norms.
    inputs = ["relu_2.out", "pool_3.out", "relu_6.out"]
    assert [graph.storages[s].name for s in inputs_of_layers(graph)] == inputs
    plan = hascoet(graph, HARDWARE, 0)
    assert [s.name for s in plan.offloaded] == inputs
    assert plan.residences["conv_0.out"] == plan.residences["pool_3.indices"] == Keep()


def test_the_batch_which_the_caller_holds_stays() -> None:
    graph = replace(plain_chain(3), link=FAST)
    assert [s.name for s in hascoet(graph, HARDWARE, 0).offloaded] == ["conv_0.out", "conv_1.out"]


def test_a_buffer_is_freed_after_the_next_layer_and_back_one_layer_ahead() -> None:
    graph = replace(plain_chain(4), link=FAST)
    plan = hascoet(graph, HARDWARE, 0)
    assert plan.residences["conv_0.out"] == Offload("conv_1", "conv_backward_6")
    assert plan.residences["conv_1.out"] == Offload("conv_2", "conv_backward_5")


def test_it_offloads_from_the_first_layer_on_until_the_host_is_full() -> None:
    graph = replace(plain_chain(6, nbytes=1000), link=replace(FAST, host_bytes=3 * 4096 - 1))
    assert [s.name for s in hascoet(graph, HARDWARE, 0).offloaded] == ["conv_0.out", "conv_1.out"]


def test_without_parallel_streams_every_copy_is_added_and_pageable_memory_makes_each_longer() -> None:
    def added_seconds(**changes: object) -> float:
        link = replace(Link("link", 1000.0, 500.0, 0.0), **changes)  # type: ignore[arg-type]
        return hascoet(replace(plain_chain(4, nbytes=1000, seconds=1.0), link=link), HARDWARE, 0).added_seconds

    in_turns = added_seconds(overlaps=False)
    assert in_turns == pytest.approx(3 * (1 + 2))
    assert added_seconds(overlaps=False, to_host_bytes_per_second=500.0) == pytest.approx(3 * (2 + 2))
    # In parallel only the very first read waits: no op of the backward pass comes before it.
    assert added_seconds() == pytest.approx(2.0)


@given(steps())
def test_its_plan_is_legal_and_recomputes_nothing(graph: StepGraph) -> None:
    graph = replace(graph, link=SLOW_LINK)
    plan = hascoet(graph, HARDWARE, 0)
    assert check_runs(graph, plan.residences, schedule(graph, plan.residences)) == plan.predicted_peak_bytes
    assert not plan.recomputed
    assert {s.id for s in plan.offloaded} == set(inputs_of_layers(graph))


def test_a_budget_below_its_peak_and_a_missing_link_are_refused() -> None:
    graph = replace(plain_chain(5), link=FAST)
    peak_bytes = hascoet(graph, HARDWARE, 0).predicted_peak_bytes
    assert hascoet(graph, HARDWARE, peak_bytes).predicted_peak_bytes == peak_bytes
    with raising(BudgetError, "plain_chain_5"):
        hascoet(graph, HARDWARE, peak_bytes - 1)
    with raising(InputError, "planner='hascoet'"):
        hascoet(plain_chain(3), HARDWARE, 0)
