"""Keep, recompute or offload, decided for all storages at once: a mixed-integer program, then local search.

Also known as: optimal rematerialisation at the granularity of tensors (Jain et al., Checkmate, MLSys'20; Shah et al.,
MONeT, ICLR'21). Those programs have a variable for every pair of op and time; this one has one for every storage, since
"as late as possible" already says when a recomputation happens (see `integer_program`).

Without a link to the host, inside a budget that keeping everything does not fit:

1. *Lower bound.* A relaxation of the program, below every plan that keeps or recomputes, however often.
2. *Integer program.* The fastest plan that recomputes each storage at most once. Its memory is what `simulate` adds up,
   but for the scratch of the reruns; so each solution is simulated, and where its peak is over the budget the program
   is solved again with the difference set aside. Where nothing fits so, local search begins with the first solution.
3. *Dynamic program* (`chain`), where that plan is far from the bound or there is none: it may recompute several times.
4. *Local search* (`local_search`), further off: it starts from what linear programs with more room choose, recomputes
   more than once, and earlier than it must. Not for a large step whose plan computes little again.
5. *On demand* (`on_demand`), where the plan computes much again or there is none: everything right before what reads
   it, and held where there is room. The local search is tried in the order of that plan too, which has room for the
   most.

`fill_slack` then keeps more where one of these leaves room. With a link, a storage may also wait on the host. The
program models the link as divisible bandwidth, so its relaxed solutions are starts for `iterated_search`, which places
the real copies. The plan of `hmms` and the plans without the link compete.

A step of many ops (`Limits.many_ops`) is given to the local search before the integer program where a linear program
says that recomputing each storage once is far from the bound.

All of this is done with the ops in the order that `order` finds for the step with everything kept.

Without a link the plan equals the optimum among plans in its order of ops that recompute each storage at most once, and
as late as possible, up to the solver's gap and the window of `integer_program`; otherwise it is good, not proven.

A plan is a function of the arguments. Counts end each search (see `limits`), never a clock; where the guard after them
strikes, the plan says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce

from shoal.core.hardware import Hardware
from shoal.core.order import op_names
from shoal.core.plan import Plan
from shoal.core.residence import Offload, Residence
from shoal.core.step import StepGraph
from shoal.errors import BudgetError
from shoal.planners.chain import chain
from shoal.planners.fill_slack import fill_slack
from shoal.planners.hold_longer import hold_longer
from shoal.planners.infeasible import fewest_bytes, infeasible
from shoal.planners.integer_program import Chosen, Solution, lower_bound, relaxed_choices, solve
from shoal.planners.iterated_search import IteratedSearch
from shoal.planners.just_in_time import just_in_time
from shoal.planners.later_readers import with_later_readers
from shoal.planners.limits import DEFAULT, Effort, Guard, Limits
from shoal.planners.local_search import local_search
from shoal.planners.on_demand import narrow, plans_on_demand
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice
from shoal.planners.simulated import Simulated, as_chosen, everything_away, in_lower_order, simulated
from shoal.planners.smallest_plan import smallest_plan

_MAX_HELD = 2  # plans on demand that are improved


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
    best, bound_seconds = None, 0.0
    if fewest_bytes(graph) <= budget_bytes:
        best, bound_seconds = _fastest(graph, hardware, budget_bytes, limits, guard)
    if best is None:
        least = smallest_plan(graph, hardware, budget_bytes, limits)
        guard.note(*least.stopped_early)
        if least.predicted_peak_bytes > budget_bytes:
            raise infeasible(replace(least, stopped_early=tuple(guard.stopped)), budget_bytes)
        search = _JointSearch(hardware, budget_bytes, graph.plain_seconds, limits, guard)
        best = search.held_longer(simulated(least.graph, least.residences))
        bound_seconds = search.tight_bound_seconds(least.graph)
    guard.warn(graph.model)
    return Plan(
        best.graph,
        best.residences,
        "joint",
        hardware.name,
        budget_bytes,
        bound_seconds,
        time.perf_counter() - started,
        stopped_early=tuple(guard.stopped),
        captured_order=op_names(graph) if best.graph is not graph else (),
    )


def _fastest(
    graph: StepGraph, hardware: Hardware, budget_bytes: int, limits: Limits, guard: Guard
) -> tuple[Simulated | None, float]:
    """The fastest plan inside the budget, in whatever order, and the lower bound of what it adds in that order."""
    choice = recompute_choice(graph)
    kept = as_chosen(choice, Chosen(frozenset(choice.candidates)))
    if kept.peak_bytes <= budget_bytes:
        return kept, 0.0
    ordered = in_lower_order(kept, limits, guard)
    if ordered is not None and ordered.peak_bytes <= budget_bytes:
        return ordered, ordered.seconds - kept.seconds if graph.has_launches else 0.0
    search = _JointSearch(hardware, budget_bytes, kept.seconds, limits, guard)
    if ordered is not None:
        choice = recompute_choice(ordered.graph)
    best, bound_seconds = search.run(choice, search.bound(choice.graph))
    best, bound_seconds = search.with_shorter_waits(best, bound_seconds)
    return search.or_on_demand(graph, best, bound_seconds)


class _JointSearch:
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

    def run(self, choice: RecomputeChoice, bound: Solution) -> tuple[Simulated | None, float]:
        """The fastest plan in the order of ops that the step has, and the lower bound of what it adds."""
        if math.isinf(bound.bound_seconds):
            return None, math.inf
        if choice.graph.link is None:
            return self.without_link(choice, bound.bound_seconds)
        return self.with_link(choice, bound)

    def with_shorter_waits(self, best: Simulated | None, bound_seconds: float) -> tuple[Simulated | None, float]:
        """The plan in an order in which the device waits less for copies back, where that is faster."""
        limits = self._limits
        may_move = limits.order and limits.later_readers
        if best is None or not may_move or not self._is_off(best, bound_seconds, limits.near_enough):
            return best, bound_seconds
        least_wait_seconds = limits.close_enough * self._plain_seconds
        effort = self._effort("order of ops", limits.order_ops)
        later = with_later_readers(best, self._budget_bytes, effort, least_wait_seconds)
        return (best, bound_seconds) if later is best else (later, self.bound(later.graph).bound_seconds)

    def or_on_demand(
        self, graph: StepGraph, best: Simulated | None, bound_seconds: float
    ) -> tuple[Simulated | None, float]:
        """The plan, or one that recomputes on demand and holds what fits in addition, where that is faster."""
        if not self._limits.on_demand or not self._is_off(best, bound_seconds, self._limits.far_off):
            return best, bound_seconds
        if self._recomputes_little(best):
            return best, bound_seconds
        found, stopped = plans_on_demand(replace(graph, link=None), self._limits)
        self._guard.note(*stopped)
        fitting = sorted((one for one in found if one.peak_bytes <= self._budget_bytes), key=lambda one: one.seconds)
        held: list[Simulated | None] = [self.held_longer(one) for one in fitting[:_MAX_HELD]]
        lowest = found[0].graph
        least_seconds = self._plain_seconds + self.bound(lowest).bound_seconds
        if least_seconds < (best.seconds if best is not None else math.inf):
            held.append(self._local_searches(recompute_choice(lowest)))
        fastest = reduce(_faster, held, None)
        if fastest is None or (best is not None and fastest.seconds >= best.seconds):
            return best, bound_seconds
        return self._filled(fastest), self.bound(replace(fastest.graph, link=graph.link)).bound_seconds

    def held_longer(self, found: Simulated) -> Simulated:
        """The plan with less recomputed more than once, where the budget has room for that."""
        if found.graph.link is not None or not self._limits.hold_longer:
            return found
        effort = self._effort("hold longer", self._limits.hold_longer_ops)
        return simulated(found.graph, hold_longer(found.graph, found.residences, self._budget_bytes, effort))

    def without_link(self, choice: RecomputeChoice, bound_seconds: float) -> tuple[Simulated | None, float]:
        """The fastest plan of Keep and Recompute, and the lower bound of what it adds."""
        limits, best, searched = self._limits, None, False
        once_seconds = self._recomputed_once_seconds(choice)
        if once_seconds - bound_seconds > limits.far_off * self._plain_seconds:
            best, searched = self._local_searches(choice), True
        if math.isfinite(once_seconds) and (best is None or self._plain_seconds + once_seconds < best.seconds):
            best = _faster(best, self._filled(self._program(choice)))
        is_far = self._is_off(best, bound_seconds, limits.far_off)
        if self._is_off(best, bound_seconds, limits.close_enough) and not (is_far and self._is_large(choice.graph)):
            bound_seconds = max(bound_seconds, self.tight_bound_seconds(choice.graph))
        in_vain = searched and limits.on_demand and self._is_large(choice.graph)  # it takes long, and that is next
        if limits.chain and not in_vain and self._is_off(best, bound_seconds, limits.near_enough):
            found = self._dynamic_program(choice.graph)
            if found is not None and self._is_off(found, 0.0, limits.far_slower):
                found = self.held_longer(found)  # there is too much for `fill_slack` to take back bit by bit
            else:
                found = self._filled(found)
            best = _faster(best, found)
        enough = searched or (self._is_large(choice.graph) and self._recomputes_little(best))
        if limits.local_search and self._is_off(best, bound_seconds, limits.far_off) and not enough:
            best = _faster(best, self._local_searches(choice))
        return best, bound_seconds

    def _recomputed_once_seconds(self, choice: RecomputeChoice) -> float:
        """Of a step of many ops, what the integer program adds at least, in a tenth of its time; of others 0.

        Where that is far from the lower bound, plans that recompute more than once are looked for first: the program
        itself takes long there, and finds nothing faster.
        """
        limits = self._limits
        if not self._has_many_ops(choice.graph) or not (limits.integer_program and limits.local_search):
            return 0.0
        return solve(choice, self._budget_bytes, whole=False, limits=limits, guard=self._guard).bound_seconds

    def with_link(self, choice: RecomputeChoice, bound: Solution) -> tuple[Simulated | None, float]:
        """The fastest plan of all three residences, and the lower bound of what it adds."""
        graph, limits = choice.graph, self._limits
        best: Simulated | None = None
        if limits.iterated_search and math.isfinite(bound.bound_seconds):
            enough_seconds = self._plain_seconds * (1 + limits.close_enough) + bound.bound_seconds
            effort = self._effort("iterated search", limits.iterated_search_ops)
            search = IteratedSearch(choice, self._budget_bytes, enough_seconds, limits, effort)
            chosen = search.improve(self._starts(choice, bound.chosen))
            best = _faster(best, self._fitting(graph, search.residences(chosen)))
        alone = recompute_choice(replace(graph, link=None))
        at_least_seconds = self.bound(alone.graph).bound_seconds
        if best is None or self._plain_seconds + at_least_seconds < best.seconds:
            without, _ = self.without_link(alone, at_least_seconds)
            best = _faster(best, self._filled(without))
        return best, bound.bound_seconds

    def _is_off(self, best: Simulated | None, bound_seconds: float, share: float) -> bool:
        """Whether the plan is further than a share of the plain step above the lower bound, or there is none."""
        return best is None or best.seconds - self._plain_seconds - bound_seconds > share * self._plain_seconds

    def _effort(self, part: str, max_ops: int) -> Effort:
        return Effort(part, max_ops, self._guard)

    def bound(self, graph: StepGraph) -> Solution:
        """The lower bound of what a plan adds; without a link that of a linear program, until a plan is far from it."""
        return self._lower_bound(graph, whole=graph.link is not None)

    def tight_bound_seconds(self, graph: StepGraph) -> float:
        """The lower bound of what a plan adds, of the mixed-integer program."""
        return self._lower_bound(graph, whole=True).bound_seconds

    def _lower_bound(self, graph: StepGraph, *, whole: bool) -> Solution:
        found = lower_bound(graph, self._budget_bytes, self._limits, self._guard, whole=whole)
        if not graph.has_launches or not self._limits.lower_bound:
            return found
        # In another order of ops the device may wait less for the host, or more, with everything kept.
        return replace(found, bound_seconds=found.bound_seconds + graph.plain_seconds - self._plain_seconds)

    def _is_large(self, graph: StepGraph) -> bool:
        return len(graph.ops) > self._limits.large_ops

    def _has_many_ops(self, graph: StepGraph) -> bool:
        return len(graph.ops) > self._limits.many_ops

    def _recomputes_little(self, best: Simulated | None) -> bool:
        return best is not None and best.seconds <= (1 + self._limits.recomputes_little) * self._plain_seconds

    def _starts(self, choice: RecomputeChoice, relaxed: Chosen | None) -> Iterator[Chosen]:
        """Near good choices: the bound's, linear programs with some room set aside, all away."""
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
        yield everything_away(choice)

    def _program(self, choice: RecomputeChoice) -> Simulated | None:
        """The fastest plan that recomputes each storage at most once, or, where that has no room, one near to it."""
        limits, room_bytes = self._limits, self._budget_bytes
        gap = limits.gap_of_many_ops if self._has_many_ops(choice.graph) else limits.gap
        first: Simulated | None = None
        start: Chosen | None = None
        for _ in range(limits.max_solves if limits.integer_program else 0):
            solution = solve(choice, room_bytes, start=start, gap=gap, limits=limits, guard=self._guard)
            if solution.chosen is None:
                break
            found = as_chosen(choice, solution.chosen)
            if found.peak_bytes <= self._budget_bytes:
                return found
            first, start = first or found, solution.chosen
            room_bytes -= found.peak_bytes - self._budget_bytes
        if first is None or not limits.local_search:
            return None
        return self._searched(first, self._effort("local search", limits.local_search_ops))

    def _dynamic_program(self, graph: StepGraph) -> Simulated | None:
        """The fastest plan of `chain`."""
        try:
            plan = chain(graph, self._hardware, self._budget_bytes)
        except BudgetError:
            return None
        return simulated(graph, plan.residences)

    def _local_searches(self, choice: RecomputeChoice) -> Simulated | None:
        """The fastest of what local search makes of what linear programs choose, or else of what is narrow kept."""
        graph, limits = choice.graph, self._limits
        effort = self._effort("local search", limits.local_search_ops)
        best: Simulated | None = None
        if limits.integer_program:
            for chosen in relaxed_choices(choice, self._budget_bytes, limits, self._guard):
                best = _faster(best, self._searched(as_chosen(choice, chosen), effort))
                if effort.is_spent:
                    break
        if best is not None:
            return best
        narrow_kept = just_in_time(graph, narrow(choice, limits.narrow_share))
        return self._searched(simulated(graph, narrow_kept), effort)

    def _searched(self, start: Simulated, effort: Effort) -> Simulated | None:
        """What local search makes of a plan that has no room."""
        found = local_search(start.graph, start.residences, self._budget_bytes, self._limits, effort)
        return self._filled(simulated(start.graph, found)) if found is not None else None

    def _filled(self, found: Simulated | None) -> Simulated | None:
        """The plan with more kept where it leaves room."""
        if found is None or not self._limits.fill_slack:
            return found
        effort = self._effort("fill slack", self._limits.fill_slack_ops)
        return simulated(found.graph, fill_slack(found.graph, found.residences, self._budget_bytes, effort))

    def _fitting(self, graph: StepGraph, residences: Mapping[str, Residence]) -> Simulated | None:
        """The plan simulated, if device and host have room for it."""
        host_bytes = sum(s.host_bytes for s in graph.storages if isinstance(residences.get(s.name), Offload))
        limit_bytes = graph.link.host_bytes if graph.link is not None else 0
        found = simulated(graph, residences)
        fits = found.peak_bytes <= self._budget_bytes and (not limit_bytes or host_bytes <= limit_bytes)
        return found if fits else None


def _faster(one: Simulated | None, other: Simulated | None) -> Simulated | None:
    both = [found for found in (one, other) if found is not None]
    return min(both, key=lambda found: found.seconds, default=None)
