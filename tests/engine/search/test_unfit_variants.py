"""Where no variant fits by its bound: which is searched, and what is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.priced import Priced, PricedVariant
from shoal.engine.search.search_state import SearchState
from shoal.engine.search.unfit_variants import Way, plan_unfit
from shoal.errors import BudgetError
from shoal.planners import estimates
from shoal.planners.infeasible import fewest_bytes, floor_bytes
from shoal.planners.keep_all import keep_all
from tests.engine.search.made_up_variants import FUSED, Many, OnPatches, Refusing
from tests.random_steps import HARDWARE, conv_bn_relu_chain

NOTHING_LEARNT = {False: 0.0, True: 0.0}


def kept_alone(nbytes: int, seconds: float = 1.0) -> StepGraph:
    """A step of which nothing can be recomputed: what it needs is plain."""
    step = conv_bn_relu_chain(6, nbytes)
    return replace(step, ops=tuple(replace(op, recomputable=False, seconds=seconds) for op in step.ops))


def needed_bytes(step: StepGraph) -> int:
    return keep_all(step, HARDWARE, 0).predicted_peak_bytes


def way(step: StepGraph, *, encoded: bool = False) -> Way[str, None]:
    def plan(budget_bytes: int) -> None:
        raise AssertionError("nothing is planned")

    return Way(PricedVariant(Variant(slices=2), "", Priced(step, plan)), encoded, step)  # type: ignore[arg-type]


def test_what_is_expected_to_fit_comes_first_the_fastest_of_it_and_then_what_needs_least() -> None:
    steps = [kept_alone(4000), kept_alone(1000, 2.0), kept_alone(3000), kept_alone(1200, 1.0)]
    budget_bytes = needed_bytes(steps[3])
    for closely in (False, True):
        ways = [way(step).estimated(budget_bytes, closely=closely) for step in steps]
        assert sorted(range(4), key=lambda n: ways[n].place(budget_bytes, NOTHING_LEARNT)) == [3, 1, 2, 0]
        assert all(one.expected_bytes <= needed_bytes(one.step) for one in ways)


def test_of_the_same_step_the_way_that_may_encode_comes_first() -> None:
    step = kept_alone(1000)
    for budget_bytes in (needed_bytes(step), needed_bytes(step) // 2):
        exact, encoded = (way(step, encoded=e).estimated(budget_bytes, closely=False) for e in (False, True))
        assert encoded.place(budget_bytes, NOTHING_LEARNT) < exact.place(budget_bytes, NOTHING_LEARNT)


def test_where_a_single_op_is_over_the_budget_what_a_variant_about_needs_counts() -> None:
    step = kept_alone(1000)
    found = way(step).estimated(fewest_bytes(step) - 1, closely=False)
    assert found.is_close and found.expected_bytes == needed_bytes(step)


def test_what_others_show_to_be_of_no_use_is_not_estimated_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rough estimate alone each might need less than the first is found to."""
    closely: list[StepGraph] = []
    precise = estimates.least_peak_bytes
    monkeypatch.setattr(estimates, "least_peak_bytes", lambda step: closely.append(step) or precise(step))
    steps = [kept_alone(nbytes) for nbytes in (1200, 1000, 1100)]
    budget_bytes = max(map(fewest_bytes, steps))
    assert budget_bytes < needed_bytes(steps[1]) and 0.75 * needed_bytes(steps[0]) < needed_bytes(steps[1])

    def refusing(step: StepGraph) -> Priced[None]:
        def plan(budget_bytes: int) -> None:
            raise BudgetError("no plan fits", least_feasible_bytes=needed_bytes(step))

        return Priced(step, plan)  # type: ignore[arg-type]

    variants = [Variant(slices=n + 2) for n in range(3)]
    state: SearchState[str, None] = SearchState(budget_bytes)
    state.unfit = [PricedVariant(one, "", refusing(step)) for one, step in zip(variants, steps, strict=True)]
    plan_unfit(state, lambda variant: False, for_the_minimum=True)
    assert closely == [steps[1], steps[2]] and list(state.refused) == [(variants[1], False)]


def test_the_least_of_every_variant_is_told_whichever_it_is() -> None:
    for least in ("whole", "bnff", "icf"):
        candidates = Refusing(**{name: 10**9 - (name == least) for name in ("whole", "bnff", "icf")})
        with pytest.raises(BudgetError) as refused:
            best_variant(candidates, candidates.price, 1, "")
        assert refused.value.least_feasible_bytes == 10**9 - 1
        assert ("variant with the minimum" in refused.value.details) == (least != "whole")
        assert sorted(map(str, candidates.asked)) == sorted(map(str, candidates.needed_bytes))


def test_a_variant_whose_ops_alone_need_more_than_another_variant_is_not_asked() -> None:
    candidates = Refusing(whole=1001, bnff=1, icf=1)
    with pytest.raises(BudgetError) as refused:
        best_variant(candidates, candidates.price, 1, "")
    assert candidates.asked == [WHOLE] and refused.value.least_feasible_bytes == 1001


def test_of_many_ops_a_budget_below_what_stays_in_every_variant_is_refused_before_another_variant_is_captured() -> None:
    candidates = Many(whole=1, bnff=1)
    with pytest.raises(BudgetError):
        best_variant(candidates, candidates.price, floor_bytes(candidates.step) - 1, "")
    assert candidates.captured == [WHOLE] and not candidates.asked
    with pytest.raises(BudgetError):
        best_variant(candidates, candidates.price, floor_bytes(candidates.step), "")
    assert FUSED in candidates.captured and candidates.asked


def test_where_nothing_fits_patches_become_finer_while_they_need_less_and_one_variant_is_searched() -> None:
    million = 10**6
    candidates = OnPatches(
        9 * million, 5 * million, 5 * million, million
    )  # 3 x 3 need what 2 x 2 do: 4 x 4 are not tried
    with pytest.raises(BudgetError) as refused:
        best_variant(candidates, candidates.price, 1, "")
    _, two, three, _ = candidates.held_bytes
    assert candidates.captured == [WHOLE, two, three] and candidates.asked == [two]
    assert refused.value.least_feasible_bytes == 5 * million
