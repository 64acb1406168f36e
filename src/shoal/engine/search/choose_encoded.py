"""Which convolution inputs to store in 8 bits a value: "encode" of `allow=`.

Also known as: mixed policies of compression and rematerialisation (Liu et al., GACT, ICML'22, choose bits; here the
choice is between 8 bits, keeping, recomputing and offloading).

A set of storages is judged by its relaxed program (see `planners.integer_program`), which takes a moment, and
improved storage by storage. The best sets are then planned in full, as is the exact step, and as many of their
neighbours as the limits allow, and the fastest plan counts. Once something fits, a set is planned only where its
relaxed program is faster. What does not fit by its relaxed program is planned only where it may fit by recomputing
again and again, or to tell what would. Counts end both searches, never a clock.
No optimum is claimed for the set; the plan of it is as good as `joint` makes it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import Offer, encode_residences, payloads, with_free_codecs
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.residence import Encode, Residence
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.engine.search.encoded_steps import EncodedSteps
from shoal.engine.search.encoding import IF_FASTER, EncodeBelow, EncodeIfFaster, NotFaster
from shoal.errors import BudgetError, PlanError
from shoal.kernels.encoded_activation import encode, measured_errors
from shoal.lowlevel.torch_internals import isolated
from shoal.planners.estimates import about_least_bytes, estimate, quick_least
from shoal.planners.limits import Effort, Guard
from shoal.planners.recompute_choice import recompute_choice

log = logging.getLogger(__name__)

_Set = frozenset[str]  # names of storages
_NOTHING: _Set = frozenset()
_GOOD_ENOUGH = 0.002  # of the plain step: an exact plan that adds no more is taken
_ESTIMATING_EFFORT = 10_000_000  # the squares of the numbers of ops, added up over all estimates
_PLANNING_OPS = 3_000  # ops of all steps planned in full, after which no further set is
_WORTH_A_PLAN = 0.005  # of the fastest plan's step: a set that may gain no more is not planned
BOUNDING_SHARES = (1.0, 0.5)  # with which storages encoded a variant is bounded
_SHARES = (1.0, 0.75, 0.5, 0.25)
_PLANNED = 2  # sets that are planned in full, and then neighbours of theirs that are no better
_GUARD_SECONDS = 600.0  # of the whole search: the plan says so where it is reached
_NORMAL_ELEMS = 1 << 16


def choose_encoded(
    steps: EncodedSteps,
    budget_bytes: int,
    plan: Callable[[StepGraph], Plan],
    before: Iterable[str] | None = None,
    encoding: EncodeIfFaster | EncodeBelow = IF_FASTER,
    in_loop: Callable[[StepGraph], StepGraph] = lambda graph: graph,
) -> tuple[Mapping[str, Captured], Plan]:
    """The fastest plan inside the budget that may encode convolution inputs, and the graphs it is for.

    Args:
        steps: the step with whatever is encoded.
        budget_bytes: most bytes in use at any position.
        plan: plans such a step, or raises BudgetError.
        before: storages that an earlier run of this step encoded: taken again if a plan of them fits.
        encoding: which plans are asked for; if one is known, the exact step is not planned.
        in_loop: a step of `steps` → the same with what the training loop holds, to be planned.

    Raises:
        BudgetError: no plan fits, of the exact step or of one with encoded storages; the one that came nearest.
        NotFaster: no plan of encoded storages takes less than what `encoding` says.
    """
    below_seconds = encoding.seconds if isinstance(encoding, EncodeBelow) else math.inf
    search = _ChooseEncodedSearch(steps, budget_bytes, plan, in_loop, below_seconds)
    name = steps.exact.model
    chosen = None if before is None else frozenset(before)
    if chosen is not None and not search.fits(chosen):
        log.warning("%s: what an earlier run encoded does not fit here; choosing again", name)
        chosen = None
    if chosen is None:
        chosen = search.best_below() if isinstance(encoding, EncodeBelow) else search.best()
    elif search.planned(chosen).predicted_seconds >= below_seconds:
        raise NotFaster
    log.info("%s: %d storages encoded inside %s", name, len(chosen), format_bytes(budget_bytes))
    return steps.traced(chosen), as_encoded(search.planned(chosen), search.exact, chosen, steps.lossy)


def bounding_step(
    steps: EncodedSteps, share: float, in_loop: Callable[[StepGraph], StepGraph] = lambda graph: graph
) -> StepGraph:
    """The step with a share of what may be encoded, by codecs that take no time, and no bytes in addition to exact
    values.

    That share is what takes the most time for its bytes to recompute. Where nothing may be encoded, it is the step.

    Args:
        steps, in_loop: as for `choose_encoded`.
        share: of the storages.
    """
    names = _by_worth(steps, in_loop(steps.exact))
    return with_free_codecs(in_loop(steps.graph(names[: math.ceil(share * len(names))])))


def as_encoded(plan: Plan, exact_graph: StepGraph, chosen: Iterable[str], lossy: LossyOptions) -> Plan:
    """A plan of a step with encoded storages that says so: what is encoded, what that adds, with what error."""
    names = tuple(chosen)
    if not names:
        return plan
    codecs_seconds = plan.plain_seconds - simulate(exact_graph, {}).seconds
    return replace(
        plan,
        residences=encode_residences(plan.residences, payloads(plan.graph), lossy),
        lower_bound_seconds=plan.lower_bound_seconds + codecs_seconds,
        exact_graph=exact_graph,
        errors=dict.fromkeys(names, error_on_normal_numbers(lossy)),
    )


def encoded_by(residences: Mapping[str, Residence]) -> tuple[LossyOptions, frozenset[str]] | None:
    """How a plan encodes, and what; None where it encodes nothing."""
    encodings = {name: r for name, r in residences.items() if isinstance(r, Encode)}
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


def _by_worth(steps: EncodedSteps, exact: StepGraph) -> list[str]:
    """What may be encoded, first what would take the most time for its bytes to recompute."""
    choice = recompute_choice(exact)

    def worth(offer: Offer) -> float:
        reruns = choice.reruns.get(choice.graph.storage_called[offer.storage].id, ())
        return sum(choice.graph.ops[op].second.longer_seconds for op in reruns) / offer.nbytes

    return [offer.storage for offer in sorted(steps.offers, key=worth, reverse=True)]


class _ChooseEncodedSearch:
    """Looks through the sets of storages that may be encoded; arguments as for `choose_encoded`."""

    def __init__(
        self,
        steps: EncodedSteps,
        budget_bytes: int,
        plan: Callable[[StepGraph], Plan],
        in_loop: Callable[[StepGraph], StepGraph],
        below_seconds: float,
    ) -> None:
        self._below_seconds = below_seconds
        self._steps = steps
        self._budget_bytes = budget_bytes
        self._in_loop = in_loop
        self._plan = plan
        self._graphs: dict[_Set, StepGraph] = {}
        self._estimates: dict[_Set, tuple[float, float]] = {}
        self._plans: dict[_Set, Plan | BudgetError] = {}
        self._guard = Guard(_GUARD_SECONDS)
        self._estimating = Effort("choice of what to encode", _ESTIMATING_EFFORT, self._guard)

    @property
    def exact(self) -> StepGraph:
        return self._graph(_NOTHING)

    @property
    def _is_beside_a_plan(self) -> bool:
        """Whether a plan that encodes nothing is known: then a set has to be faster, and fitting is no gain."""
        return math.isfinite(self._below_seconds)

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
        """The set with the fastest plan, maybe of nothing; where none fits, the one that came nearest."""
        exact = self._try(_NOTHING) if self._is_expected_to_fit(_NOTHING) else None
        if not isinstance(exact, Plan) or exact.added_seconds > _GOOD_ENOUGH * exact.plain_seconds:
            self._plan_sets()
        return self._leading()

    def best_below(self) -> _Set:
        """The set with the fastest plan, where that is faster than what is known.

        Raises:
            NotFaster: none is.
        """
        self._plan_sets()
        if not self._plans or self._known_seconds >= self._below_seconds:
            raise NotFaster
        return self._leading()

    def _plan_sets(self) -> None:
        """Plan the best sets by their estimates, then neighbours of the one with the fastest plan."""
        offered = _by_worth(self._steps, self.exact)
        starts = [frozenset(offered[: math.ceil(share * len(offered))]) for share in _SHARES if offered]
        if not any(self._fits_by_estimate(chosen) for chosen in (*starts, _NOTHING)):
            if not self._is_beside_a_plan:
                self._plan_nearest([*starts, _NOTHING])
            return
        if not offered:
            return
        self._improve(offered, starts)
        effort = Effort("choice of what to encode", _PLANNING_OPS, self._guard)
        for chosen in self._by_estimate(self._estimates)[:_PLANNED]:
            if self._may_be_faster(chosen):
                self._try(chosen)
                effort.spend(len(self._graph(chosen).ops))
        if self._plans and (not self._is_beside_a_plan or isinstance(self._plans[self._leading()], Plan)):
            self._plan_neighbours(offered, effort)

    def _plan_neighbours(self, offered: Sequence[str], effort: Effort) -> None:
        """Plan what differs from the fastest plan's set in one storage, the best by its estimate first."""
        in_vain, patience = 0, 1 if self._is_beside_a_plan else _PLANNED  # tries since one was better
        while not effort.is_spent and in_vain < patience:
            leading = self._leading()
            near = (leading ^ {storage} for storage in offered)
            estimated = [one for one in near if one and one not in self._plans and self._has_estimate(one)]
            chosen = next(iter(self._by_estimate(estimated)), _NOTHING)
            if not chosen or not self._may_be_faster(chosen):
                return
            self._try(chosen)
            effort.spend(len(self._graph(chosen).ops))
            in_vain = in_vain + 1 if self._leading() == leading else 0

    def _plan_nearest(self, sets: Iterable[_Set]) -> None:
        """Where nothing fits by the relaxed program, plan what needs least until that fits: at least one set."""
        if any(isinstance(made, Plan) for made in self._plans.values()):
            return
        about_bytes = {chosen: about_least_bytes(self._graph(chosen)) for chosen in sets}
        for chosen in sorted(about_bytes, key=about_bytes.__getitem__)[:_PLANNED]:
            if self._plans and not self._is_expected_to_fit(chosen):
                return
            if isinstance(self._try(chosen), Plan):
                return

    def _fits_by_estimate(self, chosen: _Set) -> bool:
        return math.isfinite(self._estimate(chosen)[1])

    def _is_expected_to_fit(self, chosen: _Set) -> bool:
        """Whether a set fits by its relaxed program, or may fit where storages are recomputed again and again."""
        if self._fits_by_estimate(chosen):
            return True
        return quick_least(self._graph(chosen), self._budget_bytes).expected_bytes <= self._budget_bytes

    def _may_be_faster(self, chosen: _Set) -> bool:
        """Whether a set is faster if planned twice as near to its bound as the exact step; where nothing fits all may.

        No exact plan of this step is faster than what is known.
        """
        known_seconds, bound_seconds = self._known_seconds, self._estimate(chosen)[1]
        if math.isinf(known_seconds):
            return True
        exact_gap = max(0.0, known_seconds / self._estimate(_NOTHING)[1] - 1)
        return bound_seconds * (1 + exact_gap / 2) < (1 - _WORTH_A_PLAN) * known_seconds

    @property
    def _known_seconds(self) -> float:
        planned = [made.predicted_seconds for made in self._plans.values() if isinstance(made, Plan)]
        return min([*planned, self._below_seconds])

    def _leading(self) -> _Set:
        def rank(chosen: _Set) -> tuple[float, float]:
            made = self._plans[chosen]
            return (
                (0.0, made.predicted_seconds) if isinstance(made, Plan) else (made.least_feasible_bytes or 0, math.inf)
            )

        return min(self._plans, key=rank)

    def _by_estimate(self, sets: Iterable[_Set]) -> list[_Set]:
        return sorted((s for s in sets if s), key=lambda s: (self._estimate(s), len(s), sorted(s)))

    def _improve(self, offered: Sequence[str], starts: Sequence[_Set]) -> None:
        """Beginning with these sets and nothing, estimate whatever differs from the best so far in one storage."""
        best = min([*starts, _NOTHING], key=self._estimate)
        improved = True
        while improved:
            improved = False
            for storage in offered:
                other = best ^ {storage}
                if other and not self._has_estimate(other):
                    return
                if other and self._estimate(other) < self._estimate(best):
                    best, improved = other, True

    def _graph(self, chosen: _Set) -> StepGraph:
        if chosen not in self._graphs:
            self._graphs[chosen] = self._in_loop(self._steps.graph(chosen))
        return self._graphs[chosen]

    def _has_estimate(self, chosen: _Set) -> bool:
        """Whether the set has an estimate, or gets one with the effort that is left."""
        if chosen not in self._estimates and not self._estimating.is_spent:
            self._estimate(chosen)
        return chosen in self._estimates

    def _estimate(self, chosen: _Set) -> tuple[float, float]:
        if chosen not in self._estimates:
            self._estimating.spend(len(self.exact.ops) ** 2)
            self._estimates[chosen] = estimate(self._graph(chosen), self._budget_bytes, guard=self._guard)
        return self._estimates[chosen]

    def _try(self, chosen: _Set) -> Plan | BudgetError:
        if chosen not in self._plans:
            try:
                self._plans[chosen] = self._plan(self._graph(chosen))
            except BudgetError as error:
                self._plans[chosen] = error
        return self._plans[chosen]
