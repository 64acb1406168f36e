"""Layer by layer: a copy ends with the layer that reads its storage next, and begins one layer ahead coming back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.planners.hmms import hmms, offloadable, within_limit
from examples.planners.layerwise import last_of_next_layer, layerwise, one_layer_ahead
from shoal.core.hardware import Link
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError, InputError
from tests.raising import raising
from tests.random_steps import HARDWARE, SLOW_LINK, Builder, plain_chain, resnet_like, steps


def two_ops_a_layer(n: int) -> StepGraph:
    """n layers "layer0", ... of a convolution and a ReLU of 1000 bytes and a second each, then a convolution."""
    b = Builder()
    x = b.input(1000)
    for i in range(n):
        x = b.forward("conv", (x,), [("out", 1000)], 1.0, layer=f"layer{i}")[0]
        x = b.forward("relu", (x,), [("out", 1000)], 1.0, layer=f"layer{i}")[0]
    return b.step(b.forward("conv", (x,), [("out", 1)], 1.0, layer="last")[0])


def op_names(graph: StepGraph, ops: dict[int, int]) -> dict[str, str]:
    return {graph.storages[s].name: graph.ops[op].name for s, op in ops.items()}


def test_an_offload_ends_when_the_next_layer_has_read_it_and_run_to_its_end() -> None:
    graph = two_ops_a_layer(3)
    ends = {s: last_of_next_layer(graph, s) for s in offloadable(graph)}
    assert op_names(graph, ends) == {"relu_1.out": "relu_3", "relu_3.out": "relu_5", "relu_5.out": "conv_6"}


def test_ops_without_a_layer_are_layers_of_their_own() -> None:
    graph = plain_chain(4)
    graph = replace(graph, ops=tuple(replace(op, layer="") for op in graph.ops))
    ends = {s: last_of_next_layer(graph, s) for s in offloadable(graph)}
    assert op_names(graph, ends) == {"conv_0.out": "conv_1", "conv_1.out": "conv_2", "conv_2.out": "conv_3"}
    starts = one_layer_ahead(graph, offloadable(graph))
    assert op_names(graph, starts)["conv_0.out"] == "conv_backward_6"


def test_what_no_forward_op_reads_ends_with_the_op_after_its_producer() -> None:
    b = Builder()
    x = b.batchnorm(b.conv(b.input(10), 20))
    graph = b.step(b.conv(b.conv(x, 5), 1))
    mean = next(s.id for s in graph.storages if s.name == "bn_1.mean")
    assert graph.ops[last_of_next_layer(graph, mean)].name == "conv_2"


def test_a_skip_keeps_its_storage_until_its_last_forward_reader() -> None:
    b = Builder()
    x = b.conv(b.input(10), 20)
    y = b.conv(b.conv(x, 20), 20)
    graph = b.step(b.conv(b.cat([x, y]), 1))
    assert graph.ops[last_of_next_layer(graph, x)].name == "cat_3"


def test_a_prefetch_starts_with_the_layer_before_that_of_its_first_reader() -> None:
    graph = two_ops_a_layer(3)
    # A ReLU's backward reads its own result: relu_3.out is first read by layer1, and layer2 runs before that.
    starts = one_layer_ahead(graph, offloadable(graph))
    layers = {graph.storages[s].name: graph.ops[op].layer for s, op in starts.items()}
    assert layers == {"relu_5.out": "last", "relu_3.out": "last", "relu_1.out": "layer2"}
    assert all(graph.ops[op - 1].layer != graph.ops[op].layer for op in starts.values()), "a layer's first op"


def test_a_copy_that_takes_longer_than_the_next_layer_is_waited_for_at_its_end() -> None:
    # A second a layer, three seconds a copy there; two a layer and none a copy back.
    graph = replace(plain_chain(4, nbytes=1000, seconds=1.0), link=Link("slow", 1000 / 3, 1e12, 0.0))
    leaving = within_limit(graph, graph.link)  # type: ignore[arg-type]
    plan = layerwise(graph, HARDWARE, 0)
    assert {s.id for s in plan.offloaded} == set(leaving)
    assert plan.added_seconds == pytest.approx(len(leaving) * (3 - 1))


@given(steps(), st.floats(1.0, 100.0), st.sampled_from([0, 2 * 4096]))
def test_its_plan_is_legal_and_moves_what_hmms_moves(graph: StepGraph, rate: float, host_bytes: int) -> None:
    graph = replace(graph, link=replace(SLOW_LINK, to_host_bytes_per_second=rate, host_bytes=host_bytes))
    plan = layerwise(graph, HARDWARE, 0)
    assert check_runs(graph, plan.residences, schedule(graph, plan.residences)) == plan.predicted_peak_bytes
    assert plan.offloaded == hmms(graph, HARDWARE, 0).offloaded


@pytest.mark.parametrize("gigabytes_per_second", [0.00002, 0.0001, 0.0005])
def test_it_waits_longer_than_hmms_on_a_residual_network(gigabytes_per_second: float) -> None:
    rate = 1e9 * gigabytes_per_second
    graph = replace(resnet_like(), link=Link("link", rate, rate, 0.0))
    assert layerwise(graph, HARDWARE, 0).added_seconds > hmms(graph, HARDWARE, 0).added_seconds


def test_a_budget_below_its_peak_and_a_missing_link_are_refused() -> None:
    graph = replace(plain_chain(5), link=Link("link", 1e4, 1e4, 0.0))
    peak_bytes = layerwise(graph, HARDWARE, 0).predicted_peak_bytes
    assert layerwise(graph, HARDWARE, peak_bytes).predicted_peak_bytes == peak_bytes
    with raising(BudgetError, "plain_chain_5"):
        layerwise(graph, HARDWARE, peak_bytes - 1)
    with raising(InputError, "planner='layerwise'"):
        layerwise(plain_chain(3), HARDWARE, 0)
