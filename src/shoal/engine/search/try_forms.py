"""Forms of a step that were captured: each is bounded, and what may be faster than the best plan so far is planned."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from shoal.core.progress import doing
from shoal.core.simulate import simulate
from shoal.core.variant import Candidate, Variant
from shoal.engine.search.nearest_first import Form
from shoal.engine.search.priced import Made
from shoal.engine.search.search_state import WORTH_A_PLAN, Best, SearchState
from shoal.engine.search.variants import Graph
from shoal.errors import BudgetError


def try_forms(state: SearchState[Graph, Made], forms: Iterable[Form[Graph, Made]]) -> None:
    """Bound forms, and plan what may be faster than the best plan so far, the most promising first.

    Args:
        state: what is known; each form gets a row in its table.
        forms: those that are like one that was tried before are left out: a form may change nothing.
    """
    bounded = []
    for form in forms:
        fingerprint = form.priced.graph.fingerprint
        if fingerprint not in state.forms:
            state.forms[fingerprint] = form
            bounded.append((form.priced.least_seconds(state.budget_bytes), form))
    for bound_seconds, form in sorted(bounded, key=lambda one: one[0]):
        _try(state, bound_seconds, form)


def _try(state: SearchState[Graph, Made], bound_seconds: float, form: Form[Graph, Made]) -> None:
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
    if math.isinf(bound_seconds):
        state.unfit.append(form)
    elif reason := _why_not(state, row, bound_seconds):
        row = replace(row, outcome=reason)
    else:
        try:
            made, plan = priced.plan(state.budget_bytes)
        except BudgetError as error:
            row = replace(row, outcome=state.refuse(variant, error))
            state.unfit.append(form)
        else:
            row = replace(row, seconds=plan.predicted_seconds, peak_bytes=plan.predicted_peak_bytes, outcome="slower")
            state.take_if_faster(Best(variant, form.graph, made, plan))
    state.rows.append(row)


def _why_not(state: SearchState[Graph, Made], row: Candidate, bound_seconds: float) -> str:
    """Why a form that fits by its bound is not planned; "" where it is."""
    variant = row.variant
    if not state.may_gain(bound_seconds):
        return f"cannot be {'much ' if bound_seconds < state.best_seconds else ''}faster, by its bound"
    if state.fits(row.plain_peak_bytes):
        return ""  # with everything kept it is a plan
    if variant.pieces and _fits_whole(state, variant, bound_seconds):
        return "fits without pieces, and gains nothing by its bound"
    if variant.slices and _fits_on_more(state, variant, bound_seconds):
        return "fits on more slices, and gains nothing by its bound"
    if variant.slices and _must_come_nearer(state, bound_seconds):
        return "faster only if planned twice as near to its bound as the step as it is"
    return ""


def _gains_nothing(bound_seconds: float, planned: Candidate) -> bool:
    """Whether a lower bound is hardly below that of a form that has a plan."""
    if planned.seconds is None or planned.bound_seconds is None:
        return False
    return bound_seconds >= (1 - WORTH_A_PLAN) * planned.bound_seconds


def _fits_whole(state: SearchState[Graph, Made], variant: Variant, bound_seconds: float) -> bool:
    """Whether the same form without pieces has a plan, and a lower bound that is hardly higher."""
    whole = replace(variant, pieces=())
    return any(_gains_nothing(bound_seconds, row) for row in state.rows if row.variant == whole)


def _fits_on_more(state: SearchState[Graph, Made], variant: Variant, bound_seconds: float) -> bool:
    """Whether the step on more slices has a plan, and a lower bound that is hardly higher."""
    return any(
        _gains_nothing(bound_seconds, row)
        for row in state.rows
        if row.variant.slices > variant.slices and not row.variant.pieces
    )


def _must_come_nearer(state: SearchState[Graph, Made], bound_seconds: float) -> bool:
    """Whether a form is the fastest only if its plan is much nearer to its bound than that of the step as it is."""
    whole = state.whole
    if state.best is None or whole.seconds is None or not whole.bound_seconds:
        return False
    gap = whole.seconds / whole.bound_seconds - 1
    return bound_seconds * (1 + gap / 2) >= state.best_seconds
