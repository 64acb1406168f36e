"""Bound the variants of a step that were captured, and plan those that may be faster than the best plan so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

from shoal.core.progress import doing
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.variant import Candidate, Variant
from shoal.engine.search.priced import Made, PricedVariant
from shoal.engine.search.search_state import WORTH_A_PLAN, Best, SearchState
from shoal.engine.search.variants import Graph
from shoal.errors import BudgetError
from shoal.planners.estimates import about_least_bytes, quick_least

_LOWERED = 0.95  # of the smallest peak that is found in a moment: a plan for speed may have a lower one

Bounded = list[tuple[float, PricedVariant[Graph, Made]]]  # variants that fit by their bounds, with these in seconds


def try_variants(state: SearchState[Graph, Made], candidates: Iterable[PricedVariant[Graph, Made]]) -> None:
    """Bound variants, and plan what may be faster than the best plan so far, the most promising first.

    Args:
        state: what is known; each variant gets a row in its table.
        candidates: those that are like one that was tried before are left out: a variant may change nothing.
    """
    plan_variants(state, bound_variants(state, candidates))


def bound_variants(
    state: SearchState[Graph, Made], candidates: Iterable[PricedVariant[Graph, Made]]
) -> Bounded[Graph, Made]:
    """Bound variants: `try_variants` without planning. Those that do not fit by their bounds get their row.

    Returns:
        The others.
    """
    bounded = []
    for candidate in candidates:
        fingerprint = candidate.priced.graph.fingerprint
        if fingerprint in state.candidates:
            continue
        state.candidates[fingerprint] = candidate
        bound_seconds = candidate.priced.least_seconds(state.budget_bytes)
        if math.isfinite(bound_seconds):
            bounded.append((bound_seconds, candidate))
        else:
            state.unfit.append(candidate)
            state.rows.append(_row(candidate, None))
    return bounded


def plan_variants(state: SearchState[Graph, Made], bounded: Bounded[Graph, Made]) -> None:
    """Plan those that may be faster than the best plan so far, the most promising first.

    A variant that is shrunk or has pieces comes after itself without them where its bound is hardly lower. One that
    seems to need more than the budget comes last, and is asked for only while nothing fits: it takes as long to plan,
    and mostly in vain.
    """
    bounds = {candidate.variant: bound_seconds for bound_seconds, candidate in bounded}
    has_others = state.best is not None or len(bounded) > 1

    def place(one: tuple[float, PricedVariant[Graph, Made]]) -> tuple[float, int]:
        bound_seconds, candidate = one
        plainer = [bounds[variant] for variant in _plainer(candidate.variant) if variant in bounds]
        hardly_lower = [other for other in plainer if bound_seconds >= (1 - WORTH_A_PLAN) * other]
        return max([bound_seconds, *hardly_lower]), len(candidate.variant.pieces) + candidate.variant.shrunk

    last: list[tuple[float, PricedVariant[Graph, Made], int]] = []
    for bound_seconds, candidate in sorted(bounded, key=place):
        row = _row(candidate, bound_seconds)
        reason = _why_not(state, row, bound_seconds)
        if reason:
            state.rows.append(replace(row, outcome=reason))
        elif has_others and (found_bytes := _too_large(state, candidate)):
            last.append((bound_seconds, candidate, found_bytes))
        else:
            _plan(state, row, candidate)
    for bound_seconds, candidate, found_bytes in last:
        row = _row(candidate, bound_seconds)
        if state.best is None:
            _plan(state, row, candidate)
            continue
        reason = _why_not(state, row, bound_seconds)
        if not reason:
            reason = f"needs {format_bytes(found_bytes)} as far as was found in a moment, and another fits"
            state.unfit.append(candidate)  # fewer norms fused may fit
        state.rows.append(replace(row, outcome=reason))


def _plan(state: SearchState[Graph, Made], row: Candidate, candidate: PricedVariant[Graph, Made]) -> None:
    doing("plan", f"{row.n_ops} ops, {candidate.variant}")
    try:
        made, plan = candidate.priced.plan(state.budget_bytes)
    except BudgetError as error:
        row = replace(row, outcome=state.refuse(candidate.variant, error))
        state.unfit.append(candidate)
    else:
        row = replace(row, seconds=plan.predicted_seconds, peak_bytes=plan.predicted_peak_bytes, outcome="slower")
        state.take_if_faster(Best(candidate.variant, candidate.graph, made, plan))
    state.rows.append(row)


def _too_large(state: SearchState[Graph, Made], candidate: PricedVariant[Graph, Made]) -> int:
    """An estimate of the smallest peak of a variant if that is well over the budget; 0 if not."""
    graph = candidate.priced.graph
    if graph.link is not None or any(
        state.fits(peak) for peak in (simulate(graph, {}).peak_bytes, about_least_bytes(graph))
    ):
        return 0
    found_bytes = quick_least(graph, state.budget_bytes).found_bytes
    return 0 if state.fits(int(_LOWERED * found_bytes)) else found_bytes


def _row(candidate: PricedVariant[Graph, Made], bound_seconds: float | None) -> Candidate:
    """The row of a variant that has no plan yet."""
    graph = candidate.priced.graph
    kept = simulate(graph, {})
    outcome = "does not fit, by its bound"
    return Candidate(
        candidate.variant,
        len(graph.ops),
        kept.seconds,
        kept.peak_bytes,
        bound_seconds,
        None,
        None,
        outcome,
        graph.rewrites_save_bytes,
    )


def _why_not(state: SearchState[Graph, Made], row: Candidate, bound_seconds: float) -> str:
    """Why a variant that fits by its bound is not planned; "" where it is."""
    variant = row.variant
    if not state.may_gain(bound_seconds):
        return f"cannot be {'much ' if bound_seconds < state.best_seconds else ''}faster, by its bound"
    if state.fits(row.plain_peak_bytes):
        return ""  # with everything kept it is a plan
    # On slices few saved tensors can be made compact. Plans of whole steps with compact ones are nearer to the same
    # bound, so those are left out only if the plan of the plainer variant is near to it already.
    plainer = {one for one in _plainer(variant) if variant.slices or one.shrunk == variant.shrunk or state.is_near(one)}
    if _fits_as(state, plainer, bound_seconds):
        return f"fits without {'pieces' if variant.pieces else 'being shrunk'}, and gains nothing by its bound"
    if (variant.slices or variant.grid) and state.must_come_nearer(bound_seconds):
        return "faster only if planned twice as near to its bound as the unmodified step"
    return ""


def _gains_nothing(bound_seconds: float, planned: Candidate) -> bool:
    """Whether a lower bound is hardly below that of a variant that has a plan."""
    if planned.seconds is None or planned.bound_seconds is None:
        return False
    return bound_seconds >= (1 - WORTH_A_PLAN) * planned.bound_seconds


def _plainer(variant: Variant) -> set[Variant]:
    """The same variant without pieces, not shrunk, and neither."""
    others = {replace(variant, pieces=()), replace(variant, shrunk=False), replace(variant, pieces=(), shrunk=False)}
    return others - {variant}


def _fits_as(state: SearchState[Graph, Made], others: Collection[Variant], bound_seconds: float) -> bool:
    """Whether one of other variants has a plan, and a lower bound that is hardly higher."""
    return any(_gains_nothing(bound_seconds, row) for row in state.rows if row.variant in others)
