"""The laws of a frontier, on random steps whose variants are random steps too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.capture.layered import Refused
from shoal.core.plan import Plan
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.encoding import EncodeBelow, EncodeIfFaster, NotFaster
from shoal.engine.search.frontier_points import FoundPoints, frontier_points
from shoal.engine.search.priced import Encodable, Priced
from shoal.engine.search.search_state import WORTH_A_PLAN
from shoal.engine.search.split_variants import PatchWork
from shoal.errors import BudgetError
from shoal.planners.joint import joint
from tests.random_steps import HARDWARE, conv_bn_relu_chain, steps

FUSED, PATCHES = Variant(fuse="bnff"), Variant(depth=0.5, grid=(2, 2))
FUSED_BUT_FOR_LARGE = Variant(fuse="bnff", up_to=0.5)


@dataclass
class AnyVariants:
    """Stands for `Variants`: a variant's graph is its name."""

    steps: Mapping[Variant, StepGraph]

    def of_norms(self) -> Iterator[Variant]:
        return (variant for variant in self.steps if variant.fuse and variant.up_to == 1)

    def of_smaller_maps(self, fused: Variant) -> Iterator[Variant]:
        return (variant for variant in self.steps if variant.fuse == fused.fuse and variant.up_to < 1)

    def split(self) -> Iterator[Variant]:
        return (variant for variant in self.steps if variant.depth)

    def of_fewer_layers(self, sliced: Variant) -> Iterator[Variant]:
        return iter(())

    def work(self, variant: Variant) -> PatchWork:
        return PatchWork(0.0, 1)

    def graph(self, variant: Variant) -> Any:
        if variant not in self.steps:
            raise Refused("fused and in parts at once")
        return variant

    def price(self, variant: Any) -> Priced[None]:
        return Priced(
            self.steps[variant], lambda budget_bytes: (None, joint(self.steps[variant], HARDWARE, budget_bytes))
        )


def found(candidates: AnyVariants, n_points: int = 5, budget_bytes: int | None = None) -> FoundPoints:
    return frontier_points(candidates, candidates.price, n_points, budget_bytes)  # type: ignore[arg-type]


@settings(max_examples=12)
@given(steps(), steps(), steps(), st.integers(2, 6), st.integers(1, 2000))
def test_the_laws(whole: StepGraph, fused: StepGraph, fewer: StepGraph, n_points: int, budget_bytes: int) -> None:
    candidates = AnyVariants({WHOLE: whole, FUSED: fused, FUSED_BUT_FOR_LARGE: fewer})
    frontier = found(candidates, n_points, budget_bytes)
    points, plain = frontier.points, simulate(whole, {})
    assert (frontier.plain_peak_bytes, frontier.plain_seconds) == (plain.peak_bytes, plain.seconds)
    assert [point.budget_bytes for point in points] == sorted({point.budget_bytes for point in points})
    assert points[-1].budget_bytes == plain.peak_bytes
    for smaller, larger in pairwise(points):
        assert larger.seconds <= smaller.seconds
    for point in points:
        assert point.predicted_peak_bytes <= point.budget_bytes
        assert point.bound_seconds <= point.seconds * (1 + 1e-6)
        for step in (whole, fused):  # neither by itself is much faster; fewer are fused only if all do not fit
            try:
                alone = joint(step, HARDWARE, point.budget_bytes)
            except BudgetError:
                continue
            assert (1 - WORTH_A_PLAN) * point.seconds <= alone.predicted_seconds
    if points[0].budget_bytes < budget_bytes < points[-1].budget_bytes:
        assert budget_bytes in [point.budget_bytes for point in points]


@settings(max_examples=6)
@given(steps())
def test_the_first_point_is_what_the_planner_calls_the_least(whole: StepGraph) -> None:
    with pytest.raises(BudgetError) as refused:
        joint(whole, HARDWARE, 1)
    assert found(AnyVariants({WHOLE: whole})).points[0].budget_bytes == refused.value.least_feasible_bytes


def test_budgets_are_evenly_spaced_and_the_users_is_one_more() -> None:
    candidates = AnyVariants({WHOLE: conv_bn_relu_chain(4)})
    budgets = [point.budget_bytes for point in found(candidates).points]
    gaps = {b - a for a, b in pairwise(budgets)}
    assert len(budgets) == 5 and max(gaps) - min(gaps) <= 1
    mine = budgets[1] + 3
    assert [point.budget_bytes for point in found(candidates, 5, mine).points] == sorted([*budgets, mine])
    assert found(candidates, 5, budgets[0] - 1) == found(candidates)


def test_where_the_smallest_budget_takes_more_than_twice_the_step_a_little_more_is_planned_too() -> None:
    step = conv_bn_relu_chain(5)
    plain = simulate(step, {})
    least, *more = found(AnyVariants({WHOLE: step}), 3).points
    assert least.seconds > 2 * plain.seconds
    assert [point.budget_bytes for point in more[:3]] == [int(n * least.budget_bytes / 100) for n in (102, 110, 130)]
    assert all(after.seconds <= before.seconds for before, after in pairwise([least, *more]))


def test_where_a_faster_variant_keeps_everything_in_less_budgets_are_spaced_below_that() -> None:
    whole, fused = conv_bn_relu_chain(4), conv_bn_relu_chain(3)
    *spaced, last = (point.budget_bytes for point in found(AnyVariants({WHOLE: whole, FUSED: fused})).points)
    assert last == simulate(whole, {}).peak_bytes > spaced[-1] == simulate(fused, {}).peak_bytes
    gaps = {b - a for a, b in pairwise(spaced)}
    assert len(spaced) == 4 and max(gaps) - min(gaps) <= 1


def test_each_variant_is_priced_once_and_a_variant_that_changes_nothing_is_none() -> None:
    step = conv_bn_relu_chain(3)
    candidates = AnyVariants({WHOLE: step, FUSED: step})
    priced: list[Variant] = []

    def price(variant: Any) -> Priced[None]:
        priced.append(variant)
        return candidates.price(variant)

    points = frontier_points(candidates, price, 6).points  # type: ignore[arg-type]
    assert priced == [WHOLE, FUSED] and {point.variant for point in points} == {WHOLE}


def test_what_cannot_be_captured_is_left_out_and_says_why() -> None:
    class Refusing(AnyVariants):
        def graph(self, variant: Variant) -> Any:
            if variant.fuse:
                raise Refused("no batch norm can be fused")
            return variant

        def work(self, variant: Variant) -> PatchWork:
            return PatchWork(0.0, 10_000)

    step = conv_bn_relu_chain(3)
    frontier = found(Refusing({WHOLE: step, FUSED: step, PATCHES: step}))
    (fused, why), (patches, too_many) = frontier.left_out
    assert (fused, why, patches) == (str(FUSED), "no batch norm can be fused", str(PATCHES))
    assert "too many to plan" in too_many


def test_storages_are_encoded_in_at_most_two_variants_inside_a_budget_and_only_below_what_is_known() -> None:
    """Three variants that encode at no cost: a plan of theirs takes what keeping everything does."""
    names = (WHOLE, FUSED, FUSED_BUT_FOR_LARGE)
    candidates = AnyVariants({variant: conv_bn_relu_chain(4 + place, 1000) for place, variant in enumerate(names)})
    asked: list[tuple[Variant, int, float]] = []

    def price(variant: Any) -> Priced[None]:
        step = candidates.steps[variant]
        free = replace(step, storages=tuple(replace(s, nbytes=min(s.nbytes, 400)) for s in step.storages))

        def encoded(budget_bytes: int, encoding: EncodeIfFaster | EncodeBelow) -> tuple[None, Plan]:
            below_seconds = encoding.seconds if isinstance(encoding, EncodeBelow) else math.inf
            asked.append((variant, budget_bytes, below_seconds))
            plan = joint(free, HARDWARE, budget_bytes)
            if plan.predicted_seconds >= below_seconds:
                raise NotFaster
            return None, plan

        return replace(candidates.price(variant), encoded=Encodable(lambda share: free, encoded))

    exact = found(candidates)
    lossy = frontier_points(candidates, price, 5)  # type: ignore[arg-type]
    for budget_bytes in {budget for _, budget, _ in asked if budget > 1}:
        below = [seconds for _, budget, seconds in asked if budget == budget_bytes]
        assert len(below) <= 2 and below == sorted(below, reverse=True)
    assert lossy.points[0].budget_bytes < exact.points[0].budget_bytes
    for point in lossy.points:
        assert point.bound_seconds <= point.seconds * (1 + 1e-6)
        inside = [other.seconds for other in exact.points if other.budget_bytes <= point.budget_bytes]
        assert not inside or point.seconds <= min(inside)
