"""The fastest form of a step inside a budget: as it is, with batch norms fused, convolutions in pieces, on patches.

Forms are captured and priced, none is run as a whole. A relaxed program bounds each from below (see
`planners.estimates.least_seconds`), and only what could be faster than the best plan so far is planned in full.
Convolutions in pieces take less scratch and mostly more time, so the forms are looked at with them where they are
slowed down, or do not fit; a form that fits is planned with them only if that lowers its bound. Likewise with what
waits in the backward pass shrunk, which takes an op each time. Only direct kernels may be faster than the library's,
so forms that are not slowed down are looked at with these. Overlapping patches compute their halos besides what the
network computes, so they are looked at where the other forms are slowed down by more than that. Fewer slices are
planned before more are captured. Where the bounds of all forms that do not run part by part say that they are slowed
down, those on the fewest are bounded before any of them is planned: a plan takes longer than all these bounds, and the
fastest plan leaves no need of the others. Storages are encoded last, in the forms of which the bound says that they
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
from shoal.engine.search.combinations import in_parts, is_slowed_by_slices, norms_of_the_rest, without_norms
from shoal.engine.search.encode_forms import EncodeForms
from shoal.engine.search.nearest_first import PricedVariant
from shoal.engine.search.priced import Made, Priced, captured_form
from shoal.engine.search.search_state import WORTH_A_PLAN, Best, SearchState
from shoal.engine.search.try_forms import Bounded, bound_forms, plan_forms, try_forms
from shoal.engine.search.unfit_forms import nearest, plan_unfit
from shoal.engine.search.variants import Forms, Graph
from shoal.engine.search.worth_capturing import WorthCapturing
from shoal.planners.infeasible import is_hopeless

log = logging.getLogger("shoal")


def best_variant(
    variants: Forms[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int, name: str
) -> Best[Graph, Made]:
    """Choose it.

    Args:
        variants: the forms that are allowed.
        price: what the graph of a form costs.
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
    variants: Forms[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int, name: str
) -> Best[Graph, Made] | None:
    """As `best_variant`; None if no form is found to fit. Forms that are expected to need more than the budget are not
    planned: that takes far longer, and is only for the minimum that an error names."""
    return _BestVariantSearch(variants, price, budget_bytes).run(name, for_the_minimum=False)


class _BestVariantSearch(Generic[Graph, Made]):
    """Captures forms and has them tried."""

    def __init__(self, variants: Forms[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int) -> None:
        self._variants, self._price = variants, price
        self.state: SearchState[Graph, Made] = SearchState(budget_bytes)
        self._worth = WorthCapturing(self.state)
        self._cut: set[str] = set()  # forms that were asked for pieces
        self._shrunk: set[str] = set()  # forms that were asked to be shrunk

    def run(self, name: str, *, for_the_minimum: bool) -> Best[Graph, Made] | None:
        """The fastest form; None if there is none.

        Args:
            name: the model's.
            for_the_minimum: whether forms are planned that are not expected to fit, for what they need.
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
        encoded = EncodeForms(state)
        encoded.plan()
        if state.is_slowed:
            plan_unfit(state, encoded.has_planned, for_the_minimum=for_the_minimum)
        best = state.answer()
        if best is not None:
            log.info("%s: %s inside %s", name or "model", best.variant, format_bytes(state.budget_bytes))
        return best

    def _form(self, variant: Variant) -> list[PricedVariant[Graph, Made]]:
        """The form, captured and priced; none where the step does not have it, or has it `without_norms` already."""
        try:
            graph, priced = captured_form(self._variants, self._price, variant)
        except Refused as reason:
            self.state.leave_out(variant, str(reason))
            return [form for other in without_norms(variant) for form in self._form(other)]
        return [PricedVariant(variant, graph, priced)]

    def consider_norms(self) -> None:
        """The step as it is, and with batch norms fused: all of them, or where they do not fit, but for the largest.

        Where the budget is hopeless, that is said at once, and no other form is captured.
        Fewer fused are captured before anything is planned where all would be faster than the step as it is can be.
        Where none of them can be fast, they are planned together with the forms of `_with_what_needs_less`.
        """
        state = self.state
        captured = self._form(WHOLE)
        for form in captured:
            if form.priced.refuse is not None and is_hopeless(form.priced.graph, state.budget_bytes):
                form.priced.refuse(state.budget_bytes)
        captured += [form for variant in self._variants.of_norms() for form in self._form(variant)]
        bounded = bound_forms(state, captured)
        whole_seconds = next((seconds for seconds, form in bounded if form.variant == WHOLE), math.inf)
        considered = self._consider_smaller_maps((1 - WORTH_A_PLAN) * whole_seconds, [])
        plan_forms(state, self._with_what_needs_less(bounded))
        self._consider_smaller_maps((1 - WORTH_A_PLAN) * state.best_seconds, considered)

    def _with_what_needs_less(self, bounded: Bounded[Graph, Made]) -> Bounded[Graph, Made]:
        """The forms, and while none of them can be fast by its bound, those that need fewer bytes.

        They would be asked for after plans of the others, each of which takes longer than all these bounds.
        """
        for more in (self._shrunk_forms, self._forms_in_pieces):
            if self.state.is_slow(self._least_seconds(bounded)):
                bounded = bounded + more()
        least_seconds = self._least_seconds(bounded)
        return bounded + self._sliced_forms(least_seconds) if self.state.is_slow(least_seconds) else bounded

    def _least_seconds(self, bounded: Bounded[Graph, Made]) -> float:
        """What no form so far can be faster than."""
        return min((self.state.best_seconds, *(seconds for seconds, _ in bounded)))

    def _consider_smaller_maps(self, below_seconds: float, considered: Sequence[Variant]) -> list[Variant]:
        """Where all batch norms fused do not fit, leave those of the largest maps: as few as it takes.

        Args:
            below_seconds: what the form with all of them fused must be faster than, with everything kept.
            considered: of these forms those that need not be asked again.

        Returns:
            Those that were.
        """
        state = self.state
        if not any(form.variant == WHOLE and state.may_fit(form) for form in state.forms.values()):
            return []
        fused = [form for form in state.unfit if form.variant == Variant(fuse=form.variant.fuse) != WHOLE]
        may_gain = [form.variant for form in fused if form.priced.graph.plain_seconds < below_seconds]
        asked = [variant for variant in may_gain if variant not in considered]
        for variant in asked:
            self._consider_fewer(list(self._variants.of_smaller_maps(variant)))
        return asked

    def _consider_fewer(self, fewer: Sequence[Variant]) -> None:
        """Of forms that fuse fewer and fewer batch norms, the first that fits; none where the last does not."""
        state, last = self.state, fewer[-1:]
        least = [form for variant in last for form in self._form(variant)]
        for form in least:
            is_known = form.priced.graph.fingerprint in state.forms
            if is_known or math.isinf(form.priced.least_seconds(state.budget_bytes)):
                try_forms(state, least)
                reason = "changes nothing" if is_known else "does not fit, as with fewer fused it does not"
                for variant in fewer if is_known else fewer[:-1]:
                    state.leave_out(variant, reason)
                return
        for variant in fewer:
            try_forms(state, least if [variant] == last else self._form(variant))
            if any(row.variant == variant and row.seconds is not None for row in state.rows):
                return

    def consider_faster(self) -> None:
        """The forms that fit by their bound once more, with convolutions by direct kernels."""
        fitting = {row.variant for row in self.state.rows if row.bound_seconds is not None}
        forms = [form for form in self.state.forms.values() if form.variant in fitting]
        try_forms(self.state, _changed(forms, lambda priced: priced.faster()))

    def consider_shrunk(self) -> None:
        """The same forms once more, shrunk in the backward pass."""
        if self.state.is_short_of_room:
            plan_forms(self.state, self._shrunk_forms())

    def _shrunk_forms(self) -> Bounded[Graph, Made]:
        """The forms shrunk, but for those that were asked already, or cannot be the fastest by their bounds."""
        state = self.state
        fresh = [form for key, form in state.forms.items() if key not in self._shrunk]
        self._shrunk |= state.forms.keys()
        forms = []
        for form in fresh:
            row = state.row(form.variant)
            bound_seconds = row.bound_seconds if row is not None else None
            least_seconds = form.priced.graph.plain_seconds if bound_seconds is None else bound_seconds
            if form.variant.pieces or form.variant.shrunk or not state.may_gain(least_seconds):
                continue
            if (priced := form.priced.shrunk()) is not None:
                forms.append(PricedVariant(replace(form.variant, shrunk=True), form.graph, priced))
        return bound_forms(state, forms)

    def consider_pieces(self) -> None:
        """The same forms once more, with convolutions in pieces."""
        plan_forms(self.state, self._forms_in_pieces())

    def _forms_in_pieces(self) -> Bounded[Graph, Made]:
        """The forms in pieces, but for those that were asked already.

        Of a form that was shrunk, that one only: pieces too are for the fewest bytes.
        """
        known = self.state.forms
        uncut = known.keys() - self._cut
        self._cut |= uncut
        shrunk = {replace(form.variant, shrunk=False) for form in known.values() if form.variant.shrunk}
        whole = [form for key, form in known.items() if key in uncut and not form.variant.pieces]
        forms = [form for form in whole if form.variant not in shrunk]
        return bound_forms(self.state, _changed(forms, lambda priced: priced.cut()))

    def consider_split(self) -> None:
        """On slices of the batch; then on slabs and patches."""
        state = self.state
        while state.is_slowed and (forms := self._sliced_forms()):
            plan_forms(state, forms)
        self.consider_shrunk()
        if self._worth.most_slices and state.is_slowed:
            self.consider_pieces()
        for variant in self._in_parts:
            if not variant.slices and self._is_worth_capturing(variant):
                try_forms(state, self._form(variant))
                if variant.slabs and state.best is None:
                    self.consider_pieces()

    @cached_property
    def _in_parts(self) -> list[Variant]:
        """The forms in parts, once those of norms are captured: what is not cut has the best of these."""
        forms = ((form.variant, form.priced.graph) for form in self.state.forms.values())
        norms, needs_more = norms_of_the_rest(forms)
        return list(in_parts(self._variants, norms, needs_more=needs_more))

    @cached_property
    def _unasked_slices(self) -> list[Variant]:
        return [variant for variant in self._in_parts if variant.slices]

    def _sliced_forms(self, least_seconds: float = math.inf) -> Bounded[Graph, Made]:
        """On the fewest slices of the batch that fit by their bound, but for those that were asked already.

        More are asked for once these are planned: they have several times as many ops, and take longer to be captured
        than fewer to be planned.

        Args:
            least_seconds: the lowest bound of other forms. If it leaves little to be gained, none are asked for.
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
                bounded = self._of_fewer_and_fewer_layers(variant)
        return bounded

    def _of_fewer_and_fewer_layers(self, sliced: Variant) -> Bounded[Graph, Made]:
        """A form on slices; and with fewer layers cut while slices slow it down, and it fits by its bound."""
        state, bounded = self.state, Bounded[Graph, Made]()
        forms = {form.variant: form.priced.graph for form in state.forms.values()}
        for variant in (sliced, *self._variants.of_fewer_layers(sliced)):
            found = bound_forms(state, self._form(variant))
            bounded += found
            rest = forms.get(variant.norms, state.whole)
            if not any(is_slowed_by_slices(form.priced.graph, rest) for _, form in found):
                break
        return bounded

    def _may_gain_on_slices(self, variant: Variant, least_seconds: float) -> bool:
        try:
            return self._worth.is_slow_enough(self._variants.work(variant), least_seconds)
        except Refused:
            return True  # the table says so

    def _is_worth_capturing(self, variant: Variant) -> bool:
        """Whether a form may be the fastest, and is not too large; the table says why not."""
        try:
            reason = self._worth.why_not(variant, self._variants.work(variant))
        except Refused as refused:
            reason = str(refused)
        if reason:
            self.state.leave_out(variant, reason)
        return not reason


def _changed(
    forms: Iterable[PricedVariant[Graph, Made]],
    change: Callable[[Priced[Made]], tuple[tuple[Pieces, ...], Priced[Made]] | None],
) -> list[PricedVariant[Graph, Made]]:
    found = []
    for form in forms:
        if (changed := change(form.priced)) is not None:
            pieces, priced = changed
            found.append(PricedVariant(replace(form.variant, pieces=pieces), form.graph, priced))
    return found
