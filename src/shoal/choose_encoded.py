"""Which convolution inputs had best wait in 8 bits a value: `lossy=` of `shoal.compile` and `shoal.plan`.

Also known as: mixed policies of compression and rematerialisation (Liu et al., GACT, ICML'22, choose bits; here the
choice is between 8 bits, keeping, recomputing and offloading).

A set of storages is judged by its program in parts (see `planners.integer_program`), which takes milliseconds, and
improved storage by storage. The best sets are then planned in full beside the exact step, and the fastest plan counts.
No optimum is claimed for the set; the plan of it is as good as `joint` makes it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

import torch

from shoal.capture import Captured
from shoal.encoding import Offer, encode_residences, encoded, offers
from shoal.errors import BudgetError, PlanError
from shoal.lossy import Lossy
from shoal.plan import Plan
from shoal.planners.joint import estimated_seconds
from shoal.planners.recompute_choice import recompute_choice
from shoal.residence import Encode
from shoal.runtime.encoded_activation import encode, measured_errors
from shoal.sizes import format_bytes
from shoal.step import StepGraph
from shoal.undisturbed import undisturbed

log = logging.getLogger(__name__)

_GOOD_ENOUGH = 0.002  # of the plain step: an exact plan that adds no more is taken
_SEARCH_SECONDS = 12.0
_SHARES = (1.0, 0.75, 0.5, 0.25)
_PLANNED = 2  # sets that are planned in full, beside the exact step
_NORMAL_ELEMS = 1 << 16


def choose_encoded(
    captured: Captured,
    lossy: Lossy,
    budget_bytes: int,
    costed: Callable[[Captured], StepGraph],
    plan: Callable[[StepGraph], Plan],
    before: Iterable[str] | None = None,
) -> tuple[Captured, Plan]:
    """The fastest plan inside the budget that may encode convolution inputs, and the step it is for.

    Args:
        captured: the step as it is.
        lossy: how to encode.
        budget_bytes: most bytes in use at any position.
        costed: the step's graph with seconds, workspaces, standing bytes and link; for encoded steps too.
        plan: plans such a graph, or raises BudgetError.
        before: storages that an earlier run of this step encoded: taken again if a plan of them fits.

    Raises:
        BudgetError: no plan fits, of the exact step or of one with encoded storages; the one that came nearest.
    """
    search = _Search(captured, lossy, budget_bytes, costed)
    if before is not None:
        chosen = frozenset(before)
        try:
            return search.step(chosen), as_encoded(plan(search.graph(chosen)), search.exact, chosen, lossy)
        except (BudgetError, PlanError):
            log.warning("%s: what an earlier run encoded does not fit here; choosing anew", captured.graph.model)
    best: tuple[frozenset[str], Plan] | None = None
    nearest: BudgetError | None = None
    for chosen in search.sets():
        try:
            made = plan(search.graph(chosen))
        except BudgetError as error:
            if nearest is None or error.least_feasible_bytes < nearest.least_feasible_bytes:
                nearest = error
            continue
        if best is None or made.predicted_seconds < best[1].predicted_seconds:
            best = chosen, made
        if not chosen and made.added_seconds <= _GOOD_ENOUGH * made.plain_seconds:
            break
    if best is None:
        assert nearest is not None
        raise nearest
    chosen, made = best
    log.info("%s: %d storages encoded inside %s", captured.graph.model, len(chosen), format_bytes(budget_bytes))
    return search.step(chosen), as_encoded(made, search.exact, chosen, lossy)


def as_encoded(plan: Plan, exact_graph: StepGraph, chosen: Iterable[str], lossy: Lossy) -> Plan:
    """A plan of a step with encoded storages that says so: what is encoded, what that adds, with what error."""
    names = tuple(chosen)
    if not names:
        return plan
    residences = encode_residences(plan.residences, names, lossy)
    error = error_on_normal_numbers(lossy)
    return replace(plan, residences=residences, exact_graph=exact_graph, errors=dict.fromkeys(names, error))


def encoded_by(plan: Plan) -> tuple[Lossy, frozenset[str]] | None:
    """How a plan encodes, and what; None where it encodes nothing."""
    said = {name: r for name, r in plan.residences.items() if isinstance(r, Encode)}
    if not said:
        return None
    first = next(iter(said.values()))
    return Lossy(first.codec, first.block_elems, first.seed), frozenset(said)


@lru_cache(maxsize=32)
def error_on_normal_numbers(lossy: Lossy) -> float:
    """||decoded - x|| / ||x|| of a ReLU's output on normal numbers: what to expect before a step has been measured."""
    with undisturbed(torch.device("cpu")), measured_errors() as errors:
        drawn = torch.randn(_NORMAL_ELEMS, generator=torch.Generator().manual_seed(0))
        encode(drawn.relu_(), lossy.codec, lossy.block_elems, lossy.seed, math.inf)
    return errors[0]


class _Search:
    """Steps by the set of storages that are encoded in them."""

    def __init__(
        self, captured: Captured, lossy: Lossy, budget_bytes: int, costed: Callable[[Captured], StepGraph]
    ) -> None:
        self._captured = captured
        self._lossy = lossy
        self._budget_bytes = budget_bytes
        self._costed = costed
        self._offers = offers(captured, lossy)
        self._graphs: dict[frozenset[str], StepGraph] = {frozenset(): costed(captured)}
        self._seconds: dict[frozenset[str], float] = {}
        self._choice = recompute_choice(self.exact)

    @property
    def exact(self) -> StepGraph:
        return self.graph(frozenset())

    def step(self, chosen: frozenset[str]) -> Captured:
        return encoded(self._captured, chosen, self._lossy) if chosen else self._captured

    def graph(self, chosen: frozenset[str]) -> StepGraph:
        if chosen not in self._graphs:
            self._graphs[chosen] = self._costed(self.step(chosen))
        return self._graphs[chosen]

    def sets(self) -> Iterable[frozenset[str]]:
        """Sets worth a plan: none first, then the best that the search finds."""
        yield frozenset()
        if not self._offers:
            return
        self._improve(time.perf_counter() + _SEARCH_SECONDS)
        ranked = sorted((s for s in self._seconds if s), key=lambda s: (self._seconds[s], -len(s)))
        yield from ranked[:_PLANNED]

    def _improve(self, deadline: float) -> None:
        ordered = [offer.storage for offer in sorted(self._offers, key=self._worth, reverse=True)]
        for share in _SHARES:
            self._estimate(frozenset(ordered[: math.ceil(share * len(ordered))]))
        best = min(self._seconds, key=lambda s: self._seconds[s])
        improved = True
        while improved:
            improved = False
            for storage in ordered:
                if time.perf_counter() > deadline:
                    return
                other = best ^ {storage}
                if other and self._estimate(other) < self._seconds[best]:
                    best, improved = other, True

    def _estimate(self, chosen: frozenset[str]) -> float:
        if chosen not in self._seconds:
            self._seconds[chosen] = estimated_seconds(self.graph(chosen), self._budget_bytes)
        return self._seconds[chosen]

    def _worth(self, offer: Offer) -> float:
        """Seconds a byte that recomputing it would take: what an encoding saves."""
        choice = self._choice
        reruns = choice.reruns.get(choice.graph.storage_called[offer.storage].id, ())
        return sum(choice.graph.ops[op].second.seconds for op in reruns) / offer.nbytes
