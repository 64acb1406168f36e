"""Keep, recompute or offload, decided for all storages at once: a mixed-integer program, then local search.

Also known as: optimal rematerialisation at the granularity of tensors (Jain et al., Checkmate, MLSys'20; Shah et al.,
MONeT, ICLR'21). Those programs have a variable for every pair of op and time; this one has one for every storage, since
"as late as possible" already says when a recomputation happens (see `integer_program`).

Without a link to the host, inside a budget that keeping everything does not fit:

1. *Lower bound.* A relaxation of the program, below every plan that keeps or recomputes, however often.
2. *Integer program.* The fastest plan that recomputes each storage at most once. Its memory is what `simulate` adds up,
   but for the scratch of the reruns; so each solution is simulated, and where its peak is over the budget the program
   is solved again with the difference set aside.
3. *Dynamic program* (`chain`), where that plan is far from the bound or there is none: it may recompute several times.
4. *Local search* (`local_search`), further off: it also recomputes earlier than it must.

`fill_slack` then keeps more where one of these leaves room. With a link, a storage may also wait on the host. The
program models the link as divisible bandwidth, so its relaxed solutions are starts for `iterated_search`, which places
the real copies. The plan of `hmms` and the plans without the link compete.

Without a link the plan equals the optimum among plans that recompute each storage at most once, and as late as
possible, up to the solver's gap and the window of `integer_program`; otherwise it is good, not proven.

A plan is a function of the arguments. Counts end each search (see `limits`), never a clock; where the guard behind them
strikes, the plan says so.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.residence import Offload, Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.errors import BudgetError
from shoal.planners.chain import chain, smallest_peak
from shoal.planners.fill_slack import fill_slack
from shoal.planners.infeasible import infeasible
from shoal.planners.integer_program import NOTHING_KNOWN, Chosen, Solution, solve
from shoal.planners.iterated_search import IteratedSearch
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import DEFAULT, Effort, Guard, Limits
from shoal.planners.local_search import local_search
from shoal.planners.papers.hmms import hmms, within_limit
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice
from shoal.planners.transfer_places import with_offloads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Simulated:
    """Residences and their exact cost."""

    residences: Mapping[str, Residence]
    peak_bytes: int
    seconds: float


def joint(graph: StepGraph, hardware: Hardware, budget_bytes: int, *, limits: Limits = DEFAULT) -> Plan:
    """The fastest plan inside the budget, of Keep, Recompute and, where the step has a link, Offload.

    Args:
        graph: the step, with seconds, workspaces and, for offloading, a link.
        hardware: what the seconds are for.
        budget_bytes: most device bytes in use at any position of the step.
        limits: how far to search, and which parts of the search to leave out.

    Raises:
        BudgetError: no plan was found that fits; it names the least budget for which one was.
    """
    started = time.perf_counter()
    guard = Guard(limits.guard_seconds)
    choice = recompute_choice(graph)
    best: _Simulated | None = _as_chosen(choice, Chosen(frozenset(choice.candidates)))
    bound_seconds = 0.0
    if best is not None and best.peak_bytes > budget_bytes:
        search = _Search(hardware, budget_bytes, best.seconds, limits, guard)
        best, bound_seconds = search.without_link(choice) if graph.link is None else search.with_link(choice)
    if best is None:
        least = _smallest(graph, hardware, limits)
        if least.predicted_peak_bytes > budget_bytes:
            raise infeasible(graph, least, budget_bytes)
        best = _simulated(graph, least.residences)
        guard.note(*least.stopped_early)
    _warn(graph, limits, guard)
    return Plan(
        graph,
        best.residences,
        "joint",
        hardware.name,
        budget_bytes,
        bound_seconds,
        time.perf_counter() - started,
        stopped_early=tuple(guard.stopped),
    )


def estimate(
    graph: StepGraph, budget_bytes: int, *, limits: Limits = DEFAULT, guard: Guard | None = None
) -> tuple[float, float]:
    """An estimate of what `joint` finds, within milliseconds: bytes over the budget, and seconds of the step.

    The relaxed program: a storage may be kept in one part, recomputed in another and offloaded in the rest. Where that
    does not fit, the seconds are infinite, and it may still be that recomputing more than once does.
    """
    choice = recompute_choice(graph)
    solution = solve(choice, budget_bytes, whole=False, limits=limits, guard=guard)
    if math.isfinite(solution.added_seconds):
        return 0.0, sum(op.seconds for op in graph.ops) + solution.added_seconds
    least = solve(choice, None, whole=False, limits=limits, guard=guard)
    chosen = least.chosen or Chosen(frozenset())
    return max(0.0, _as_chosen(choice, chosen).peak_bytes - budget_bytes), math.inf


def least_seconds(graph: StepGraph, budget_bytes: int, *, limits: Limits = DEFAULT) -> float:
    """No plan inside the budget makes a faster step than this; infinity where none fits. Within milliseconds.

    The relaxed program, with every storage its choice and parts of storages in several places.
    """
    wide = recompute_choice(graph, every=True)
    solution = solve(wide, budget_bytes, early=False, whole=False, limits=limits)
    return sum(op.seconds for op in graph.ops) + solution.bound_seconds


def least_peak_bytes(graph: StepGraph, *, limits: Limits = DEFAULT) -> int:
    """About the smallest peak that a plan has, by the same program. Within milliseconds."""
    choice = recompute_choice(graph)
    least = solve(choice, None, whole=False, limits=limits)
    return _as_chosen(choice, least.chosen or Chosen(frozenset())).peak_bytes


def _warn(graph: StepGraph, limits: Limits, guard: Guard) -> None:
    if guard.stopped:
        log.warning(
            "%s: planning took longer than %g s, which ended %s early; planned again, the plan may be another one",
            graph.model or "model",
            limits.guard_seconds,
            ", ".join(guard.stopped),
        )


class _Search:
    """The search for the fastest plan inside one budget.

    Args:
        hardware: what the seconds are for.
        budget_bytes: most device bytes in use at any position.
        plain_seconds: of the step with everything kept.
        limits, guard: how far to search.
    """

    def __init__(
        self, hardware: Hardware, budget_bytes: int, plain_seconds: float, limits: Limits, guard: Guard
    ) -> None:
        self._hardware = hardware
        self._budget_bytes = budget_bytes
        self._plain_seconds = plain_seconds
        self._limits = limits
        self._guard = guard

    def without_link(
        self, choice: RecomputeChoice, bound_seconds: float | None = None
    ) -> tuple[_Simulated | None, float]:
        """The fastest plan of Keep and Recompute, and the lower bound of what it adds, if that is not known yet."""
        graph, limits = choice.graph, self._limits
        if bound_seconds is None:
            bound_seconds = self._bound(graph).bound_seconds
        best = self._filled(graph, self._program(choice))
        if limits.chain and self._is_off(best, bound_seconds, limits.close_enough):
            best = _faster(best, self._filled(graph, self._dynamic_program(graph)))
        if limits.local_search and self._is_off(best, bound_seconds, limits.far_off):
            best = _faster(best, self._local_searches(choice))
        return best, bound_seconds

    def with_link(self, choice: RecomputeChoice) -> tuple[_Simulated | None, float]:
        """The fastest plan of all three residences, and the lower bound of what it adds."""
        graph, limits = choice.graph, self._limits
        bound = self._bound(graph)
        best: _Simulated | None = None
        if limits.hmms:
            best = self._fitting(graph, hmms(graph, self._hardware, 0).residences)
        if limits.iterated_search and math.isfinite(bound.bound_seconds):
            enough_seconds = self._plain_seconds * (1 + limits.close_enough) + bound.bound_seconds
            effort = self._effort("iterated search", limits.iterated_search_ops)
            search = IteratedSearch(choice, self._budget_bytes, enough_seconds, limits, effort)
            chosen = search.improve(self._starts(choice, bound.chosen))
            best = _faster(best, self._fitting(graph, search.residences(chosen)))
        alone = recompute_choice(replace(graph, link=None))
        at_least_seconds = self._bound(alone.graph).bound_seconds
        if best is None or self._plain_seconds + at_least_seconds < best.seconds:
            without, _ = self.without_link(alone, at_least_seconds)
            best = _faster(best, self._filled(graph, without))
        return best, bound.bound_seconds

    def _is_off(self, best: _Simulated | None, bound_seconds: float, share: float) -> bool:
        """Whether the plan is further than a share of the plain step above the lower bound, or there is none."""
        return best is None or best.seconds - self._plain_seconds - bound_seconds > share * self._plain_seconds

    def _effort(self, part: str, max_ops: int) -> Effort:
        return Effort(part, max_ops, self._guard)

    def _bound(self, graph: StepGraph) -> Solution:
        """The relaxation below every plan, which must leave every storage its choice."""
        if not self._limits.lower_bound:
            return NOTHING_KNOWN
        wide = recompute_choice(graph, every=True)
        return solve(wide, self._budget_bytes, early=False, limits=self._limits, guard=self._guard)

    def _starts(self, choice: RecomputeChoice, relaxed: Chosen | None) -> Iterator[Chosen]:
        """Near good choices: the bound's, linear programs with some room set aside, the paper's, all away."""
        graph, candidates = choice.graph, frozenset(choice.candidates)
        if relaxed is not None:
            yield Chosen(relaxed.kept & candidates, relaxed.offloaded & candidates)
        largest_bytes = max(graph.storages[s].nbytes for s in candidates) if candidates else 0
        for share in self._limits.set_aside if self._limits.integer_program else ():
            room_bytes = int(self._budget_bytes - share * largest_bytes)
            if room_bytes > 0:
                solution = solve(choice, room_bytes, whole=False, limits=self._limits, guard=self._guard)
                if solution.chosen is not None:
                    yield solution.chosen
        if graph.link is not None:
            by_the_paper = candidates.intersection(within_limit(graph, graph.link))
            yield Chosen(candidates - by_the_paper, by_the_paper)
        yield _everything_away(choice)

    def _program(self, choice: RecomputeChoice) -> _Simulated | None:
        """The fastest plan that recomputes each storage at most once, exact in its peak."""
        room_bytes = self._budget_bytes
        start: Chosen | None = None
        for _ in range(self._limits.max_solves if self._limits.integer_program else 0):
            solution = solve(choice, room_bytes, start=start, limits=self._limits, guard=self._guard)
            if solution.chosen is None:
                return None
            found = _as_chosen(choice, solution.chosen)
            if found.peak_bytes <= self._budget_bytes:
                return found
            start = solution.chosen
            room_bytes -= found.peak_bytes - self._budget_bytes
        return None

    def _dynamic_program(self, graph: StepGraph) -> _Simulated | None:
        """The fastest plan of `chain`."""
        try:
            plan = chain(graph, self._hardware, self._budget_bytes)
        except BudgetError:
            return None
        return _simulated(graph, plan.residences)

    def _local_searches(self, choice: RecomputeChoice) -> _Simulated | None:
        """The fastest of what local search makes of the plans with the smallest peaks that are known."""
        graph = choice.graph
        effort = self._effort("local search", self._limits.local_search_ops)
        found = [
            local_search(graph, start, self._budget_bytes, self._limits, effort)
            for start in _smallest_peaks(choice, self._hardware, self._limits, self._guard)
        ]
        filled = [self._filled(graph, _simulated(graph, r)) for r in found if r is not None]
        return min((one for one in filled if one is not None), key=lambda one: one.seconds, default=None)

    def _filled(self, graph: StepGraph, found: _Simulated | None) -> _Simulated | None:
        """The plan with more kept where it leaves room."""
        if found is None or not self._limits.fill_slack:
            return found
        effort = self._effort("fill slack", self._limits.fill_slack_ops)
        return _simulated(graph, fill_slack(graph, found.residences, self._budget_bytes, effort))

    def _fitting(self, graph: StepGraph, residences: Mapping[str, Residence]) -> _Simulated | None:
        """The plan simulated, if device and host have room for it."""
        host_bytes = sum(s.host_bytes for s in graph.storages if isinstance(residences.get(s.name), Offload))
        limit_bytes = graph.link.host_bytes if graph.link is not None else 0
        found = _simulated(graph, residences)
        fits = found.peak_bytes <= self._budget_bytes and (not limit_bytes or host_bytes <= limit_bytes)
        return found if fits else None


@lru_cache(maxsize=4)  # one answer for every budget that does not fit
def _smallest(graph: StepGraph, hardware: Hardware, limits: Limits) -> Plan:
    """The plan with the smallest peak that is known.

    It is what local search makes of the smallest ones, a step of 2 % at a time, or one that offloads as much as it can.
    """
    guard = Guard(limits.guard_seconds)
    search = _smallest_with_link if graph.link is not None else _lowered
    least = search(graph, hardware, limits, guard)
    guard.note(*least.stopped_early)
    _warn(graph, limits, guard)
    return replace(least, stopped_early=tuple(guard.stopped))


def _lowered(graph: StepGraph, hardware: Hardware, limits: Limits, guard: Guard) -> Plan:
    starts = _smallest_peaks(recompute_choice(graph), hardware, limits, guard)
    plans = [Plan(graph, start, "joint", hardware.name) for start in starts]
    least = min(plans, key=lambda plan: plan.predicted_peak_bytes)
    effort = Effort("search for the smallest peak", limits.smallest_peak_ops, guard)
    for start in plans if limits.local_search else ():
        while not effort.is_spent:
            aim_bytes = int(limits.lower_peak_share * least.predicted_peak_bytes)
            lower = local_search(graph, start.residences, aim_bytes, limits, effort)
            if lower is None:
                break
            least = start = Plan(graph, lower, "joint", hardware.name)
    return least


def _smallest_with_link(graph: StepGraph, hardware: Hardware, limits: Limits, guard: Guard) -> Plan:
    choice = recompute_choice(graph)
    plans = [replace(_smallest(replace(graph, link=None), hardware, limits), graph=graph)]
    chosen_ones = [_everything_away(choice)]
    if limits.integer_program:
        solution = solve(choice, None, limits=limits, guard=guard)
        chosen_ones += [solution.chosen] if solution.chosen is not None else []
    for chosen in chosen_ones:
        kept = just_in_time(graph, choice.kept_for(chosen.kept | chosen.offloaded))
        residences = with_offloads(graph, kept, chosen.offloaded, budget_bytes=1)
        plans.append(Plan(graph, residences, "joint", hardware.name))
    host_bytes = graph.link.host_bytes if graph.link is not None else 0
    there_is_room = (plan for plan in plans if not host_bytes or plan.host_bytes <= host_bytes)
    return min(there_is_room, key=lambda plan: plan.predicted_peak_bytes)


def _smallest_peaks(
    choice: RecomputeChoice, hardware: Hardware, limits: Limits, guard: Guard
) -> list[Mapping[str, Residence]]:
    """Plans with small peaks: of the dynamic program, of the integer program, and by a rule of thumb."""
    found: list[Mapping[str, Residence]] = []
    if limits.chain:
        found.append(smallest_peak(choice.graph, hardware).residences)
    if limits.integer_program:
        chosen, stopped = _of_smallest_peak(choice.graph, limits)
        guard.note(*stopped)
        if chosen is not None:
            found.append(_as_chosen(choice, chosen).residences)
    return [*found, _narrow(choice, limits.narrow_share)]


@lru_cache(maxsize=4)  # asked for by the search inside the budget, and by that for the smallest peak
def _of_smallest_peak(graph: StepGraph, limits: Limits) -> tuple[Chosen | None, tuple[str, ...]]:
    """What the integer program for the smallest peak chooses, and what the time limit ended early."""
    guard = Guard(limits.guard_seconds)
    solution = solve(recompute_choice(graph), None, gap=limits.gap_of_smallest_peak, limits=limits, guard=guard)
    return solution.chosen, tuple(guard.stopped)


def _narrow(choice: RecomputeChoice, share: float) -> Mapping[str, Residence]:
    """Keep only what is much smaller than what its recomputation makes on the way: a pooling's result, say."""
    ops, storages = choice.graph.ops, choice.graph.storages

    def widest_bytes(storage: int) -> int:
        return max(storages[made].nbytes for op in choice.reruns[storage] for made in ops[op].second.writes)

    kept = (s for s in choice.candidates if storages[s].nbytes <= share * widest_bytes(s))
    return _as_chosen(choice, Chosen(frozenset(kept))).residences


def _everything_away(choice: RecomputeChoice) -> Chosen:
    saved = frozenset(s for s in choice.graph.saved if choice.graph.storages[s].kind == "activation")
    return Chosen(frozenset(choice.candidates) - saved, saved)


def _faster(one: _Simulated | None, other: _Simulated | None) -> _Simulated | None:
    both = [found for found in (one, other) if found is not None]
    return min(both, key=lambda found: found.seconds, default=None)


def _as_chosen(choice: RecomputeChoice, chosen: Chosen) -> _Simulated:
    """The plan that recomputes what is not kept as late as possible; what is offloaded counts as recomputed."""
    return _simulated(choice.graph, just_in_time(choice.graph, choice.kept_for(chosen.kept)))


def _simulated(graph: StepGraph, residences: Mapping[str, Residence]) -> _Simulated:
    return _Simulated(residences, *peak_and_seconds(graph, schedule(graph, residences)))
