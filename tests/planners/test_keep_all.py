"""Keeping everything is what plain PyTorch does: nothing runs twice, and no plan is faster."""

from __future__ import annotations

import pytest
from hypothesis import given

from shoal.core.residence import Keep
from shoal.core.schedule import schedule
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.errors import BudgetError
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_all import keep_all
from tests.random_steps import HARDWARE, steps


@given(steps())
def test_every_saved_storage_is_kept_and_nothing_runs_twice(graph: StepGraph) -> None:
    plan = keep_all(graph, HARDWARE, 0)
    assert plan.residences == {graph.storages[s].name: Keep() for s in graph.saved}
    assert not any(run.again for run in schedule(graph, plan.residences))
    assert plan.added_seconds == 0
    assert plan.timeline == simulate(graph, {})


@given(steps())
def test_recomputing_everything_is_never_faster(graph: StepGraph) -> None:
    assert simulate(graph, just_in_time(graph, ())).seconds >= keep_all(graph, HARDWARE, 0).predicted_seconds


@given(steps())
def test_a_budget_of_its_peak_is_met_and_a_byte_less_is_refused(graph: StepGraph) -> None:
    peak_bytes = keep_all(graph, HARDWARE, 0).predicted_peak_bytes
    assert keep_all(graph, HARDWARE, peak_bytes).predicted_peak_bytes == peak_bytes
    if peak_bytes > 1:
        with pytest.raises(BudgetError) as caught:
            keep_all(graph, HARDWARE, peak_bytes - 1)
        assert caught.value.least_feasible_bytes == peak_bytes
