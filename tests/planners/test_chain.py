"""The dynamic program: within every budget, monotone, and as good as what is known to be best."""

from __future__ import annotations

from functools import cache
from itertools import chain as chained
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds, simulate
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError
from shoal.planners.chain import chain, frontier, smallest_peak
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_all import keep_all
from tests.random_steps import HARDWARE, Builder, conv_bn_relu_chain, plain_chain, steps

SHARES = (1.0, 0.8, 0.66, 0.5, 0.4, 0.33, 0.25, 0.2)


def _best_of_every_choice(graph: StepGraph) -> list[tuple[int, float]]:
    """(peak, seconds) of every set of storages to keep, everything else recomputed once."""
    free = [s.id for s in graph.storages if s.kind == "activation"]
    subsets = chained.from_iterable(combinations(free, k) for k in range(len(free) + 1))
    return [peak_and_seconds(graph, schedule(graph, just_in_time(graph, kept))) for kept in subsets]


@given(steps(), st.floats(0, 1))
def test_every_plan_passes_the_check_within_its_budget(graph: StepGraph, share: float) -> None:
    least = smallest_peak(graph, HARDWARE).predicted_peak_bytes
    plain = simulate(graph, {}).peak_bytes
    budget = least + round(share * (plain - least))
    plan = chain(graph, HARDWARE, budget)
    runs = schedule(graph, plan.residences)
    assert check_runs(graph, plan.residences, runs, budget) == plan.predicted_peak_bytes <= budget


@given(steps())
def test_more_bytes_never_make_a_step_slower(graph: StepGraph) -> None:
    plans = frontier(graph)
    budgets = sorted({p.peak_bytes + extra for p in plans for extra in (0, 1, 7)})
    seconds = [chain(graph, HARDWARE, budget).predicted_seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)


@given(steps())
def test_below_the_least_peak_it_says_so(graph: StepGraph) -> None:
    least = smallest_peak(graph, HARDWARE).predicted_peak_bytes
    with pytest.raises(BudgetError) as caught:
        chain(graph, HARDWARE, least - 1)
    assert caught.value.least_feasible_bytes == least
    assert caught.value.budget_bytes == least - 1
    assert chain(graph, HARDWARE, least).predicted_peak_bytes <= least


@st.composite
def conv_chains(draw: st.DrawFn) -> StepGraph:
    b = Builder()
    x = b.input(draw(st.integers(1, 50)) * 100)
    for _ in range(draw(st.integers(2, 6))):
        x = b.conv(
            x,
            draw(st.integers(1, 50)) * 100,
            draw(st.integers(1, 9)),
            workspace_bytes=draw(st.integers(0, 20)) * 100,
            weight_bytes=draw(st.integers(0, 9)) * 100,
        )
    return b.step(x)


@given(conv_chains())
def test_on_a_small_chain_no_choice_of_what_to_keep_is_better(graph: StepGraph) -> None:
    plain = simulate(graph, {}).peak_bytes
    found = frontier(graph)
    for peak, seconds in _best_of_every_choice(graph):
        if peak <= plain:
            # The program counts bytes in slots of 1/400 of the plain peak: a plan may need a few slots more.
            allowed = peak + plain // 50
            assert min(p.seconds for p in found if p.peak_bytes <= allowed) <= seconds + 1e-9


def _advances(length: int, slots: int) -> float:
    """Revolve's count: fewest recomputations that give a chain's `length` states in reverse from its start."""

    @cache
    def again(length: int, slots: int) -> float:
        if not length:
            return 0
        if not slots:
            return float("inf")
        return min(k + again(length - k, slots - 1) + again(k - 1, slots) for k in range(1, length + 1))

    @cache
    def first(length: int, slots: int) -> float:
        if not length:
            return 0
        if not slots:
            return float("inf")
        return min(first(length - k, slots - 1) + again(k - 1, slots) for k in range(1, length + 1))

    return first(length, slots)


@pytest.mark.parametrize("layers", [4, 9, 16])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_on_equal_layers_it_is_no_worse_than_revolve(layers: int, slots: int) -> None:
    graph = plain_chain(layers, nbytes=1000, seconds=1.0)
    # In addition to the states: the batch, the output, its gradient, and the two errors of a layer's backward op.
    budget = min((5 + slots) * 1000, simulate(graph, {}).peak_bytes)
    plan = chain(graph, HARDWARE, budget)
    assert plan.added_seconds <= _advances(layers - 1, slots) + 1e-9
    # One slot more is free before the first error exists; two more would be cheating.
    assert plan.added_seconds >= _advances(layers - 1, slots + 1) - 1e-9


def test_a_chain_of_conv_bn_relu_fits_in_a_fifth() -> None:
    graph = conv_bn_relu_chain(16)
    plain = keep_all(graph, HARDWARE, 1 << 60)
    least = smallest_peak(graph, HARDWARE)
    assert least.predicted_peak_bytes < 0.2 * plain.predicted_peak_bytes
    # The ReLUs come back from the kept convolutions at almost no cost: half the saved bytes.
    half = chain(graph, HARDWARE, round(0.6 * plain.predicted_peak_bytes))
    assert half.added_seconds < 0.05 * plain.predicted_seconds
    recomputed = {graph.ops[graph.producer[s.id]].target for s in half.recomputed}
    assert "conv" not in recomputed


def test_a_step_without_a_forward_pass_is_planned_too() -> None:
    b = Builder()
    graph = b.step(b.conv(b.input(4), 4))
    assert chain(graph, HARDWARE, 1 << 20).added_seconds == 0
