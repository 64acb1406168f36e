"""Plans on demand whose recomputed storages are held: they fit, and are never slower."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.hold_longer import hold_longer
from shoal.planners.limits import Effort, Guard
from shoal.planners.on_demand import on_demand
from shoal.planners.recompute_choice import recompute_choice
from shoal.planners.simulated import simulated
from tests.random_steps import conv_bn_relu_chain, resnet_like, steps


def held(graph: StepGraph, budget_bytes: int, max_ops: int = 10**6) -> tuple[int, float]:
    """Peak and seconds of the plan that recomputes all it can on demand, once it is held."""
    start = on_demand(graph, recompute_choice(graph).kept_for(()))
    effort = Effort("hold longer", max_ops, Guard(1e9))
    return peak_and_seconds(graph, schedule(graph, hold_longer(graph, start, budget_bytes, effort)))


def on_demand_alone(graph: StepGraph) -> tuple[int, float]:
    found = simulated(graph, on_demand(graph, recompute_choice(graph).kept_for(())))
    return found.peak_bytes, found.seconds


@settings(max_examples=60)
@given(steps(), st.floats(0, 1), st.sampled_from([0, 50, 10**6]))
def test_it_fits_and_is_no_slower_however_far_it_searches(graph: StepGraph, share: float, max_ops: int) -> None:
    least_bytes, most_seconds = on_demand_alone(graph)
    plain_bytes, plain_seconds = peak_and_seconds(graph, schedule(graph, {}))
    budget_bytes = least_bytes + int(share * max(0, plain_bytes - least_bytes))
    peak_bytes, seconds = held(graph, budget_bytes, max_ops)
    assert peak_bytes <= budget_bytes
    assert plain_seconds <= seconds * (1 + 1e-9) and seconds <= most_seconds * (1 + 1e-9)


@settings(max_examples=30)
@given(steps())
def test_with_room_for_everything_nothing_is_recomputed(graph: StepGraph) -> None:
    everything_bytes = 10 * sum(storage.nbytes for storage in graph.storages) + sum(
        op.workspace_bytes for op in graph.ops
    )
    _, seconds = held(graph, graph.resident_bytes + everything_bytes)
    assert seconds <= graph.plain_seconds * (1 + 1e-9)


def test_more_room_takes_less_time() -> None:
    for graph in (conv_bn_relu_chain(12), resnet_like((2, 2, 2, 2))):
        least_bytes, most_seconds = on_demand_alone(graph)
        room_bytes = peak_and_seconds(graph, schedule(graph, {}))[0] - least_bytes
        seconds = [held(graph, least_bytes + room_bytes * n // 4)[1] for n in range(5)]
        assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0] <= most_seconds


def test_what_is_recomputed_only_for_a_storage_that_is_held_takes_no_room() -> None:
    """A chain, with room for one storage in addition: each group but the first is spared all that lies before it."""
    graph = conv_bn_relu_chain(8, 1000)
    least_bytes, most_seconds = on_demand_alone(graph)
    _, seconds = held(graph, least_bytes + 1000)
    assert seconds - graph.plain_seconds < 0.75 * (most_seconds - graph.plain_seconds)
