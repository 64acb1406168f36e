"""Which variants on slices, slabs or patches are worth to be captured: capturing one takes as long as many bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Generic

from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Candidate, Variant
from shoal.engine.search.priced import Made, expected_ops, why_too_many
from shoal.engine.search.search_state import GOOD_ENOUGH, WORTH_A_PLAN, SearchState
from shoal.engine.search.split_variants import PatchWork
from shoal.engine.search.variants import Graph
from shoal.planners.estimates import about_least_bytes

_ENOUGH_SLICES = 4  # with which patches that overlap are left out once a variant fits
_SURE = 0.9  # of what the step on more slices is expected to take
_FEW_OPS = 1000  # of a variant on slices; one of more is captured only where there is as much more to gain
_LOWER = 0.99  # where nothing fits, patches that need more than so much of what others need are not made finer


class WorthCapturing(Generic[Graph, Made]):
    """Judges variants by what they compute, before they are captured.

    Args:
        state: what is known.
    """

    def __init__(self, state: SearchState[Graph, Made]) -> None:
        self._state = state
        self._about_bytes: dict[Variant, int] = {}  # what each variant needs, where nothing fits in any
        self._no_lower: set[Variant] = set()  # of these on patches, those that need no fewer than the ones before

    def why_not(self, variant: Variant, work: PatchWork) -> str:
        """Why a variant cannot be the fastest, or is too large; "" where it is worth it.

        Args:
            variant: the variant.
            work: what it takes.
        """
        state = self._state
        self._note_what_is_needed()
        if replace(variant, grid=tuple(n - 1 for n in variant.grid)) in self._no_lower:
            self._no_lower.add(variant)
            return "fewer patches need no fewer bytes, and nothing fits"
        whole = state.whole
        # An op that a clock cannot time takes 0 s, and so may a whole small step.
        slowed_share = state.best_seconds / whole.plain_seconds - 1 if whole.plain_seconds else 0.0
        best = state.best
        if best is not None and best.variant.norms != WHOLE and best.variant.parts == variant and variant.slices:
            # It has as many ops, so that it is only a question of whether its plan may be faster.
            return "with norms fused in the others the plan is near to its bound" if state.is_near(best.variant) else ""
        one_after_another = variant.slices or variant.slabs
        if one_after_another and not self.is_slow_enough(work, state.best_seconds):
            return "the other variants are slowed down little"
        if variant.slices and self._kept_seconds_on(variant) > state.best_seconds:
            return "more slices take longer than the best, with everything kept"
        if variant.slices and any(_has_room(row, whole) for row in state.rows):
            return "fewer slices are not short of room, by their bound"
        if variant.twice and state.best is not None:
            return "another variant fits and measures nothing twice"
        if work.more_share > 0 and self.most_slices >= _ENOUGH_SLICES and state.best is not None:
            return "another variant fits, and slices and slabs compute nothing twice"
        if self._others_gain_nothing(variant):
            return "other parts gain nothing, by their bound"
        if work.more_share > slowed_share:
            return f"computes {100 * work.more_share:.0f} % more"
        return why_too_many(work, len(whole.ops), 0 if one_after_another else sum(row.n_ops for row in state.rows))

    def _note_what_is_needed(self) -> None:
        """Where nothing fits, finer patches are only for the minimum."""
        for candidate in self._state.unfit if self._state.best is None else ():
            if candidate.variant in self._about_bytes:
                continue
            before_bytes = min(self._about_bytes.values(), default=math.inf)
            about_bytes = self._about_bytes[candidate.variant] = about_least_bytes(candidate.priced.graph)
            if candidate.variant.grid and about_bytes > _LOWER * before_bytes:
                self._no_lower.add(candidate.variant)

    def is_slow_enough(self, work: PatchWork, least_seconds: float) -> bool:
        """Whether so fast a step leaves enough to be gained by slices for them to be captured.

        Args:
            work: what the slices take.
            least_seconds: of the step in another variant.
        """
        whole = self._state.whole
        n_times = max(1.0, expected_ops(work, len(whole.ops)) / _FEW_OPS)
        return least_seconds > (1 + GOOD_ENOUGH * n_times) * whole.plain_seconds

    def _others_gain_nothing(self, variant: Variant) -> bool:
        """Whether variants in parts hardly lower the bound of the step as it is, which has a plan.

        On fewer patches; or in any parts, where their plan would have to be much nearer to its bound.
        """
        state, whole = self._state, self._state.row(WHOLE)
        if whole is None or whole.seconds is None or whole.bound_seconds is None:
            return False
        least_seconds = (1 - WORTH_A_PLAN) * whole.bound_seconds
        return any(
            row.bound_seconds >= least_seconds
            and (() < row.variant.grid < variant.grid or state.must_come_nearer(row.bound_seconds))
            for row in state.rows
            if row.bound_seconds is not None and _is_in_parts(row)
        )

    def _kept_seconds_on(self, variant: Variant) -> float:
        """About the step with everything kept, from variants on fewer slices: each slice more takes as much more."""
        rows = (row for row in self._state.rows if row.n_ops and _is_on_slices(row))
        known = {row.variant.slices: row.plain_seconds for row in rows if row.variant.depth == variant.depth}
        if not known:
            return 0.0
        many, fast = max(known), self._state.whole.plain_seconds
        return _SURE * (fast + (known[many] - fast) * (variant.slices - 1) / (many - 1))

    @property
    def most_slices(self) -> int:
        """The most slices or slabs of a variant that was captured."""
        candidates = self._state.candidates.values()
        return max((max(candidate.variant.slices, candidate.variant.slabs) for candidate in candidates), default=0)


def _has_room(row: Candidate, whole: StepGraph) -> bool:
    """Whether a variant on slices is hardly slowed down for lack of room by its bound; each slice more takes longer."""
    if not _is_on_slices(row) or row.bound_seconds is None or row.plain_seconds < whole.plain_seconds:
        return False
    return row.bound_seconds <= (1 + WORTH_A_PLAN) * row.plain_seconds


def _is_on_slices(row: Candidate) -> bool:
    """Whether a variant is the step on slices of the batch, with nothing else changed."""
    return bool(row.variant.slices) and _is_in_parts(row)


def _is_in_parts(row: Candidate) -> bool:
    """Whether a variant is the step on slices, slabs or patches, with nothing else changed."""
    variant = row.variant
    return bool(variant.slices or variant.slabs or variant.grid) and not (variant.pieces or variant.shrunk)
