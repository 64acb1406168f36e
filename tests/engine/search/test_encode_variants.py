"""In which variants storages are encoded, on variants whose seconds are made up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shoal.core.plan import Plan
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.encoding import EncodeBelow, EncodeIfFaster, NotFaster
from shoal.engine.search.priced import Encodable, Priced
from shoal.errors import BudgetError
from shoal.planners.keep_all import keep_all
from tests.engine.search.made_up_variants import FUSED, InSeconds, kept_alone, taking
from tests.random_steps import HARDWARE


class Encoding(InSeconds):
    """Variants by their seconds, and by those with storages encoded; what needs infinitely many seconds does not fit.

    `bounds` are lower ones of the seconds with storages encoded: where none is given, of the variant with everything
    kept.
    """

    def __init__(
        self, encoded_seconds: dict[str, float], bounds: dict[str, float] | None = None, **seconds: tuple[float, float]
    ) -> None:
        super().__init__(**seconds)
        named = dict(zip(seconds, self.seconds, strict=True))
        self.bounds = {named[name]: bound for name, bound in (bounds or {}).items()}
        self.encoded_seconds = dict(zip(self.seconds, map(encoded_seconds.__getitem__, seconds), strict=True))
        self.asked_encoded: list[tuple[Variant, float]] = []

    def price(self, variant: Variant) -> Priced[None]:
        place = list(self.seconds).index(variant)

        def encoded(budget_bytes: int, encoding: EncodeIfFaster | EncodeBelow) -> tuple[None, Plan]:
            below_seconds = encoding.seconds if isinstance(encoding, EncodeBelow) else math.inf
            self.asked_encoded.append((variant, below_seconds))
            seconds = self.encoded_seconds[variant]
            if math.isinf(seconds):
                raise BudgetError("no plan fits", least_feasible_bytes=budget_bytes + 1)
            if seconds >= below_seconds:
                raise NotFaster
            return None, Plan(taking(seconds, place), {}, "joint")

        def refused(budget_bytes: int) -> tuple[None, Plan]:
            raise BudgetError("no plan fits", least_feasible_bytes=budget_bytes + 2)

        bound = self.bounds.get(variant, self.seconds[variant][0])
        priced = replace(super().price(variant), encoded=Encodable(lambda share: taking(bound, place), encoded))
        return replace(priced, plan=refused) if math.isinf(self.seconds[variant][1]) else priced


def test_storages_are_encoded_in_what_is_faster_kept_than_the_best_plan_and_only_a_faster_plan_counts() -> None:
    encoded = {"whole": 105.0, "bnff": 99.0, "icf": 90.0}
    candidates = Encoding(encoded, whole=(100.0, 110.0), bnff=(98.0, 108.0), icf=(109.0, 120.0))
    best = best_variant(candidates, candidates.price, 2**40, "")
    assert candidates.asked_encoded == [(FUSED, 108.0)], "then nothing is faster with everything kept"
    assert best.variant == FUSED and best.plan.predicted_seconds == pytest.approx(99.0)
    outcomes = {str(row.variant): (row.seconds, row.outcome) for row in best.plan.candidates}
    assert outcomes[str(FUSED)] == (pytest.approx(99.0), "chosen")
    candidates = Encoding(dict.fromkeys(encoded, 108.0), whole=(100.0, 110.0), bnff=(98.0, 108.0), icf=(107.0, 120.0))
    best = best_variant(candidates, candidates.price, 2**40, "")
    assert [variant for variant, _ in candidates.asked_encoded] == [FUSED, WHOLE], "two variants, where something fits"
    assert best.variant == FUSED and best.plan.predicted_seconds == pytest.approx(108.0)


def test_where_nothing_fits_exactly_each_variant_is_asked_until_one_fits_encoded() -> None:
    nothing = dict.fromkeys(("whole", "bnff", "icf"), math.inf)
    kept = {"whole": (100.0, math.inf), "bnff": (98.0, math.inf), "icf": (99.0, math.inf)}
    candidates = Encoding(nothing | {"icf": 130.0, "whole": 120.0}, **kept)
    best = best_variant(candidates, candidates.price, 2**40, "")
    assert [below for _, below in candidates.asked_encoded] == [math.inf, math.inf, 130.0]
    assert best.variant == WHOLE and best.plan.predicted_seconds == pytest.approx(120.0)
    candidates = Encoding(nothing, **kept)
    with pytest.raises(BudgetError) as refused:
        best_variant(candidates, candidates.price, 2**40, "")
    assert refused.value.least_feasible_bytes == 2**40 + 1


def test_a_variant_that_does_not_fit_exactly_is_encoded_only_where_its_bound_says_that_it_may_be_faster_so() -> None:
    seconds = {"whole": 110.0, "bnff": 107.0, "icf": 106.0}
    kept = {"whole": (100.0, 108.0), "bnff": (98.0, 110.0), "icf": (99.0, 112.0)}
    candidates = Encoding(seconds, {"bnff": 107.9, "icf": 104.0}, **kept)

    def price(variant: Variant) -> Priced[None]:
        priced = candidates.price(variant)
        too_large = kept_alone(2000 + len(str(variant)))
        first, *others = too_large.ops
        others = [replace(op, seconds=0.0) for op in others]
        slow = replace(too_large, ops=(replace(first, seconds=priced.graph.plain_seconds), *others))
        return priced if variant == WHOLE else replace(priced, graph=slow)

    best = best_variant(candidates, price, keep_all(kept_alone(1900), HARDWARE, 0).predicted_peak_bytes, "")
    icf = Variant(fuse="icf")
    assert candidates.asked == [WHOLE] and candidates.asked_encoded == [(icf, 108.0), (WHOLE, 106.0)]
    assert best.variant == icf


def test_where_nothing_fits_with_all_encoded_either_the_variant_that_needs_least_is_searched_alone() -> None:
    nothing = dict.fromkeys(("whole", "bnff", "icf"), math.inf)
    candidates = Encoding(nothing, whole=(9.0, math.inf), bnff=(9.0, math.inf), icf=(9.0, math.inf))
    sizes = {WHOLE: 1800, FUSED: 1000, Variant(fuse="icf"): 2000}

    def price(variant: Variant) -> Priced[None]:
        priced = candidates.price(variant)
        assert priced.encoded is not None
        encoded = kept_alone(sizes[variant] - 10)
        return replace(
            priced, graph=kept_alone(sizes[variant]), encoded=replace(priced.encoded, graph=lambda share: encoded)
        )

    with pytest.raises(BudgetError):
        best_variant(candidates, price, keep_all(kept_alone(1000), HARDWARE, 0).predicted_peak_bytes // 2, "")
    assert candidates.asked == [] and candidates.asked_encoded == [(FUSED, math.inf)]
