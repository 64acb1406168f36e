"""The variants of a step with storages encoded: those that may be faster so than the best plan that encodes nothing."""

from __future__ import annotations

import math
from typing import Generic

from shoal.core.progress import doing
from shoal.core.variant import Variant
from shoal.engine.search.choose_encoded import BOUNDING_SHARES
from shoal.engine.search.encoding import IF_FASTER, EncodeBelow, NotFaster
from shoal.engine.search.priced import Made, PricedVariant
from shoal.engine.search.search_state import Best, SearchState
from shoal.engine.search.variants import Graph
from shoal.errors import BudgetError
from shoal.planners.estimates import least_seconds

_MAX_ENCODED = 2  # variants in which storages are encoded, once something fits


class EncodeVariants(Generic[Graph, Made]):
    """Encodes storages in the variants of a search.

    Args:
        state: what is known; the best plan is noted there.
    """

    def __init__(self, state: SearchState[Graph, Made]) -> None:
        self._state = state
        self._planned: set[Variant] = set()

    def has_planned(self, variant: Variant) -> bool:
        """Whether a variant was planned with storages encoded."""
        return variant in self._planned

    def plan(self) -> None:
        """Plan the variants that may be faster so than the best plan, first what is fastest with everything kept."""
        state, n_fitting = self._state, 0
        for candidate in sorted(state.candidates.values(), key=lambda candidate: candidate.priced.graph.plain_seconds):
            if n_fitting == _MAX_ENCODED or not state.may_gain(candidate.priced.graph.plain_seconds):
                return
            if candidate.priced.encoded is not None and state.may_fit(candidate) and self._may_gain(candidate):
                n_fitting += self._encode(candidate)

    def _may_gain(self, candidate: PricedVariant[Graph, Made]) -> bool:
        """Whether a variant, exact or with storages encoded, may be faster than the best plan by its bound."""
        assert candidate.priced.encoded is not None
        doing("plan", f"{len(candidate.priced.graph.ops)} ops, {candidate.variant}, storages encoded")
        row = self._state.row(candidate.variant)
        if row is not None and row.bound_seconds is not None and self._state.may_gain(row.bound_seconds):
            return True
        for share in BOUNDING_SHARES:
            bound_seconds = least_seconds(candidate.priced.encoded.graph(share), self._state.budget_bytes)
            if math.isfinite(bound_seconds) and self._state.may_gain(bound_seconds):
                return True
        return False

    def _encode(self, candidate: PricedVariant[Graph, Made]) -> bool:
        """Plan a variant with storages encoded, if that takes less; whether anything fits by now."""
        assert candidate.priced.encoded is not None
        state = self._state
        self._planned.add(candidate.variant)
        encoding = EncodeBelow(state.best_seconds) if state.best else IF_FASTER
        try:
            made, plan = candidate.priced.encoded.plan(state.budget_bytes, encoding)
        except NotFaster:
            return True
        except BudgetError as error:
            state.refuse(candidate.variant, error, encoded=True)
            return state.best is not None
        state.best = Best(candidate.variant, candidate.graph, made, plan)
        state.note_plan(state.best)
        return True
