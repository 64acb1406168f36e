"""Lowering a plan's peak by changing when what fills it is alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.residence import Recompute, Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds, simulate
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import DEFAULT, Effort, Guard
from shoal.planners.local_search import local_search
from tests.random_steps import Builder, plain_chain, steps


@given(steps(), st.floats(0.4, 0.99))
def test_what_it_returns_fits_and_passes_the_independent_check(graph: StepGraph, share: float) -> None:
    start = just_in_time(graph, ())
    budget_bytes = int(share * peak_and_seconds(graph, schedule(graph, start))[0])
    lower = local_search(graph, start, budget_bytes)
    if lower is not None:
        assert check_runs(graph, lower, schedule(graph, lower), budget_bytes) <= budget_bytes


def test_a_plan_that_fits_stays_as_it_is() -> None:
    graph = plain_chain(5)
    start = just_in_time(graph, ())
    assert local_search(graph, start, 1 << 40) == start


def test_a_chain_goes_down_to_what_its_largest_op_needs() -> None:
    graph = plain_chain(8)
    start = just_in_time(graph, ())
    peak_bytes, _ = peak_and_seconds(graph, schedule(graph, start))
    one = graph.storages[graph.ops[0].writes[0]].nbytes
    assert local_search(graph, start, peak_bytes - 2 * one) is not None
    assert local_search(graph, start, graph.resident_bytes) is None


def test_what_would_come_back_beside_an_unfolded_gradient_comes_back_before_it() -> None:
    b = Builder()
    wide = b.conv(b.input(10), 2000)
    narrow = b.forward("mean", (wide,), [("out", 1000)], 1.0)[0]
    pooled = b.pool(b.batchnorm(narrow), 250)
    graph = b.step(b.conv(pooled, 1))
    start = just_in_time(graph, {s.id for s in graph.storages} - {wide, narrow})
    peak_bytes, seconds = peak_and_seconds(graph, schedule(graph, start))
    lower = local_search(graph, start, peak_bytes - 1)
    assert lower is not None
    places = [(_before(graph, residences, wide), _before(graph, residences, narrow)) for residences in (start, lower)]
    assert places == [("bn_backward", "bn_backward"), ("pool_backward", "pool_backward")]
    assert peak_and_seconds(graph, schedule(graph, lower)) == (peak_bytes - 500, seconds)


def _before(graph: StepGraph, residences: Mapping[str, Residence], storage: int) -> str:
    residence = residences[graph.storages[storage].name]
    assert isinstance(residence, Recompute)
    (name,) = residence.before
    return next(op.target for op in graph.ops if op.name == name)


def test_a_search_that_will_not_arrive_ends_early_and_one_that_will_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = plain_chain(40)
    variable_bytes = simulate(graph, {}).peak_bytes - graph.resident_bytes
    for share, arrives in ((0.3, False), (0.8, True)):
        spent = []
        for enough in (6, 10**6):
            monkeypatch.setattr("shoal.planners.local_search._ENOUGH_CHANGES", enough)
            effort = Effort("local search", 10**9, Guard(600))
            budget_bytes = graph.resident_bytes + int(share * variable_bytes)
            found = local_search(graph, {}, budget_bytes, replace(DEFAULT, max_drops=12), effort)
            assert (found is not None) == arrives
            spent.append(10**9 - effort.left_ops)
        assert (spent[0] == spent[1]) == arrives
        assert arrives or spent[0] < 0.6 * spent[1]
