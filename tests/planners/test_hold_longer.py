"""Plans on demand whose recomputed storages are held: they fit, and are never slower."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.residence import Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_plan
from shoal.planners.hold_longer import hold_longer
from shoal.planners.limits import DEFAULT, Effort, Guard
from shoal.planners.on_demand import on_demand, plans_on_demand
from shoal.planners.recompute_choice import recompute_choice
from tests.random_steps import conv_bn_relu_chain, inception_like, plain_chain, resnet_like, steps


def all_on_demand(graph: StepGraph) -> dict[str, Residence]:
    """Nothing stays but what must."""
    return on_demand(graph, recompute_choice(graph).kept_for(()))


def held_seconds(
    graph: StepGraph, residences: dict[str, Residence], budget_bytes: int, max_ops: int = DEFAULT.hold_longer_ops
) -> float:
    """Of the plan that is held longer, which is valid and fits."""
    held = hold_longer(graph, residences, budget_bytes, Effort("test", max_ops, Guard(1e9)))
    check_plan(graph, held, budget_bytes)
    return peak_and_seconds(graph, schedule(graph, held))[1]


@given(steps(), st.integers(0, 10_000), st.floats(1.0, 2.0), st.sampled_from([0, 50, DEFAULT.hold_longer_ops]))
def test_it_fits_and_is_no_slower_however_far_it_searches(
    graph: StepGraph, seed: int, share: float, max_ops: int
) -> None:
    chance = random.Random(seed)
    residences = on_demand(graph, {s.id for s in graph.storages if chance.random() < 0.3})
    before_bytes, before_seconds = peak_and_seconds(graph, schedule(graph, residences))
    seconds = held_seconds(graph, residences, int(share * before_bytes), max_ops)
    assert graph.plain_seconds * (1 - 1e-9) <= seconds <= before_seconds * (1 + 1e-12)


@given(steps() | st.sampled_from([plain_chain(12), resnet_like((1, 1)), inception_like()]))
def test_with_room_for_everything_everything_is_held(graph: StepGraph) -> None:
    total_bytes = sum(s.nbytes for s in graph.storages) + max(op.workspace_bytes for op in graph.ops)
    seconds = held_seconds(graph, all_on_demand(graph), graph.resident_bytes + 10 * total_bytes)
    assert seconds == pytest.approx(graph.plain_seconds)


@pytest.mark.parametrize("graph", [conv_bn_relu_chain(12), resnet_like((2, 2, 2, 2))])
def test_more_room_takes_less_time(graph: StepGraph) -> None:
    residences = all_on_demand(graph)
    least_bytes, most_seconds = peak_and_seconds(graph, schedule(graph, residences))
    room_bytes = peak_and_seconds(graph, schedule(graph, {}))[0] - least_bytes
    seconds = [held_seconds(graph, residences, least_bytes + room_bytes * n // 4) for n in range(5)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0] <= most_seconds


def test_most_of_the_time_is_saved_without_a_higher_peak() -> None:
    """A network of blocks like ResNet-50's: what is recomputed only for a storage that is held takes no room."""
    graph = resnet_like()
    least = plans_on_demand(graph, DEFAULT)[0][0]
    seconds = held_seconds(least.graph, dict(least.residences), least.peak_bytes)
    assert seconds - graph.plain_seconds < 0.15 * (least.seconds - graph.plain_seconds)
