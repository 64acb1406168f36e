"""Which convolution inputs to store in 8 bits a value: `lossy=` of `shoal.compile` and `shoal.plan`.

Also known as: mixed policies of compression and rematerialisation (Liu et al., GACT, ICML'22, choose bits; here the
choice is between 8 bits, keeping, recomputing and offloading).

A set of storages is judged by its relaxed program (see `planners.integer_program`), which takes milliseconds, and
improved storage by storage. The best sets are then planned in full, as is the exact step, and as many of their
neighbours as the limits allow, and the fastest plan counts. Counts end both searches, never a clock.
No optimum is claimed for the set; the plan of it is as good as `joint` makes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import Offer, encode_residences, encoded, offers
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.residence import Encode
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.errors import BudgetError, PlanError
from shoal.kernels.encoded_activation import encode, measured_errors
from shoal.lowlevel.torch_internals import isolated
from shoal.planners.joint import estimate
from shoal.planners.limits import Effort, Guard
from shoal.planners.recompute_choice import recompute_choice

log = logging.getLogger(__name__)

_Set = frozenset[str]  # names of storages
_NOTHING: _Set = frozenset()
_GOOD_ENOUGH = 0.002  # of the plain step: an exact plan that adds no more is taken
_ESTIMATING_EFFORT = 10_000_000  # the squares of the numbers of ops, added up over all estimates
_PLANNING_OPS = 3_000  # ops of all steps planned in full, after which no further set is
_SHARES = (1.0, 0.75, 0.5, 0.25)
_PLANNED = 2  # sets that are planned in full whatever that takes
_GUARD_SECONDS = 600.0  # of the whole search: the plan says so where it is reached
_NORMAL_ELEMS = 1 << 16


def choose_encoded(
    captured: Captured,
    lossy: LossyOptions,
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
        costed: the step's graph with seconds, workspaces, static memory and link; for encoded steps too.
        plan: plans such a graph, or raises BudgetError.
        before: storages that an earlier run of this step encoded: taken again if a plan of them fits.

    Raises:
        BudgetError: no plan fits, of the exact step or of one with encoded storages; the one that came nearest.
    """
    search = _Search(captured, lossy, budget_bytes, costed, plan)
    chosen = None if before is None else frozenset(before)
    if chosen is not None and not search.fits(chosen):
        log.warning("%s: what an earlier run encoded does not fit here; choosing anew", captured.graph.model)
        chosen = None
    if chosen is None:
        chosen = search.best()
    log.info("%s: %d storages encoded inside %s", captured.graph.model, len(chosen), format_bytes(budget_bytes))
    return search.step(chosen), as_encoded(search.planned(chosen), search.exact, chosen, lossy)


def as_encoded(plan: Plan, exact_graph: StepGraph, chosen: Iterable[str], lossy: LossyOptions) -> Plan:
    """A plan of a step with encoded storages that says so: what is encoded, what that adds, with what error."""
    names = tuple(chosen)
    if not names:
        return plan
    codecs_seconds = plan.plain_seconds - simulate(exact_graph, {}).seconds
    return replace(
        plan,
        residences=encode_residences(plan.residences, names, lossy),
        lower_bound_seconds=plan.lower_bound_seconds + codecs_seconds,
        exact_graph=exact_graph,
        errors=dict.fromkeys(names, error_on_normal_numbers(lossy)),
    )


def encoded_by(plan: Plan) -> tuple[LossyOptions, frozenset[str]] | None:
    """How a plan encodes, and what; None where it encodes nothing."""
    encodings = {name: r for name, r in plan.residences.items() if isinstance(r, Encode)}
    if not encodings:
        return None
    first = next(iter(encodings.values()))
    return LossyOptions(first.codec, first.block_elems, first.seed), frozenset(encodings)


@lru_cache(maxsize=32)
def error_on_normal_numbers(lossy: LossyOptions) -> float:
    """||decoded - x|| / ||x|| of a ReLU's output on normal numbers: what to expect before a step has been measured."""
    with isolated(torch.device("cpu")), measured_errors() as errors:
        drawn = torch.randn(_NORMAL_ELEMS, generator=torch.Generator().manual_seed(0))
        encode(drawn.relu_(), lossy.codec, lossy.block_elems, lossy.seed, math.inf)
    return errors[0]


class _Search:
    """Looks through the sets of storages that may be encoded."""

    def __init__(
        self,
        captured: Captured,
        lossy: LossyOptions,
        budget_bytes: int,
        costed: Callable[[Captured], StepGraph],
        plan: Callable[[StepGraph], Plan],
    ) -> None:
        self._captured = captured
        self._lossy = lossy
        self._budget_bytes = budget_bytes
        self._costed = costed
        self._plan = plan
        self._graphs: dict[_Set, StepGraph] = {}
        self._estimates: dict[_Set, tuple[float, float]] = {}
        self._plans: dict[_Set, Plan | BudgetError] = {}
        self._guard = Guard(_GUARD_SECONDS)

    @property
    def exact(self) -> StepGraph:
        return self._graph(_NOTHING)

    def step(self, chosen: _Set) -> Captured:
        """The step with these encoded."""
        return encoded(self._captured, chosen, self._lossy) if chosen else self._captured

    def fits(self, chosen: _Set) -> bool:
        """Whether there is a plan with these encoded."""
        try:
            return isinstance(self._try(chosen), Plan)
        except PlanError:
            return False

    def planned(self, chosen: _Set) -> Plan:
        """The plan with these encoded.

        Raises:
            BudgetError: there is none.
        """
        made = self._try(chosen)
        if isinstance(made, BudgetError):
            raise made
        return replace(made, stopped_early=tuple(dict.fromkeys((*made.stopped_early, *self._guard.stopped))))

    def best(self) -> _Set:
        """The set with the fastest plan; of none, the one that came nearest."""
        exact = self._try(_NOTHING)
        enough = isinstance(exact, Plan) and exact.added_seconds <= _GOOD_ENOUGH * exact.plain_seconds
        offered = [] if enough else self._offered()
        if offered:
            self._improve(offered)
            effort = Effort("choice of what to encode", _PLANNING_OPS, self._guard)
            for chosen in self._by_estimate(self._estimates)[:_PLANNED]:
                self._try(chosen)
                effort.spend(len(self._graph(chosen).ops))
            in_vain = 0  # tries since one came nearer, while nothing fits
            while not effort.is_spent and in_vain < _PLANNED:
                leading = self._leading()
                near = {leading ^ {storage} for storage in offered} - self._plans.keys()
                if not near:
                    break
                chosen = self._by_estimate(near)[0]
                self._try(chosen)
                effort.spend(len(self._graph(chosen).ops))
                nothing_fits = isinstance(self._plans[leading], BudgetError)
                in_vain = in_vain + 1 if nothing_fits and self._leading() == leading else 0
        return self._leading()

    def _leading(self) -> _Set:
        def rank(chosen: _Set) -> tuple[float, float]:
            made = self._plans[chosen]
            return (
                (0.0, made.predicted_seconds) if isinstance(made, Plan) else (made.least_feasible_bytes or 0, math.inf)
            )

        return min(self._plans, key=rank)

    def _by_estimate(self, sets: Iterable[_Set]) -> list[_Set]:
        return sorted((s for s in sets if s), key=lambda s: (self._estimate(s), len(s), sorted(s)))

    def _offered(self) -> list[str]:
        """What may be encoded, first what would take the most time for its bytes to recompute."""
        choice = recompute_choice(self.exact)

        def worth(offer: Offer) -> float:
            reruns = choice.reruns.get(choice.graph.storage_called[offer.storage].id, ())
            return sum(choice.graph.ops[op].second.longer_seconds for op in reruns) / offer.nbytes

        return [offer.storage for offer in sorted(offers(self._captured, self._lossy), key=worth, reverse=True)]

    def _improve(self, offered: Sequence[str]) -> None:
        """Estimate shares of what is offered, then whatever differs from the best so far in one storage."""
        effort = Effort("choice of what to encode", _ESTIMATING_EFFORT, self._guard)
        best = min((frozenset(offered[: math.ceil(share * len(offered))]) for share in _SHARES), key=self._estimate)
        improved = True
        while improved:
            improved = False
            for storage in offered:
                if effort.is_spent:
                    return
                other = best ^ {storage}
                effort.spend(len(self.exact.ops) ** 2)
                if other and self._estimate(other) < self._estimate(best):
                    best, improved = other, True

    def _graph(self, chosen: _Set) -> StepGraph:
        if chosen not in self._graphs:
            self._graphs[chosen] = self._costed(self.step(chosen))
        return self._graphs[chosen]

    def _estimate(self, chosen: _Set) -> tuple[float, float]:
        if chosen not in self._estimates:
            self._estimates[chosen] = estimate(self._graph(chosen), self._budget_bytes, guard=self._guard)
        return self._estimates[chosen]

    def _try(self, chosen: _Set) -> Plan | BudgetError:
        if chosen not in self._plans:
            try:
                self._plans[chosen] = self._plan(self._graph(chosen))
            except BudgetError as error:
                self._plans[chosen] = error
        return self._plans[chosen]
