"""What stays in a plan on demand: sets of storages that any plan may keep, one of which gives a low peak."""

from __future__ import annotations

from hypothesis import given

from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_plan
from shoal.planners.kept_on_demand import beside_their_way, kept_sets, narrow
from shoal.planners.limits import DEFAULT, Limits
from shoal.planners.on_demand import on_demand, plans_on_demand
from shoal.planners.recompute_choice import recompute_choice
from tests.random_steps import Builder, resnet_like, steps


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
