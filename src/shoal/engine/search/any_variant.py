"""Whether a step fits a budget in any variant: what a search for the largest batch asks of one batch after another.

No variant is planned for its seconds. Each is estimated by plans that recompute on demand, which mostly are within some
percent of the smallest; of steps of many ops only the variant that comes nearest is searched for a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic

from shoal.capture.layered import Refused
from shoal.core.over_budget import over_budget
from shoal.core.sizes import MAX_BYTES
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.priced import Made, Priced, PricedVariant, captured_variant
from shoal.engine.search.search_state import SearchState
from shoal.engine.search.unfit_variants import Way
from shoal.engine.search.variants import AnyVariants, Graph
from shoal.engine.search.worth_capturing import WorthCapturing
from shoal.errors import BudgetError
from shoal.planners.estimates import about_least_bytes, quick_least
from shoal.planners.infeasible import fewest_bytes, is_hopeless

_FEW_OPS = 200  # of a variant that is searched even where another one comes nearer


@dataclass(frozen=True)
class Fitting:
    """A plan that fits.

    Attributes:
        peak_bytes: its peak.
        place: of its variant, among those that a step like this has.
    """

    peak_bytes: int
    place: int


def any_variant(
    variants: AnyVariants[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int, name: str, likely: int = 0
) -> Fitting:
    """The first plan that is found to fit, in whatever variant.

    Args:
        variants, price, budget_bytes, name: as of `best_variant`; what is priced has `Priced.smallest`.
        likely: the place of the variant that is asked first.

    Raises:
        BudgetError: none was found; it names the lowest peak of those that were.
        CaptureError: the step cannot be captured as it is.
    """
    return _AnyVariantSearch(variants, price, budget_bytes).find(name, likely)


def smallest_variant(
    variants: AnyVariants[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int
) -> Variant:
    """The variant of the first plan that is found to fit; if none fits, that of the lowest peak."""
    search = _AnyVariantSearch(variants, price, budget_bytes)
    found = MAX_BYTES, WHOLE
    for peak in search.peaks(0):
        found = min(found, peak, key=lambda one: one[0])
        if peak[0] <= budget_bytes:
            break
    return found[1]


class _AnyVariantSearch(Generic[Graph, Made]):
    """Captures variants until one fits."""

    def __init__(self, variants: AnyVariants[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int) -> None:
        self._variants, self._price = variants, price
        parts = list(variants.split())
        self._norms = list(variants.of_norms())
        self._all = [
            WHOLE,
            *(one for one in parts if one.slices),
            *self._norms,
            *(one for one in parts if not one.slices),
        ]
        self._state: SearchState[Graph, Made] = SearchState(budget_bytes)
        self._worth = WorthCapturing(self._state)
        self._ways: list[Way[Graph, Made]] = []

    def find(self, name: str, likely: int) -> Fitting:
        """As `any_variant`."""
        budget_bytes, least_bytes = self._state.budget_bytes, MAX_BYTES
        for peak_bytes, variant in self.peaks(likely):
            least_bytes = min(least_bytes, peak_bytes)
            if self._state.fits(peak_bytes):
                return Fitting(peak_bytes, self._all.index(replace(variant, pieces=(), shrunk=False)))
        details = {"searched": "not in full"}
        raise over_budget(name, least_bytes, budget_bytes, details=details)

    def peaks(self, likely: int) -> Iterator[tuple[int, Variant]]:
        """The peaks of plans, of one variant after another, and of each the quickest to be found first."""
        first = self._all[likely] if likely < len(self._all) else WHOLE
        if first != WHOLE:
            yield from self._quick(first)
        yield from self._quick(WHOLE)
        if is_hopeless(self._state.whole, self._state.budget_bytes):
            return
        for variant in self._all[1:]:
            if variant != first and self._is_worth_capturing(variant):
                yield from self._quick(variant)
        yield from self._searched()

    def _quick(self, variant: Variant) -> Iterator[tuple[int, Variant]]:
        """Of plans that are found in a moment."""
        ways = []
        for candidate in self._with_what_needs_less(variant):
            about_bytes = about_least_bytes(candidate.priced.graph)
            ways.append(Way(candidate, False, candidate.priced.graph, found_bytes=about_bytes))
            yield about_bytes, candidate.variant
        for way in sorted(ways, key=lambda way: way.found_bytes):
            least = quick_least(way.step, self._state.budget_bytes)
            yield least.found_bytes, way.candidate.variant
            expected_bytes = least.expected_bytes if way.step.link is None else fewest_bytes(way.step)
            self._ways.append(replace(way, expected_bytes=expected_bytes, found_bytes=least.found_bytes))

    def _searched(self) -> Iterator[tuple[int, Variant]]:
        """Of the smallest plans, where they are expected to fit."""
        may_fit = [way for way in self._ways if self._state.fits(way.expected_bytes)]
        for n, way in enumerate(sorted(may_fit, key=lambda way: way.found_bytes)):
            if n == 0 or len(way.step.ops) <= _FEW_OPS:
                assert way.candidate.priced.smallest is not None
                try:
                    peak_bytes = way.candidate.priced.smallest(self._state.budget_bytes)[1].predicted_peak_bytes
                except BudgetError as error:
                    peak_bytes = error.least_feasible_bytes or MAX_BYTES
                yield peak_bytes, way.candidate.variant

    def _is_worth_capturing(self, variant: Variant) -> bool:
        if variant.slices:
            return True
        if variant in self._norms:
            return not self._worth.most_slices  # they need whole tensors
        try:
            return not self._worth.why_not(variant, self._variants.work(variant))
        except Refused:
            return False

    def _with_what_needs_less(self, variant: Variant) -> Iterator[PricedVariant[Graph, Made]]:
        """A variant; shrunk; and with convolutions in pieces: the last two only where they need fewer bytes."""
        try:
            graph, priced = captured_variant(self._variants, self._price, variant)
        except Refused:
            return
        if priced.graph.fingerprint in self._state.candidates:
            return
        candidate = PricedVariant(variant, graph, priced)
        yield self._noted(candidate)
        if (shrunk := priced.shrunk()) is not None:
            smaller = PricedVariant(replace(variant, shrunk=True), graph, shrunk)
            if _needs_less(smaller, candidate):
                candidate = smaller
                yield self._noted(candidate)
        if (cut := candidate.priced.cut()) is not None:
            in_pieces = PricedVariant(replace(candidate.variant, pieces=cut[0]), graph, cut[1])
            if _needs_less(in_pieces, candidate):
                yield self._noted(in_pieces)

    def _noted(self, candidate: PricedVariant[Graph, Made]) -> PricedVariant[Graph, Made]:
        self._state.candidates[candidate.priced.graph.fingerprint] = candidate
        self._state.unfit.append(candidate)
        return candidate


def _needs_less(candidate: PricedVariant[Graph, Made], other: PricedVariant[Graph, Made]) -> bool:
    return about_least_bytes(candidate.priced.graph) < about_least_bytes(other.priced.graph)
