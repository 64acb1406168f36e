"""Plans inside many budgets, of all variants of a step that are allowed.

Each variant is captured and priced once. Inside each budget, from the largest to the smallest, a variant is planned if
its lower bound there is below the fastest plan that is known to fit. Storages are encoded last, in at most two
variants, as in `best_variant`. Every plan stays a candidate wherever its peak fits, so that more bytes are never
slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import fx

from shoal.capture.layered import Refused
from shoal.core.frontier import USABLE, FrontierPoint
from shoal.core.plan import Plan
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.choose_encoded import BOUNDING_SHARES
from shoal.engine.search.combinations import in_parts, is_slowed_by_slices, norms_of_the_rest, without_norms
from shoal.engine.search.encoding import IF_FASTER, EncodeBelow, NotFaster
from shoal.engine.search.priced import Priced, captured_variant, why_too_many
from shoal.engine.search.variants import Variants
from shoal.errors import BudgetError
from shoal.planners.estimates import least_peak_bytes, least_seconds, quick_least

_LITTLE_MORE = (0.02, 0.1, 0.3)  # of the smallest budget, tried where that is not usable
_MAX_ENCODED = 2  # variants in which storages are encoded inside one budget, once something fits
_LOWERED = 0.9  # a variant whose smallest peak is estimated above the least over this is not asked for it exactly


@dataclass
class _Candidate:
    """A variant of the step. It is known not to fit in less than `too_small_bytes`, and `too_small_encoded_bytes`."""

    variant: Variant
    priced: Priced[Any]
    too_small_bytes: int = 0
    too_small_encoded_bytes: int = 0

    def plan(self, budget_bytes: int) -> Plan | None:
        """The variant's plan with exact values only; None where none fits."""
        if budget_bytes < self.too_small_bytes:
            return None
        try:
            return replace(self.priced.plan(budget_bytes)[1], variant=self.variant)
        except BudgetError as error:
            self.too_small_bytes = max(budget_bytes + 1, error.least_feasible_bytes or 0)
            return None

    def plan_encoded(self, budget_bytes: int, below_seconds: float) -> Plan | None:
        """The variant's plan with storages encoded that takes less; None where there is none."""
        if self.priced.encoded is None or budget_bytes < self.too_small_encoded_bytes:
            return None
        encoding = EncodeBelow(below_seconds) if math.isfinite(below_seconds) else IF_FASTER
        try:
            return replace(self.priced.encoded.plan(budget_bytes, encoding)[1], variant=self.variant)
        except NotFaster:
            return None
        except BudgetError as error:
            if math.isinf(below_seconds):
                self.too_small_encoded_bytes = max(budget_bytes + 1, error.least_feasible_bytes or 0)
            return None

    def note_the_least(self) -> int | None:
        """Search the smallest budget in which the variant fits, by all means, and remember it."""
        try:
            if self.priced.encoded is not None:
                self.priced.encoded.plan(1, IF_FASTER)
            else:
                self.priced.plan(1)
        except BudgetError as error:
            least_bytes = error.least_feasible_bytes
            if self.priced.encoded is None:
                self.too_small_bytes = least_bytes or 0
            self.too_small_encoded_bytes = least_bytes or 0
            return least_bytes
        return 1


@dataclass(frozen=True)
class FoundPoints:
    """What `frontier_points` came to; as the attributes of `Frontier`."""

    points: tuple[FrontierPoint, ...]
    plain_seconds: float
    plain_peak_bytes: int
    left_out: tuple[tuple[str, str], ...]


def frontier_points(
    variants: Variants,
    price: Callable[[fx.GraphModule], Priced[Any]],
    n_points: int,
    budget_bytes: int | None = None,
    trying: Callable[[str], object] = lambda what: None,
) -> FoundPoints:
    """Plan inside budgets from the smallest that works to what keeping everything needs.

    The smallest that works may recompute everything again and again; then a little more is planned too.

    Args:
        variants: the variants that are allowed.
        price: captures a variant and prices it.
        n_points: how many budgets, evenly spaced up to the one where everything of the fastest variant is kept; the
            last is where that is so of the step as it is.
        budget_bytes: one more, where it lies between them.
        trying: called with what is done next, in words.

    Raises:
        CaptureError: the step cannot be captured as it is.
    """
    candidates, left_out = _priced_candidates(variants, price, trying)
    plain = simulate(candidates[0].priced.graph, {})
    trying("the smallest budget")
    least_bytes = min(_least_bytes(candidates), plain.peak_bytes)
    kept = (simulate(candidate.priced.graph, {}) for candidate in candidates)
    fastest_kept = min(kept, key=lambda timeline: (timeline.seconds, timeline.peak_bytes))
    most_bytes = max(least_bytes, min(fastest_kept.peak_bytes, plain.peak_bytes))
    n_spaced = n_points if most_bytes == plain.peak_bytes else n_points - 1
    spaced = {least_bytes + (most_bytes - least_bytes) * n // max(1, n_spaced - 1) for n in range(n_spaced)}
    budgets = spaced | {plain.peak_bytes}
    if budget_bytes is not None and least_bytes < budget_bytes < plain.peak_bytes:
        budgets.add(budget_bytes)
    plans: list[Plan] = []
    bounds: dict[int, float] = {}
    for within_bytes in sorted(budgets, reverse=True):
        trying(f"{format_bytes(within_bytes)} of {format_bytes(plain.peak_bytes)}")
        bounds[within_bytes] = _plan_inside(within_bytes, candidates, plans)
    for within_bytes in [int((1 + share) * least_bytes) for share in _LITTLE_MORE]:
        smaller = _fastest(plans, within_bytes)
        if smaller is None or smaller.predicted_seconds <= USABLE * plain.seconds or within_bytes >= most_bytes:
            break
        budgets.add(within_bytes)
        trying(
            f"{format_bytes(within_bytes)}: less takes {smaller.predicted_seconds / plain.seconds:.0f} times the step"
        )
        bounds[within_bytes] = _plan_inside(within_bytes, candidates, plans)
    fastest = {within: _fastest(plans, within) for within in sorted(budgets)}
    points = (FrontierPoint.of(plan, within, bounds[within]) for within, plan in fastest.items() if plan is not None)
    plain_peak_bytes = plain.peak_bytes + candidates[0].priced.graph.rewrites_save_bytes
    return FoundPoints(tuple(points), plain.seconds, plain_peak_bytes, tuple(left_out))


def _plan_inside(budget_bytes: int, candidates: list[_Candidate], plans: list[Plan]) -> float:
    """Add the plans that may be the fastest, those that encode last; the lower bound of all variants."""
    bounds = [(candidate.priced.least_seconds(budget_bytes), place) for place, candidate in enumerate(candidates)]
    for bound_seconds, place in sorted(bounds):
        if math.isfinite(bound_seconds) and bound_seconds < _seconds_inside(budget_bytes, plans):
            made = candidates[place].plan(budget_bytes)
            plans += [made] if made is not None else []
    exact_bounds = {place: bound_seconds for bound_seconds, place in bounds}
    # The bound is of the ops in two orders, and the smallest plan in any.
    for place, candidate in enumerate(candidates):
        if math.isfinite(_seconds_inside(budget_bytes, plans)):
            break
        made = candidate.plan(budget_bytes) if 0 < candidate.too_small_bytes <= budget_bytes else None
        if made is not None:
            plans.append(made)
            exact_bounds[place] = made.plain_seconds + made.lower_bound_seconds
    encodable = [place for place, candidate in enumerate(candidates) if candidate.priced.encoded is not None]
    n_encoded = 0
    for place in sorted(encodable, key=lambda place: candidates[place].priced.graph.plain_seconds):
        candidate, below_seconds = candidates[place], _seconds_inside(budget_bytes, plans)
        if n_encoded == _MAX_ENCODED or candidate.priced.graph.plain_seconds >= below_seconds:
            break
        if _may_be_faster_encoded(candidate, budget_bytes, exact_bounds[place], below_seconds):
            made = candidate.plan_encoded(budget_bytes, below_seconds)
            plans += [made] if made is not None else []
            n_encoded += math.isfinite(_seconds_inside(budget_bytes, plans))
    return min([*exact_bounds.values(), *(candidates[place].priced.graph.plain_seconds for place in encodable)])


def _may_be_faster_encoded(
    candidate: _Candidate, budget_bytes: int, exact_seconds: float, below_seconds: float
) -> bool:
    """Whether a variant, exact or encoded, may be faster by its bound, or where nothing fits, may fit after all."""
    assert candidate.priced.encoded is not None
    if exact_seconds < below_seconds:
        return True
    steps = [candidate.priced.encoded.graph(share) for share in BOUNDING_SHARES]
    if any(least_seconds(step, budget_bytes) < below_seconds for step in steps):
        return True
    is_unknown = math.isinf(below_seconds)
    return is_unknown and any(
        quick_least(step, budget_bytes).expected_bytes <= budget_bytes for step in (candidate.priced.graph, *steps)
    )


def _seconds_inside(budget_bytes: int, plans: list[Plan]) -> float:
    """Of the fastest plan that is known to fit; infinity where none is."""
    best = _fastest(plans, budget_bytes)
    return math.inf if best is None else best.predicted_seconds


def _fastest(plans: list[Plan], budget_bytes: int) -> Plan | None:
    fitting = (plan for plan in plans if plan.predicted_peak_bytes <= budget_bytes)
    return min(fitting, key=lambda plan: (plan.predicted_seconds, plan.predicted_peak_bytes), default=None)


def _priced_candidates(
    variants: Variants, price: Callable[[fx.GraphModule], Priced[Any]], trying: Callable[[str], object]
) -> tuple[list[_Candidate], list[tuple[str, str]]]:
    """The step as it is first, then what else there is, each different one once; and what was left out, and why."""
    candidates: list[_Candidate] = []
    left_out: list[tuple[str, str]] = []
    n_ops = 0
    of_norms = tuple(variants.of_norms())
    all_fused = (one for one in of_norms if one.fuse and not one.large_only)
    of_smaller_maps = chain.from_iterable(map(variants.of_smaller_maps, all_fused))

    def on_parts() -> Iterator[Variant]:
        norms, needs_more = norms_of_the_rest((candidate.variant, candidate.priced.graph) for candidate in candidates)
        yield from in_parts(variants, norms, needs_more=needs_more)

    full = set(variants.split())
    asked: Iterator[Variant] = chain((WHOLE, *of_norms, *of_smaller_maps), on_parts())
    while (variant := next(asked, None)) is not None:
        trying(f"the {variant} step" if variant == WHOLE else str(variant))
        try:
            if variant.depth:
                so_far_ops = 0 if variant.slices else n_ops
                too_many = why_too_many(variants.work(variant), len(candidates[0].priced.graph.ops), so_far_ops)
            else:
                too_many = ""
            if too_many:
                raise Refused(too_many)
            _, priced = captured_variant(variants, price, variant)
        except Refused as reason:
            left_out.append((str(variant), str(reason)))
            asked = chain(without_norms(variant), asked)
            continue
        n_ops += len(priced.graph.ops)
        rest = next(
            (candidate.priced.graph for candidate in candidates if candidate.variant == variant.norms), priced.graph
        )
        if variant.slices and variant.parts in full and is_slowed_by_slices(priced.graph, rest):
            asked = chain(variants.of_fewer_layers(variant), asked)
        if all(candidate.priced.graph.fingerprint != priced.graph.fingerprint for candidate in candidates):
            candidates.append(_Candidate(variant, priced))
            if (smaller := priced.shrunk()) is not None:
                variant, priced = replace(variant, shrunk=True), smaller
                candidates.append(_Candidate(variant, priced))
            if (variant.slices or not variant.depth) and (cut := priced.cut()) is not None:
                candidates.append(_Candidate(replace(variant, pieces=cut[0]), cut[1]))
    return candidates, left_out


def _least_bytes(candidates: list[_Candidate]) -> int:
    """The smallest budget that any variant is known to fit in: of those that seem to need least, exactly."""
    estimated = sorted((least_peak_bytes(candidate.priced.graph), place) for place, candidate in enumerate(candidates))
    least_bytes: int | None = None
    for estimated_bytes, place in estimated:
        if least_bytes is None or _LOWERED * estimated_bytes < least_bytes:
            needed_bytes = candidates[place].note_the_least() or estimated_bytes
            least_bytes = min(needed_bytes, least_bytes or needed_bytes)
    assert least_bytes is not None
    return least_bytes
