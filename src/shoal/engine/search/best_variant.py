"""The fastest variant of a step inside a budget: as it is, with batch norms fused, convolutions in pieces, on patches.

Variants are captured and priced, none is run as a whole. A relaxed program bounds each from below (see
`planners.estimates.least_seconds`), and only what could be faster than the best plan so far is planned in full.
Convolutions in pieces take less scratch and mostly more time, so the variants are looked at with them where they are
slowed down, or do not fit; a variant that fits is planned with them only if that lowers its bound. Likewise with what
waits in the backward pass shrunk, which takes an op each time. Only direct kernels may be faster than the library's,
so variants that are not slowed down are looked at with these. Overlapping patches compute their halos besides what the
network computes, so they are looked at where the other variants are slowed down by more than that. Fewer slices are
planned before more are captured. Where the bounds of all variants that do not run part by part say that they are slowed
down, those on the fewest are bounded before any of them is planned: a plan takes longer than all these bounds, and the
fastest plan leaves no need of the others. Storages are encoded last, in the variants of which the bound says that they
may be faster so than the best plan that encodes nothing. Counts of ops end the search, never a clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Generic

from shoal.capture.layered import Refused
from shoal.core.sizes import format_bytes
from shoal.core.variant import WHOLE, Pieces, Variant
from shoal.engine.search.combinations import has_room, in_parts, is_slowed_by_slices, norms_of_the_rest, without_norms
from shoal.engine.search.encode_variants import EncodeVariants
from shoal.engine.search.priced import Made, Priced, PricedVariant, captured_variant
from shoal.engine.search.search_state import WORTH_A_PLAN, Best, SearchState
from shoal.engine.search.try_variants import Bounded, bound_variants, plan_variants, try_variants
from shoal.engine.search.unfit_variants import nearest, plan_unfit
from shoal.engine.search.variants import AnyVariants, Graph
from shoal.engine.search.worth_capturing import WorthCapturing
from shoal.planners.infeasible import is_hopeless

log = logging.getLogger("shoal")


def best_variant(
    variants: AnyVariants[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int, name: str
) -> Best[Graph, Made]:
    """Choose it.

    Args:
        variants: the variants that are allowed.
        price: what the graph of a variant costs.
        budget_bytes: most bytes in use at any position.
        name: the model's.

    Raises:
        BudgetError: no plan of any of them fits; the one that came nearest.
        CaptureError: the step cannot be captured as it is.
    """
    search = _BestVariantSearch(variants, price, budget_bytes)
    best = search.run(name, for_the_minimum=True)
    if best is None:
        raise nearest(search.state)
    return best


def fitting_variant(
    variants: AnyVariants[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int, name: str
) -> Best[Graph, Made] | None:
    """As `best_variant`; None if no variant is found to fit. Variants that are expected to need more than the budget
    are not planned: that takes far longer, and is only for the minimum that an error names."""
    return _BestVariantSearch(variants, price, budget_bytes).run(name, for_the_minimum=False)


class _BestVariantSearch(Generic[Graph, Made]):
    """Captures variants and has them tried."""

    def __init__(self, variants: AnyVariants[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int) -> None:
        self._variants, self._price = variants, price
        self.state: SearchState[Graph, Made] = SearchState(budget_bytes)
        self._worth = WorthCapturing(self.state)
        self._cut: set[str] = set()  # variants that were asked for pieces
        self._shrunk: set[str] = set()  # variants that were asked to be shrunk

    def run(self, name: str, *, for_the_minimum: bool) -> Best[Graph, Made] | None:
        """The fastest variant; None if there is none.

        Args:
            name: the model's.
            for_the_minimum: whether variants are planned that are not expected to fit, for what they need.
        """
        state = self.state
        self.consider_norms()
        self.consider_shrunk()
        if state.is_short_of_room:
            self.consider_pieces()
        else:
            self.consider_faster()
        if state.is_slowed:
            self.consider_split()
        encoded = EncodeVariants(state)
        encoded.plan()
        if state.is_slowed:
            plan_unfit(state, encoded.has_planned, for_the_minimum=for_the_minimum)
        best = state.answer()
        if best is not None:
            log.info("%s: %s inside %s", name or "model", best.variant, format_bytes(state.budget_bytes))
        return best

    def _captured(self, variant: Variant) -> list[PricedVariant[Graph, Made]]:
        """The variant, captured and priced; none where the step does not have it, or has it `without_norms` already."""
        try:
            graph, priced = captured_variant(self._variants, self._price, variant)
        except Refused as reason:
            self.state.leave_out(variant, str(reason))
            return [candidate for other in without_norms(variant) for candidate in self._captured(other)]
        return [PricedVariant(variant, graph, priced)]

    def consider_norms(self) -> None:
        """The step as it is, and with batch norms fused: all of them, or where they do not fit, but for the largest.

        Where the budget is hopeless, that is said at once, and no other variant is captured. Fewer fused are captured
        before anything is planned where all would be faster than the step as it is can be. Where none of them can be
        fast, they are planned together with the variants of `_with_what_needs_less`.
        """
        state = self.state
        captured = self._captured(WHOLE)
        for candidate in captured:
            if candidate.priced.refuse is not None and is_hopeless(candidate.priced.graph, state.budget_bytes):
                candidate.priced.refuse(state.budget_bytes)
        captured += [candidate for variant in self._variants.of_norms() for candidate in self._captured(variant)]
        bounded = bound_variants(state, captured)
        whole_seconds = next((seconds for seconds, candidate in bounded if candidate.variant == WHOLE), math.inf)
        considered = self._consider_smaller_maps((1 - WORTH_A_PLAN) * whole_seconds, [])
        plan_variants(state, self._with_what_needs_less(bounded))
        self._consider_smaller_maps((1 - WORTH_A_PLAN) * state.best_seconds, considered)

    def _with_what_needs_less(self, bounded: Bounded[Graph, Made]) -> Bounded[Graph, Made]:
        """The variants, and while none of them can be fast by its bound, those that need fewer bytes.

        They would be asked for after plans of the others, each of which takes longer than all these bounds.
        """
        for more in (self._shrunk_candidates, self._candidates_in_pieces):
            if self.state.is_slow(self._least_seconds(bounded)):
                bounded = bounded + more()
        least_seconds = self._least_seconds(bounded)
        return bounded + self._sliced(least_seconds) if self.state.is_slow(least_seconds) else bounded

    def _least_seconds(self, bounded: Bounded[Graph, Made]) -> float:
        """What no variant so far can be faster than."""
        return min((self.state.best_seconds, *(seconds for seconds, _ in bounded)))

    def _consider_smaller_maps(self, below_seconds: float, considered: Sequence[Variant]) -> list[Variant]:
        """Where all batch norms fused do not fit, leave those of the largest maps: as few as it takes.

        Args:
            below_seconds: what the variant with all of them fused must be faster than, with everything kept.
            considered: of these variants those that need not be asked again.

        Returns:
            Those that were.
        """
        state = self.state
        if not any(candidate.variant == WHOLE and state.may_fit(candidate) for candidate in state.candidates.values()):
            return []
        fused = [
            candidate for candidate in state.unfit if candidate.variant == Variant(fuse=candidate.variant.fuse) != WHOLE
        ]
        may_gain = [candidate.variant for candidate in fused if candidate.priced.graph.plain_seconds < below_seconds]
        asked = [variant for variant in may_gain if variant not in considered]
        for variant in asked:
            self._consider_fewer(list(self._variants.of_smaller_maps(variant)))
        return asked

    def _consider_fewer(self, fewer: Sequence[Variant]) -> None:
        """Of variants that fuse fewer and fewer batch norms, the first that fits; none where the last does not."""
        state, last = self.state, fewer[-1:]
        least = [candidate for variant in last for candidate in self._captured(variant)]
        for candidate in least:
            is_known = candidate.priced.graph.fingerprint in state.candidates
            if is_known or math.isinf(candidate.priced.least_seconds(state.budget_bytes)):
                try_variants(state, least)
                reason = "changes nothing" if is_known else "does not fit, as with fewer fused it does not"
                for variant in fewer if is_known else fewer[:-1]:
                    state.leave_out(variant, reason)
                return
        for variant in fewer:
            try_variants(state, least if [variant] == last else self._captured(variant))
            if any(row.variant == variant and row.seconds is not None for row in state.rows):
                return

    def consider_faster(self) -> None:
        """The variants that fit by their bound once more, with convolutions by direct kernels."""
        fitting = {row.variant for row in self.state.rows if row.bound_seconds is not None}
        candidates = [candidate for candidate in self.state.candidates.values() if candidate.variant in fitting]
        try_variants(self.state, _changed(candidates, lambda priced: priced.faster()))

    def consider_shrunk(self) -> None:
        """The same variants once more, shrunk in the backward pass."""
        if self.state.is_short_of_room:
            plan_variants(self.state, self._shrunk_candidates())

    def _shrunk_candidates(self) -> Bounded[Graph, Made]:
        """The variants shrunk, but for those that were asked already, or cannot be the fastest by their bounds."""
        state = self.state
        fresh = [candidate for key, candidate in state.candidates.items() if key not in self._shrunk]
        self._shrunk |= state.candidates.keys()
        candidates = []
        for candidate in fresh:
            row = state.row(candidate.variant)
            bound_seconds = row.bound_seconds if row is not None else None
            least_seconds = candidate.priced.graph.plain_seconds if bound_seconds is None else bound_seconds
            if candidate.variant.pieces or candidate.variant.shrunk or not state.may_gain(least_seconds):
                continue
            if (priced := candidate.priced.shrunk()) is not None:
                candidates.append(PricedVariant(replace(candidate.variant, shrunk=True), candidate.graph, priced))
        return bound_variants(state, candidates)

    def consider_pieces(self) -> None:
        """The same variants once more, with convolutions in pieces."""
        plan_variants(self.state, self._candidates_in_pieces())

    def _candidates_in_pieces(self) -> Bounded[Graph, Made]:
        """The variants in pieces, but for those that were asked already.

        Of a variant that was shrunk, that one only: pieces too are for the fewest bytes.
        """
        known = self.state.candidates
        uncut = known.keys() - self._cut
        self._cut |= uncut
        shrunk = {replace(candidate.variant, shrunk=False) for candidate in known.values() if candidate.variant.shrunk}
        whole = [candidate for key, candidate in known.items() if key in uncut and not candidate.variant.pieces]
        candidates = [candidate for candidate in whole if candidate.variant not in shrunk]
        return bound_variants(self.state, _changed(candidates, lambda priced: priced.cut()))

    def consider_split(self) -> None:
        """On slices of the batch; then on slabs and patches."""
        state = self.state
        while state.is_slowed and (candidates := self._sliced()):
            plan_variants(state, candidates)
        self.consider_shrunk()
        if self._worth.most_slices and state.is_slowed:
            self.consider_pieces()
        for variant in self._in_parts:
            if not variant.slices and self._is_worth_capturing(variant):
                try_variants(state, self._captured(variant))
                if variant.slabs and state.best is None:
                    self.consider_pieces()

    @cached_property
    def _in_parts(self) -> list[Variant]:
        """The variants in parts, once those of norms are captured: what is not cut has the best of these."""
        candidates = ((candidate.variant, candidate.priced.graph) for candidate in self.state.candidates.values())
        norms, needs_more = norms_of_the_rest(candidates)
        return list(in_parts(self._variants, norms, needs_more=needs_more))

    @cached_property
    def _unasked_slices(self) -> list[Variant]:
        return [variant for variant in self._in_parts if variant.slices]

    def _sliced(self, least_seconds: float = math.inf) -> Bounded[Graph, Made]:
        """On the fewest slices of the batch that fit by their bound, but for those that were asked already.

        More are asked for once these are planned: they have several times as many ops, and take longer to be captured
        than fewer to be planned.

        Args:
            least_seconds: the lowest bound of other variants. If it leaves little to be gained, none are asked for.
        """
        bounded: Bounded[Graph, Made] = []
        while self._unasked_slices and not bounded:
            variant = self._unasked_slices[0]
            if not self._may_gain_on_slices(variant, least_seconds):
                break
            del self._unasked_slices[0]
            best = self.state.best
            if best is not None and best.variant.slices == variant.slices and variant.norms == WHOLE:
                variant = best.variant.parts  # as many layers as are cut there, in which norms are fused
            if self._is_worth_capturing(variant):
                bounded = self._of_few_and_more_layers(variant, others_fit=math.isfinite(least_seconds))
        return bounded

    def _of_few_and_more_layers(self, sliced: Variant, *, others_fit: bool) -> Bounded[Graph, Made]:
        """A variant on slices with few layers cut, which has the fewest ops; with more while it is short of room so.

        Where cutting some slows nothing down, fewer than all are of no use.

        Args:
            sliced: with all of them cut.
            others_fit: whether a variant on no slices fits by its bound; if not, all are cut first.
        """
        state, bounded = self.state, Bounded[Graph, Made]()
        candidates = {candidate.variant: candidate.priced.graph for candidate in state.candidates.values()}
        rest = candidates.get(sliced.norms, state.whole)
        asked = [*self._variants.of_fewer_layers(sliced)][::-1]
        asked.insert(len(asked) if others_fit else 0, sliced)
        while asked:
            variant = asked.pop(0)
            found = bound_variants(state, self._captured(variant))
            bounded += found
            slowed = [one for one in found if is_slowed_by_slices(one[1].priced.graph, rest)]
            if variant == sliced and not slowed:
                break
            if found and not slowed:
                asked = [one for one in asked if one == sliced]
            elif variant != sliced and any(has_room(bound, candidate.priced.graph) for bound, candidate in slowed):
                break
        return bounded

    def _may_gain_on_slices(self, variant: Variant, least_seconds: float) -> bool:
        try:
            return self._worth.is_slow_enough(self._variants.work(variant), least_seconds)
        except Refused:
            return True  # the table says so

    def _is_worth_capturing(self, variant: Variant) -> bool:
        """Whether a variant may be the fastest, and is not too large; the table says why not."""
        try:
            reason = self._worth.why_not(variant, self._variants.work(variant))
        except Refused as refused:
            reason = str(refused)
        if reason:
            self.state.leave_out(variant, reason)
        return not reason


def _changed(
    candidates: Iterable[PricedVariant[Graph, Made]],
    change: Callable[[Priced[Made]], tuple[tuple[Pieces, ...], Priced[Made]] | None],
) -> list[PricedVariant[Graph, Made]]:
    found = []
    for candidate in candidates:
        if (changed := change(candidate.priced)) is not None:
            pieces, priced = changed
            found.append(PricedVariant(replace(candidate.variant, pieces=pieces), candidate.graph, priced))
    return found
