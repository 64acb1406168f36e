"""Plans that recompute on demand: nothing outlives the op that it came back for, and what is held costs no room."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_order, check_plan
from shoal.engine.loop_memory import by_itself
from shoal.planners.limits import DEFAULT, Effort, Guard, Limits
from shoal.planners.on_demand import (
    beside_their_way,
    in_order_on_demand,
    kept_sets,
    narrow,
    on_demand,
    plans_on_demand,
)
from shoal.planners.recompute_choice import recompute_choice
from tests.random_steps import Builder, inception_like, resnet_like, steps

seeds = st.integers(0, 10_000)


def effort(ops: int = DEFAULT.hold_longer_ops) -> Effort:
    return Effort("test", ops, Guard(1e9))


def kept_by_chance(graph: StepGraph, seed: int) -> frozenset[int]:
    chance = random.Random(seed)
    return frozenset(s.id for s in graph.storages if chance.random() < 0.3)


def conv_bn_relu(inputs: int, channels: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


@lru_cache(maxsize=1)
def split_vgg() -> StepGraph:
    """Two wide layers on overlapping patches, and a head whose weight is half as large as a result of those."""
    with torch.device("meta"):
        wide = [*conv_bn_relu(3, 16), *conv_bn_relu(16, 16), nn.MaxPool2d(4)]
        head = [*conv_bn_relu(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 144, 64)]
        model = shoal.split(nn.Sequential(*wide, *head), depth=0.6, grid=(2, 2), halo="exact")
        images = torch.empty(4, 3, 96, 96)
    return by_itself(shoal.plan(model, images, hardware="p100-nvlink", offload_to=None).graph)


@given(steps(), seeds)
def test_nothing_recomputed_outlives_the_op_that_it_was_recomputed_for(graph: StepGraph, seed: int) -> None:
    residences = on_demand(graph, kept_by_chance(graph, seed))
    check_plan(graph, residences)
    back: set[int] = set()
    for run in schedule(graph, residences)[graph.n_forward :]:
        back.update(run.writes if run.again else ())
        back.difference_update(run.frees)
        assert run.again or not back


@given(steps(), seeds)
def test_an_order_for_it_can_run_and_recomputes_no_more(graph: StepGraph, seed: int) -> None:
    kept = kept_by_chance(graph, seed)
    ordered = in_order_on_demand(graph, kept, effort())
    check_order(graph, ordered)
    check_plan(ordered, on_demand(ordered, kept))
    _, seconds = peak_and_seconds(graph, schedule(graph, on_demand(graph, kept)))
    _, after = peak_and_seconds(ordered, schedule(ordered, on_demand(ordered, kept)))
    assert after == pytest.approx(seconds)


@pytest.mark.slow
def test_patches_of_a_split_network_run_one_after_another_and_large_weight_gradients_wait() -> None:
    graph = split_vgg()
    plans, _ = plans_on_demand(graph, DEFAULT)
    check_order(graph, plans[0].graph)
    layer_bytes = first_layer_bytes(graph)
    largest = max((s for s in graph.storages if s.kind == "gradient"), key=lambda s: s.nbytes)
    assert largest.nbytes > layer_bytes / 3  # else it might as well be there
    # The activation gradients of all patches of one layer, and what two of the four patches take besides.
    assert plans[0].peak_bytes < graph.resident_bytes + 1.6 * layer_bytes
    for kept in ((), range(len(graph.storages))):
        captured_bytes, _ = peak_and_seconds(graph, schedule(graph, on_demand(graph, kept)))
        assert plans[0].peak_bytes < 0.65 * captured_bytes


def first_layer_bytes(graph: StepGraph) -> int:
    """Of the result of the first convolution, all patches of it with what overlaps."""
    first = [op for op in graph.ops[: graph.n_forward] if op.layer == "0" and "convolution" in op.target]
    return sum(graph.storages[op.writes[0]].nbytes for op in first)


def test_what_the_search_may_not_order_stays_in_order() -> None:
    graph = inception_like()
    plans, _ = plans_on_demand(graph, Limits(order=False))
    assert {one.graph for one in plans} == {graph}


@given(steps())
def test_each_set_makes_a_valid_plan_and_keeps_what_must_stay(graph: StepGraph) -> None:
    choice = recompute_choice(graph)
    for kept in kept_sets(choice, DEFAULT.narrow_share, DEFAULT.way_shares):
        assert choice.kept_for(()) <= kept
        check_plan(graph, on_demand(graph, kept))
    assert beside_their_way(choice, 0.0) == choice.kept_for(())
    assert beside_their_way(choice, 1.0) == choice.kept_for(choice.candidates)


def test_what_is_small_beside_all_that_it_is_made_of_stays() -> None:
    step = Builder()
    images = step.input(100)
    parts = [step.conv(images, 100) for _ in range(4)]
    joined = step.add(step.add(parts[0], parts[1]), step.add(parts[2], parts[3]))
    choice = recompute_choice(step.step(step.conv(joined, 10)))
    kept = beside_their_way(choice, 1 / 4)  # 100 bytes, of which all four parts and a sum take five times as much
    assert joined in kept and kept.isdisjoint(parts)
    assert joined not in narrow(choice, 1 / 4)  # as large as any part


def test_no_set_has_a_lower_peak_than_the_first_plan() -> None:
    graph = resnet_like()
    found, _ = plans_on_demand(graph, Limits(order=False))
    sets = kept_sets(recompute_choice(graph), DEFAULT.narrow_share, DEFAULT.way_shares)
    peaks = [peak_and_seconds(graph, schedule(graph, on_demand(graph, kept)))[0] for kept in sets]
    assert found[0].peak_bytes == min(peaks) < max(peaks)
