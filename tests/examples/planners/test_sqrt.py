"""Evenly cut checkpointing: the textbook bounds, and an honest answer when nothing fits."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt
from math import sqrt as root

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.planners.sqrt import evenly_cut, keep_everything, numbers_of_segments, sqrt
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError
from shoal.planners.keep_all import keep_all
from tests.random_steps import HARDWARE, conv_bn_relu_chain, plain_chain, steps


@pytest.mark.parametrize("layers", [25, 64, 100])
def test_a_chain_needs_two_roots_of_its_layers(layers: int) -> None:
    graph = plain_chain(layers, nbytes=1000)
    fixed_bytes = 5 * 1000  # the batch, the output, its gradient and two errors
    plan = sqrt(graph, HARDWARE, fixed_bytes + round(2 * root(layers) * 1000) + 1000)
    assert 0 < plan.added_seconds <= layers  # at most one more forward pass of a second a layer


def test_each_storage_comes_back_at_most_once() -> None:
    graph = conv_bn_relu_chain(16)
    for residences in (found.residences for found in evenly_cut(graph)):
        again = [run.op for run in schedule(graph, residences) if run.again and graph.ops[run.op].target == "conv"]
        assert len(again) == len(set(again))


def test_more_segments_than_the_root_are_tried() -> None:
    graph = plain_chain(36)
    kept = {sum(type(r).__name__ == "Keep" for r in found.residences.values()) for found in evenly_cut(graph)}
    assert set(range(isqrt(36))) <= kept


@given(steps(), st.floats(0, 1))
def test_every_plan_passes_the_check_within_its_budget(graph: StepGraph, share: float) -> None:
    peaks = [found.peak_bytes for found in (keep_everything(graph), *evenly_cut(graph))]
    budget = min(peaks) + round(share * (max(peaks) - min(peaks)))
    plan = sqrt(graph, HARDWARE, budget)
    assert check_runs(graph, plan.residences, schedule(graph, plan.residences), budget) == plan.predicted_peak_bytes


def test_where_everything_fits_nothing_is_recomputed() -> None:
    graph = conv_bn_relu_chain(4)
    plain = keep_all(graph, HARDWARE, 1 << 60)
    assert sqrt(graph, HARDWARE, plain.predicted_peak_bytes).added_seconds == 0


def test_an_infeasible_budget_names_the_peak_and_what_fills_it() -> None:
    graph = conv_bn_relu_chain(16)
    with pytest.raises(BudgetError) as caught:
        sqrt(graph, HARDWARE, 4000)
    error = caught.value
    message = str(error)
    assert "conv_bn_relu_chain_16" in message and "4000 bytes" in message
    assert str(error.least_feasible_bytes) in message
    assert error.op in message and error.layer in message
    assert len(error.largest) == 3
    for name, layer, nbytes in error.largest:
        assert name in str(error) and layer in str(error) and nbytes == 1000


def test_a_budget_under_the_parameters_says_that_activations_cannot_help() -> None:
    graph = conv_bn_relu_chain(4)
    with pytest.raises(BudgetError):
        sqrt(graph, HARDWARE, graph.resident_bytes)


def test_of_many_numbers_of_segments_as_many_as_a_schedule_each_is_worth_are_tried() -> None:
    assert numbers_of_segments(16) == list(range(1, 17))
    for most in (17, 40, 130, 1000):
        numbers = numbers_of_segments(most)
        assert numbers[:2] == [1, 2] and numbers[-1] == most and len(numbers) <= 16
        assert all(later <= 1.7 * earlier for earlier, later in pairwise(numbers[1:]))
