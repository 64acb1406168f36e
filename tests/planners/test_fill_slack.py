"""Using up the room a plan leaves: never slower, never over the budget, and nothing runs that nothing reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.residence import Keep, Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.planners.fill_slack import fill_slack, without_needless_runs
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import Effort, Guard
from tests.random_steps import plain_chain, steps


@given(steps(), st.floats(0.0, 1.0), st.randoms(use_true_random=False))
def test_it_is_never_slower_and_fits_where_the_start_fits(graph: StepGraph, share: float, chance: object) -> None:
    start = just_in_time(graph, {s.id for s in graph.storages if chance.random() < share})  # type: ignore[attr-defined]
    budget_bytes, seconds = peak_and_seconds(graph, schedule(graph, start))
    more = fill_slack(graph, start, budget_bytes)
    runs = schedule(graph, more)
    assert check_runs(graph, more, runs, budget_bytes) <= budget_bytes
    assert peak_and_seconds(graph, runs)[1] <= seconds


def test_with_room_for_everything_everything_is_kept() -> None:
    graph = plain_chain(5)
    runs = schedule(graph, fill_slack(graph, just_in_time(graph, ()), 1 << 40))
    assert not [run for run in runs if run.again]


def test_without_effort_the_start_is_handed_back() -> None:
    graph = plain_chain(5)
    start = just_in_time(graph, ())
    assert fill_slack(graph, start, 1 << 40, Effort("fill slack", 0, Guard(10))) == start


def test_what_no_one_reads_is_not_computed_again() -> None:
    graph = plain_chain(4)
    needless = {
        "conv_0.out": Recompute(("conv_backward_5", "conv_backward_7")),  # at 5 only to make conv_1.out again
        "conv_1.out": Recompute(("conv_backward_5", "conv_backward_6")),
        "conv_2.out": Keep(),
    }
    assert without_needless_runs(graph, needless) == {
        "conv_0.out": Recompute(("conv_backward_5", "conv_backward_7")),
        "conv_1.out": Recompute(("conv_backward_6",)),
        "conv_2.out": Keep(),
    }, "conv_1.out at 6 reads the conv_0.out of 5; nothing reads the conv_1.out of 5"


@given(steps(), st.randoms(use_true_random=False))
def test_pruning_a_plan_made_just_in_time_changes_nothing(graph: StepGraph, chance: object) -> None:
    start = just_in_time(graph, {s.id for s in graph.storages if chance.random() < 0.5})  # type: ignore[attr-defined]
    assert without_needless_runs(graph, start) == start
