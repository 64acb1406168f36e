"""Where no variant fits by its bound: which is searched, and what is told."""

from __future__ import annotations

import pytest

from shoal.core.variant import WHOLE
from shoal.engine.search.best_variant import best_variant
from shoal.errors import BudgetError
from shoal.planners.infeasible import floor_bytes
from tests.engine.search.made_up_variants import FUSED, Many, OnPatches, Refusing


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
