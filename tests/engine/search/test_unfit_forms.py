"""Where no form fits by its bound: which is searched, and what is told."""

from __future__ import annotations

import pytest

from shoal.core.variant import WHOLE
from shoal.engine.search.best_variant import best_variant
from shoal.errors import BudgetError
from shoal.planners.infeasible import floor_bytes
from tests.engine.search.made_up_forms import FUSED, Many, OnPatches, Refusing


def test_the_least_of_every_form_is_told_whichever_it_is() -> None:
    for least in ("whole", "bnff", "icf"):
        forms = Refusing(**{name: 10**9 - (name == least) for name in ("whole", "bnff", "icf")})
        with pytest.raises(BudgetError) as refused:
            best_variant(forms, forms.price, 1, "")
        assert refused.value.least_feasible_bytes == 10**9 - 1
        assert ("variant with the minimum" in refused.value.details) == (least != "whole")
        assert sorted(map(str, forms.asked)) == sorted(map(str, forms.needed_bytes))


def test_a_form_whose_ops_alone_need_more_than_another_form_is_not_asked() -> None:
    forms = Refusing(whole=1001, bnff=1, icf=1)
    with pytest.raises(BudgetError) as refused:
        best_variant(forms, forms.price, 1, "")
    assert forms.asked == [WHOLE] and refused.value.least_feasible_bytes == 1001


def test_of_many_ops_a_budget_below_what_stays_in_every_form_is_refused_before_another_form_is_captured() -> None:
    forms = Many(whole=1, bnff=1)
    with pytest.raises(BudgetError):
        best_variant(forms, forms.price, floor_bytes(forms.step) - 1, "")
    assert forms.captured == [WHOLE] and not forms.asked
    with pytest.raises(BudgetError):
        best_variant(forms, forms.price, floor_bytes(forms.step), "")
    assert FUSED in forms.captured and forms.asked


def test_where_nothing_fits_patches_become_finer_while_they_need_less_and_one_form_is_searched() -> None:
    million = 10**6
    forms = OnPatches(9 * million, 5 * million, 5 * million, million)  # 3 x 3 need what 2 x 2 do: 4 x 4 are not tried
    with pytest.raises(BudgetError) as refused:
        best_variant(forms, forms.price, 1, "")
    _, two, three, _ = forms.held_bytes
    assert forms.captured == [WHOLE, two, three] and forms.asked == [two]
    assert refused.value.least_feasible_bytes == 5 * million
