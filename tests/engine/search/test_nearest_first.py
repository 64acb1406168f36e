"""In which order variants that no bound expects to fit are asked: by made-up steps that keep everything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.step import StepGraph
from shoal.core.variant import Variant
from shoal.engine.search.nearest_first import PricedVariant, Way, nearest_first
from shoal.engine.search.priced import Priced
from shoal.planners import estimates
from shoal.planners.infeasible import fewest_bytes
from shoal.planners.keep_all import keep_all
from tests.random_steps import HARDWARE, conv_bn_relu_chain


def kept_alone(nbytes: int, seconds: float = 1.0) -> StepGraph:
    """A step of which nothing can be recomputed: what it needs is plain."""
    step = conv_bn_relu_chain(6, nbytes)
    return replace(step, ops=tuple(replace(op, recomputable=False, seconds=seconds) for op in step.ops))


def needed_bytes(step: StepGraph) -> int:
    return keep_all(step, HARDWARE, 0).predicted_peak_bytes


def ways(*steps: StepGraph, encoded: bool = False) -> list[Way[str, None]]:
    def plan(budget_bytes: int) -> None:
        raise AssertionError("nothing is planned")

    candidates = [
        PricedVariant(Variant(slices=place + 2), f"variant {place}", Priced(step, plan))
        for place, step in enumerate(steps)
    ]  # type: ignore[arg-type]
    return [Way(candidate, encoded, candidate.priced.graph) for candidate in candidates]


def order(found: list[Way[str, None]]) -> list[str]:
    return [way.candidate.graph for way in found]


def test_what_is_expected_to_fit_comes_first_the_fastest_of_it_and_then_what_needs_least() -> None:
    steps = [kept_alone(4000), kept_alone(1000, 2.0), kept_alone(3000), kept_alone(1200, 1.0)]
    found = nearest_first(ways(*steps), needed_bytes(steps[3]))
    assert order(found) == ["variant 3", "variant 1", "variant 2", "variant 0"]
    expected = [way.expected_bytes for way in found]
    assert all(nbytes <= needed_bytes(way.step) for nbytes, way in zip(expected, found, strict=True))


def test_of_the_same_step_the_way_that_may_encode_comes_first() -> None:
    step = kept_alone(1000)
    for budget_bytes in (needed_bytes(step), needed_bytes(step) // 2):
        found = nearest_first([*ways(step), *ways(step, encoded=True)], budget_bytes)
        assert [way.encoded for way in found] == [True, False]


def test_where_a_single_op_is_over_the_budget_what_a_variant_about_needs_counts() -> None:
    steps = [kept_alone(2000), kept_alone(1000)]
    found = nearest_first(ways(*steps), fewest_bytes(steps[1]) - 1)
    assert [way.expected_bytes for way in found] == [needed_bytes(step) for step in reversed(steps)]


def test_only_what_comes_near_the_lowest_is_estimated_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    closely: list[StepGraph] = []
    precise = estimates.least_peak_bytes
    monkeypatch.setattr(estimates, "least_peak_bytes", lambda step: closely.append(step) or precise(step))
    steps = [kept_alone(4000), kept_alone(1000), kept_alone(1100), kept_alone(2500)]
    nearest_first(ways(*steps), fewest_bytes(steps[0]))
    assert closely == [steps[1], steps[2]]
