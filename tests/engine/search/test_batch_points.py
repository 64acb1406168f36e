"""The laws of images per second by batch, on steps only of counts, held against planning every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from examples.planners.sqrt import sqrt
from shoal.core.plan import Plan
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Candidate
from shoal.engine.search.batch_points import FoundBatches, batch_points
from shoal.engine.search.max_batch import largest_fitting, one_per_cent
from shoal.errors import BudgetError, CaptureError
from shoal.planners.estimates import least_seconds
from tests.random_steps import HARDWARE, conv_bn_relu_chain


class Batches:
    """Stands for `PlansByBatch`: all but parameters and their gradients grow with the images."""

    def __init__(self, graph: StepGraph, budget_bytes: int, fewest: int = 1) -> None:
        self.graph, self.budget_bytes, self.fewest = graph, budget_bytes, fewest
        self.asked: list[int] = []

    def step(self, batch: int) -> StepGraph:
        storages = (
            s if s.kind in ("parameter", "gradient") else replace(s, nbytes=batch * s.nbytes)
            for s in self.graph.storages
        )
        ops = (replace(op, seconds=1e-3 + batch * op.seconds) for op in self.graph.ops)
        return replace(self.graph, storages=tuple(storages), ops=tuple(ops))

    def __call__(self, batch: int) -> Plan:
        self.asked.append(batch)
        if batch < self.fewest:
            raise CaptureError("too few for a batch norm")
        step = self.step(batch)
        plain, bound = simulate(step, {}), least_seconds(step, self.budget_bytes)
        row = Candidate(WHOLE, len(step.ops), plain.seconds, plain.peak_bytes, bound, None, None, "chosen")
        return replace(sqrt(step, HARDWARE, self.budget_bytes), candidates=(row,))

    def fitting_bytes(self, batch: int) -> int:
        if batch < self.fewest:
            raise CaptureError("too few for a batch norm")
        return sqrt(self.step(batch), HARDWARE, self.budget_bytes).predicted_peak_bytes

    def largest(self, trying: Callable[[int], object], *, fits: Callable[[int], int]) -> tuple[int, int]:
        return largest_fitting(fits, 0, self.budget_bytes, first=16, trying=trying)


def every(batches: Batches) -> dict[int, Plan]:
    """The plan of every batch that fits."""
    plans: dict[int, Plan] = {}
    for batch in range(1, 1000):
        try:
            plans[batch] = batches(batch)
        except BudgetError:
            break
    return plans


def checked(batches: Batches, n_points: int) -> FoundBatches:
    found = batch_points(batches, n_points)
    assert len(batches.asked) == len(set(batches.asked))  # none twice
    plans = every(batches)
    assert [point.batch for point in found.points] == sorted({point.batch for point in found.points})
    assert found.points[-1].batch == max(plans) and found.points[0].batch == 1
    for point in found.points:
        plan, plain = plans[point.batch], simulate(batches.step(point.batch), {})
        assert (point.seconds, point.predicted_peak_bytes) == (plan.predicted_seconds, plan.predicted_peak_bytes)
        assert point.images_per_second == point.batch / plan.predicted_seconds
        assert point.images_per_second <= point.bound_images_per_second * (1 + 1e-6)
        assert (point.plain_seconds, point.plain_peak_bytes) == (plain.seconds, plain.peak_bytes)
        assert (point.plain_images_per_second is None) == (plain.peak_bytes > batches.budget_bytes)
    for batch, reason in found.unfit:
        assert batch not in plans and reason.startswith("needs ")
    best = max(found.points, key=lambda point: point.images_per_second)
    for batch in range(best.batch - one_per_cent(best.batch), best.batch + one_per_cent(best.batch) + 1):
        if batch in plans:  # its neighbours are no better
            assert batch / plans[batch].predicted_seconds <= best.images_per_second
    return found


@settings(max_examples=6)
@given(st.integers(2, 6), st.integers(1, 25), st.integers(2, 6))
def test_the_laws(layers: int, batch: int, n_points: int) -> None:
    chain = conv_bn_relu_chain(layers)
    budget_bytes = simulate(Batches(chain, 0).step(batch), {}).peak_bytes
    checked(Batches(chain, budget_bytes), n_points)


def test_where_there_are_as_many_points_as_batches_the_best_is_the_best_of_all() -> None:
    chain = conv_bn_relu_chain(4)
    batches = Batches(chain, simulate(Batches(chain, 0).step(6), {}).peak_bytes)
    found = checked(batches, 100)
    plans = every(batches)
    assert [point.batch for point in found.points] == list(plans)
    rates = {batch: batch / plan.predicted_seconds for batch, plan in plans.items()}
    best = max(found.points, key=lambda point: point.images_per_second)
    assert best.batch == max(rates, key=rates.__getitem__) and best.batch > 1  # a step has a constant part


def test_batches_are_evenly_spaced_or_near_one_that_is_known() -> None:
    chain = conv_bn_relu_chain(3)
    found = batch_points(Batches(chain, simulate(Batches(chain, 0).step(60), {}).peak_bytes), 6)
    largest = found.points[-1].batch
    gaps = [b.batch - a.batch for a, b in pairwise(found.points)]
    assert max(gaps) <= 1.5 * (largest - 1) / 5 + 1


def test_a_batch_too_small_for_the_network_is_told_and_the_others_are_there() -> None:
    chain = conv_bn_relu_chain(3)
    said: list[str] = []
    batches = Batches(chain, simulate(Batches(chain, 0).step(9), {}).peak_bytes, fewest=3)
    found = batch_points(batches, 4, said.append)
    assert (1, "too few for a batch norm") in found.unfit and found.points[0].batch >= 3
    assert said[0] == "the largest batch: 16 images" and "1 images" in said
