"""The fastest form of a step inside a budget: as it is, with batch norms fused, convolutions in pieces, on patches.

Forms are captured and priced, none is run as a whole. A relaxed program bounds each from below (see
`planners.joint.least_seconds`), and only what could be faster than the best plan so far is planned in full.
Convolutions in pieces take less scratch and mostly more time, so the forms are looked at with them where they are
slowed down, or do not fit; a form that fits is planned with them only if that lowers its bound. Likewise where the best
plan adds a twentieth, with what waits in the backward pass shrunk, which takes an op each time. Direct kernels alone
may be faster than the library's, so forms that are not slowed down are looked at with these. Overlapping patches
compute their halos besides what the network computes, so they are looked at where the other forms are slowed down by
more than that. All numbers of slices are captured before any is planned; fewer than fit are planned only if their bound
is lower. Storages are encoded last, in the forms of which the bound says that they may be faster so than the best plan
that encodes nothing. Counts of ops end the search, never a clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic

from shoal.capture.layered import Refused
from shoal.core.plan import Plan
from shoal.core.progress import doing
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.variant import WHOLE, Candidate, Pieces, Variant
from shoal.engine.search.choose_encoded import BOUNDING_SHARES
from shoal.engine.search.encoding import IF_FASTER, EncodeBelow, NotFaster
from shoal.engine.search.nearest_first import Form, Way, nearest_first
from shoal.engine.search.priced import Made, Priced, captured_form, why_too_many
from shoal.engine.search.variants import Forms, Graph
from shoal.errors import BudgetError
from shoal.planners.infeasible import fewest_bytes, floor_bytes
from shoal.planners.joint import about_least_bytes, least_seconds

log = logging.getLogger("shoal")

_GOOD_ENOUGH = 0.02  # of the plain step: a plan that adds no more is not looked at in patches
_TIGHT = 0.05  # of the fastest form's step with everything kept: where plans add more, forms are shrunk
_WORTH_A_PLAN = 0.005  # of the best plan's step: a form that may gain no more is not planned
_ENOUGH_SLICES = 4  # with which patches that overlap are left out
_SURE = 0.9  # of what the step on more slices is expected to take
_LOWER = 0.99  # where nothing fits, patches that need more than so much of what others need are not made finer
_MAX_ENCODED = 2  # forms in which storages are encoded, once something fits


@dataclass(frozen=True)
class Best(Generic[Graph, Made]):
    """The form that was chosen.

    Attributes:
        variant: which.
        graph: of that form, as `Forms` has it.
        made: what `Priced.plan` made of it.
        plan: its plan, with the table of all candidates.
    """

    variant: Variant
    graph: Graph
    made: Made
    plan: Plan


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
    search = _Search(variants, price, budget_bytes)
    search.consider([WHOLE, *variants.of_norms()])
    search.consider_smaller_maps()
    search.consider_shrunk()
    if search.is_short_of_room:
        search.consider_pieces()
    else:
        search.consider_faster()
    if search.is_slowed:
        variant = next(split := iter(variants.split()), None)
        while variant is not None and variant.slices:
            if search.is_worth_capturing(variant):
                search.capture(variant)
            variant = next(split, None)
        search.plan_captured()
        search.consider_shrunk()
        if search.has_slices and search.is_slowed:
            search.consider_pieces()
        while variant is not None:
            if search.is_worth_capturing(variant):
                search.consider([variant])
                if variant.slabs and not search.has_a_plan:
                    search.consider_pieces()
            variant = next(split, None)
    search.consider_encoded()
    best = search.answer()
    log.info("%s: %s inside %s", name or "model", best.variant, format_bytes(budget_bytes))
    return best


def _as_written(variant: Variant) -> bool:
    """Whether it is the model's own form, shrunk in the backward pass or not."""
    return replace(variant, shrunk=False) == WHOLE


def _is_on_slices(row: Candidate) -> bool:
    """Whether a form is the step as it is, or that on slices of the batch."""
    variant = row.variant
    return not variant.pieces and (variant == WHOLE or bool(variant.slices))


def _gains_nothing(bound_seconds: float, planned: Candidate) -> bool:
    """Whether a lower bound is hardly below that of a form that has a plan."""
    if planned.seconds is None or planned.bound_seconds is None:
        return False
    return bound_seconds >= (1 - _WORTH_A_PLAN) * planned.bound_seconds


class _Search(Generic[Graph, Made]):
    def __init__(self, variants: Forms[Graph], price: Callable[[Graph], Priced[Made]], budget_bytes: int) -> None:
        self._variants, self._price, self._budget_bytes = variants, price, budget_bytes
        self._rows: list[Candidate] = []
        self._captured: list[Form[Graph, Made]] = []
        self._forms: dict[str, Form[Graph, Made]] = {}  # by the step's fingerprint
        self._cut: set[str] = set()
        self._shrunk: set[str] = set()  # forms of which it was asked what they are shrunk
        self._best: Best[Graph, Made] | None = None
        self._unfit: list[Form[Graph, Made]] = []
        self._refused: dict[tuple[Variant, bool], BudgetError] = {}  # by form and whether storages are encoded
        self._encoded: set[Variant] = set()  # forms that were planned with storages encoded
        self._n_ops = 0
        self._about_bytes: dict[Variant, int] = {}  # what each form needs, where nothing fits in any
        self._no_lower: set[Variant] = set()  # of these on patches, those that need no fewer than the ones before

    def consider(self, variants: Iterable[Variant]) -> None:
        """Capture, bound, and plan what may be faster than the best so far, the most promising first."""
        for variant in variants:
            self.capture(variant)
        self.plan_captured()

    def capture(self, variant: Variant) -> None:
        """Capture a form, for `plan_captured`."""
        try:
            graph, priced = captured_form(self._variants, self._price, variant)
        except Refused as reason:
            self._left_out(variant, str(reason))
        else:
            self._captured.append(Form(variant, graph, priced))

    def plan_captured(self) -> None:
        """Bound what was captured, and plan what may be faster than the best so far, the most promising first."""
        captured, self._captured = self._captured, []
        self._try_each(captured)

    def consider_smaller_maps(self) -> None:
        """Where all batch norms fused do not fit, leave those of the largest maps: as few as it takes."""
        if not any(form.variant == WHOLE and self._may_fit(form) for form in self._forms.values()):
            return
        unfit = {form.variant for form in self._unfit}
        for fused in [row.variant for row in self._rows if row.variant in unfit and self._may_gain(row.plain_seconds)]:
            if not fused.fuse or fused.large_only:
                continue
            for fewer in self._variants.of_smaller_maps(fused):
                self.consider([fewer])
                if any(row.variant == fewer and row.seconds is not None for row in self._rows):
                    break

    def _may_gain(self, bound_seconds: float) -> bool:
        """Whether a form with this lower bound may be faster than the best plan so far, by more than a little."""
        best = self._best
        return best is None or bound_seconds < (1 - _WORTH_A_PLAN) * best.plan.predicted_seconds

    def consider_faster(self) -> None:
        """The forms that fit by their bound once more, with convolutions by direct kernels."""
        fitting = {row.variant for row in self._rows if row.bound_seconds is not None}
        forms = [form for form in self._forms.values() if form.variant in fitting]
        self._try_each(self._changed(forms, lambda priced: priced.faster()))

    def consider_shrunk(self) -> None:
        """The same forms once more, shrunk in the backward pass, where the best plan is slowed down or missing."""
        if not self._is_slowed_by(_TIGHT):
            return
        fresh = [form for fingerprint, form in self._forms.items() if fingerprint not in self._shrunk]
        self._shrunk |= self._forms.keys()
        forms = []
        for form in fresh:
            if form.variant.pieces or form.variant.shrunk or not self._may_gain(form.priced.graph.plain_seconds):
                continue
            if (priced := form.priced.shrunk()) is not None:
                forms.append(Form(replace(form.variant, shrunk=True), form.graph, priced))
        self._try_each(forms)

    def consider_pieces(self) -> None:
        """The same forms once more, with convolutions in pieces, but for those that were asked already.

        Of a form that was shrunk, that one alone: pieces too are for the fewest bytes.
        """
        uncut = self._forms.keys() - self._cut
        self._cut |= uncut
        shrunk = {replace(form.variant, shrunk=False) for form in self._forms.values() if form.variant.shrunk}
        forms = [
            form
            for fingerprint, form in self._forms.items()
            if fingerprint in uncut and not form.variant.pieces and form.variant not in shrunk
        ]
        self._try_each(self._changed(forms, lambda priced: priced.cut()))

    @staticmethod
    def _changed(
        forms: Iterable[Form[Graph, Made]],
        change: Callable[[Priced[Made]], tuple[tuple[Pieces, ...], Priced[Made]] | None],
    ) -> list[Form[Graph, Made]]:
        found = []
        for form in forms:
            if (changed := change(form.priced)) is not None:
                pieces, priced = changed
                found.append(Form(replace(form.variant, pieces=pieces), form.graph, priced))
        return found

    def consider_encoded(self) -> None:
        """Encode storages in the forms that may be faster so than the best plan, first what is fastest kept."""
        n_fitting = 0
        for form in sorted(self._forms.values(), key=lambda form: form.priced.graph.plain_seconds):
            if n_fitting == _MAX_ENCODED or not self._may_gain(form.priced.graph.plain_seconds):
                return
            if form.priced.encoded is not None and self._may_fit(form) and self._may_gain_encoded(form):
                n_fitting += self._encode(form)

    def _may_gain_encoded(self, form: Form[Graph, Made]) -> bool:
        """Whether the bound of a form, exact or with storages encoded, lets it fit and be faster than the best plan."""
        assert form.priced.encoded is not None
        doing("plan", f"{len(form.priced.graph.ops)} ops, {form.variant}, storages encoded")
        exact = next(row.bound_seconds for row in self._rows if row.variant == form.variant)
        if exact is not None and self._may_gain(exact):
            return True
        for share in BOUNDING_SHARES:
            bound_seconds = least_seconds(form.priced.encoded.graph(share), self._budget_bytes)
            if math.isfinite(bound_seconds) and self._may_gain(bound_seconds):
                return True
        return False

    def _encode(self, form: Form[Graph, Made]) -> bool:
        """Plan a form with storages encoded, if that takes less; whether anything fits by now."""
        assert form.priced.encoded is not None
        self._encoded.add(form.variant)
        encoding = EncodeBelow(self._best.plan.predicted_seconds) if self._best else IF_FASTER
        try:
            made, plan = form.priced.encoded.plan(self._budget_bytes, encoding)
        except NotFaster:
            return True
        except BudgetError as error:
            self._refuse(form.variant, error, encoded=True)
            return self._best is not None
        self._best = Best(form.variant, form.graph, made, plan)
        self._note_plan(self._best)
        return True

    def _note_plan(self, found: Best[Graph, Made]) -> None:
        """Put a plan that was made after all, or that encodes, into the table."""
        place = next(n for n, row in enumerate(self._rows) if row.variant == found.variant)
        self._rows[place] = replace(
            self._rows[place],
            bound_seconds=self._rows[place].plain_seconds + found.plan.lower_bound_seconds,
            seconds=found.plan.predicted_seconds,
            peak_bytes=found.plan.predicted_peak_bytes,
            outcome="slower",
        )

    def _try_each(self, forms: Iterable[Form[Graph, Made]]) -> None:
        bounded = []
        for form in forms:
            self._n_ops += len(form.priced.graph.ops)
            fingerprint = form.priced.graph.fingerprint
            if fingerprint not in self._forms:  # a form may change nothing
                self._forms[fingerprint] = form
                bounded.append((form.priced.least_seconds(self._budget_bytes), form))
        for bound_seconds, form in sorted(bounded, key=lambda one: one[0]):
            self._try(bound_seconds, form)

    def _try(self, bound_seconds: float, form: Form[Graph, Made]) -> None:
        variant, priced = form.variant, form.priced
        doing("plan", f"{len(priced.graph.ops)} ops, {variant}")
        kept = simulate(priced.graph, {})
        row = Candidate(
            variant,
            len(priced.graph.ops),
            kept.seconds,
            kept.peak_bytes,
            bound_seconds if math.isfinite(bound_seconds) else None,
            None,
            None,
            "does not fit, by its bound",
        )
        best = self._best
        if math.isinf(bound_seconds):
            self._unfit.append(form)
            self._note_what_is_needed(form)
        elif best is not None and not self._may_gain(bound_seconds):
            gains = bound_seconds < best.plan.predicted_seconds
            row = replace(row, outcome=f"cannot be {'much ' if gains else ''}faster, by its bound")
        elif variant.pieces and self._fits_whole(variant, bound_seconds):
            row = replace(row, outcome="fits without pieces, and gains nothing by its bound")
        elif variant.slices and self._fits_on_more(variant, bound_seconds):
            row = replace(row, outcome="fits on more slices, and gains nothing by its bound")
        elif variant.slices and self._must_come_nearer(bound_seconds):
            row = replace(row, outcome="faster only if planned twice as near to its bound as the step as it is")
        else:
            try:
                made, plan = priced.plan(self._budget_bytes)
            except BudgetError as error:
                row = replace(row, outcome=self._refuse(variant, error))
                self._unfit.append(form)
            else:
                seconds, peak_bytes = plan.predicted_seconds, plan.predicted_peak_bytes
                row = replace(row, seconds=seconds, peak_bytes=peak_bytes, outcome="slower")
                if best is None or seconds < best.plan.predicted_seconds:
                    self._best = Best(variant, form.graph, made, plan)
        self._rows.append(row)

    def _fits_whole(self, variant: Variant, bound_seconds: float) -> bool:
        """Whether the same form without pieces has a plan, and a lower bound that is hardly higher."""
        whole = replace(variant, pieces=())
        return any(_gains_nothing(bound_seconds, row) for row in self._rows if row.variant == whole)

    def _fits_on_more(self, variant: Variant, bound_seconds: float) -> bool:
        """Whether the step on more slices has a plan, and a lower bound that is hardly higher."""
        return any(
            _gains_nothing(bound_seconds, row)
            for row in self._rows
            if row.variant.slices > variant.slices and not row.variant.pieces
        )

    def _must_come_nearer(self, bound_seconds: float) -> bool:
        """Whether a form is the fastest only if its plan is much nearer to its bound than that of the step as it is."""
        whole = next(row for row in self._rows if row.variant == WHOLE)
        if self._best is None or whole.seconds is None or not whole.bound_seconds:
            return False
        gap = whole.seconds / whole.bound_seconds - 1
        return bound_seconds * (1 + gap / 2) >= self._best.plan.predicted_seconds

    def _note_what_is_needed(self, form: Form[Graph, Made]) -> None:
        """Where what stays in any form is over the budget, so that finer patches are for the least alone."""
        if floor_bytes(form.priced.graph) <= self._budget_bytes:
            return
        before_bytes = min(self._about_bytes.values(), default=math.inf)
        about_bytes = self._about_bytes[form.variant] = about_least_bytes(form.priced.graph)
        if form.variant.grid and about_bytes > _LOWER * before_bytes:
            self._no_lower.add(form.variant)

    @property
    def has_a_plan(self) -> bool:
        """Whether a form fits."""
        return self._best is not None

    @property
    def is_slowed(self) -> bool:
        """Whether the best plan so far is slower than the step with everything kept, or there is none."""
        plain_seconds = next(row.plain_seconds for row in self._rows if row.variant == WHOLE)
        return self._best is None or self._best.plan.predicted_seconds > (1 + _GOOD_ENOUGH) * plain_seconds

    @property
    def is_short_of_room(self) -> bool:
        """Whether the best plan so far is slower than the fastest form with everything kept, or there is none."""
        return self._is_slowed_by(_GOOD_ENOUGH)

    def _is_slowed_by(self, share: float) -> bool:
        fastest_seconds = min(form.priced.graph.plain_seconds for form in self._forms.values())
        return self._best is None or self._best.plan.predicted_seconds > (1 + share) * fastest_seconds

    def is_worth_capturing(self, variant: Variant) -> bool:
        """Whether a form on patches may be the fastest, and is not too large; the table says why not."""
        try:
            work = self._variants.work(variant)
        except Refused as reason:
            return self._left_out(variant, str(reason))
        if replace(variant, grid=tuple(n - 1 for n in variant.grid)) in self._no_lower:
            self._no_lower.add(variant)
            return self._left_out(variant, "fewer patches need no fewer bytes, and nothing fits")
        whole = next(row for row in self._rows if row.variant == WHOLE)
        slowed_share = self._best.plan.predicted_seconds / whole.plain_seconds - 1 if self._best else math.inf
        one_after_another = variant.slices or variant.slabs
        if one_after_another and slowed_share < _GOOD_ENOUGH:
            return self._left_out(variant, "the other forms are slowed down little")
        if variant.slices and self._best and self._kept_seconds_on(variant.slices) > self._best.plan.predicted_seconds:
            return self._left_out(variant, "more slices take longer than the best, with everything kept")
        if variant.twice and self.has_a_plan:
            return self._left_out(variant, "another form fits and measures nothing twice")
        if work.more_share > 0 and self._most_slices >= _ENOUGH_SLICES:
            return self._left_out(variant, "slices and slabs compute nothing twice")
        if work.more_share > slowed_share:
            return self._left_out(variant, f"computes {100 * work.more_share:.0f} % more")
        if too_many := why_too_many(work, whole.n_ops, 0 if one_after_another else self._n_ops):
            return self._left_out(variant, too_many)
        return True

    def _kept_seconds_on(self, slices: int) -> float:
        """About the step with everything kept, from forms on fewer slices: each slice more takes as much more."""
        known = {row.variant.slices or 1: row.plain_seconds for row in self._rows if row.n_ops and _is_on_slices(row)}
        known |= {form.variant.slices: simulate(form.priced.graph, {}).seconds for form in self._captured}
        (few, fast), *more = sorted(known.items())
        if not more:
            return 0.0
        many, slow = more[-1]
        return _SURE * (fast + (slow - fast) * (slices - few) / (many - few))

    @property
    def has_slices(self) -> bool:
        """Whether a form on slices of the batch was captured."""
        return self._most_slices > 0

    @property
    def _most_slices(self) -> int:
        return max((max(form.variant.slices, form.variant.slabs) for form in self._forms.values()), default=0)

    def _left_out(self, variant: Variant, reason: str) -> bool:
        self._rows.append(Candidate(variant, 0, 0.0, 0, None, None, None, reason))
        return False

    def answer(self) -> Best[Graph, Made]:
        """The best, with the table of all.

        Raises:
            BudgetError: there is none; the one that came nearest.
        """
        if self.is_slowed:
            self._consider_unfit()
        if self._best is None:
            raise self._nearest()
        best = self._best
        rows = tuple(replace(row, outcome="chosen") if row.variant == best.variant else row for row in self._rows)
        considered = rows if len(rows) > 1 else ()
        return replace(best, plan=replace(best.plan, variant=best.variant, candidates=considered))

    def _consider_unfit(self) -> None:
        """Plan the forms that do not fit by their bounds, and may by recomputing again and again, or in another order.

        While nothing fits, a form is asked that is expected to need fewer bytes than are known to be enough; then one
        of which a plan was found in a moment that fits. One that was asked with storages encoded might have been exact.
        """
        planned: set[Variant] = set()
        for way in self._ways_to_the_least():
            variant = way.form.variant
            is_known = variant in planned or {(variant, way.encoded), (variant, True)} & self._refused.keys()
            may_fit = way.expected_bytes < self._enough_bytes if self._best is None else self._fits(way.found_bytes)
            if is_known or not may_fit or not self._may_gain(way.step.plain_seconds):
                continue
            try:
                found = self._planned(way)
            except BudgetError as error:
                self._refuse(variant, error, encoded=way.encoded)
                continue
            planned.add(variant)
            self._note_plan(found)
            if self._best is None or found.plan.predicted_seconds < self._best.plan.predicted_seconds:
                self._best = found

    def _nearest(self) -> BudgetError:
        """Of the refusals, the one that names the least."""
        (variant, _), nearest = min(self._refused.items(), key=lambda one: one[1].least_feasible_bytes or math.inf)
        hint = f"computed otherwise than the model says it ({variant}), which needs least of all forms"
        return nearest if _as_written(variant) else nearest.with_hint(hint)

    def _ways_to_the_least(self) -> list[Way[Graph, Made]]:
        """Each form that does not fit by its bound and may gain, exact and all encoded; the most promising first."""
        ways = [Way(form, False, form.priced.graph) for form in self._unfit]
        for form in self._unfit:
            if form.priced.encoded is not None and self._may_fit(form) and form.variant not in self._encoded:
                ways.append(Way(form, True, form.priced.encoded.graph(1.0)))
        return nearest_first((way for way in ways if self._may_gain(way.step.plain_seconds)), self._budget_bytes)

    def _planned(self, way: Way[Graph, Made]) -> Best[Graph, Made]:
        """The plan.

        Raises:
            BudgetError: there is none.
        """
        form = way.form
        if way.encoded:
            assert form.priced.encoded is not None
            made, plan = form.priced.encoded.plan(self._budget_bytes, IF_FASTER)
        else:
            made, plan = form.priced.plan(self._budget_bytes)
        return Best(form.variant, form.graph, made, plan)

    def _may_fit(self, form: Form[Graph, Made]) -> bool:
        return self._fits(fewest_bytes(form.priced.graph))

    def _fits(self, nbytes: int) -> bool:
        return nbytes <= self._budget_bytes

    @property
    def _enough_bytes(self) -> float:
        """The least that any form was found to need."""
        return min((error.least_feasible_bytes or math.inf for error in self._refused.values()), default=math.inf)

    def _refuse(self, variant: Variant, error: BudgetError, encoded: bool = False) -> str:
        """Note what a form needs; in words."""
        self._refused[variant, encoded] = error
        least_bytes = error.least_feasible_bytes
        return f"needs {format_bytes(least_bytes)}" if least_bytes else "does not fit"
