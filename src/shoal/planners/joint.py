"""Keep, recompute or offload, decided for all storages at once: a mixed-integer program, then exact play.

Also known as: optimal rematerialisation at the granularity of tensors (Jain et al., Checkmate, MLSys'20; Shah et al.,
MONeT, ICLR'21). Those programs have a variable for every pair of op and time; this one has one for every storage, since
"as late as possible" already says when a recomputation happens (see `integer_program`).

The program's memory is what `simulate` adds up, but for the scratch of the reruns themselves. So each solution is
played exactly; where its peak is over the budget the program is solved again with the difference set aside. What room
the exact peak leaves is then used up by `keep_more`.

Where the step has a link, a storage may also wait on the host. The program takes the link for a fluid, and so its
solutions are starts for `exchange`, which places the real copies. `hmms` and the plans without the link compete.

Without a link it equals the optimum among plans that recompute each storage at most once, and as late as possible, up
to the solver's gap and the window of `integer_program`. Where such a plan is far from the lower bound, or there is
none, the plans of `chain`, which recompute more than once, compete, and further off those of `drop_again`, which also
recompute earlier; there the result is good, not proven. The lower bound holds for every plan of these residences.
"""

from __future__ import annotations

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
from shoal.planners.chain import chain, least_peak
from shoal.planners.drop_again import drop_again
from shoal.planners.exchange import Exchange
from shoal.planners.infeasible import infeasible
from shoal.planners.integer_program import Chosen, solve
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_more import keep_more
from shoal.planners.papers.hmms import hmms, within_limit
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice
from shoal.planners.transfer_places import with_offloads

_ROUNDS = 5
_BOUND_SECONDS = 5.0  # limit of each solve; most take one
_BOUND_GAP = 0.005
_PARTS_SECONDS = 2.0
_START_SECONDS = 3.0
_EXCHANGE_SECONDS = 7.0
_SET_ASIDE = (0.5, 1.0, 0.25, 0.0)  # of the largest storage: a copy frees nothing until it has ended
_SOLVE_SECONDS = 10.0
_KEEP_MORE_SECONDS = 2.0
_DROP_SECONDS = 10.0
_LEAST_SECONDS = 10.0  # after which the least plan found so far counts
_CLOSE_ENOUGH = 0.002  # of the plain step's time: nearer to the lower bound no other planner is asked
_FAR_OFF = 0.03
_NARROW = 1 / 3  # of the largest result on the way to it


@dataclass(frozen=True)
class _Played:
    """Residences and what they cost when played exactly."""

    residences: Mapping[str, Residence]
    peak_bytes: int
    seconds: float


def joint(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The fastest plan inside the budget, of Keep, Recompute and, where the step has a link, Offload.

    Args:
        graph: the step, with seconds, workspaces and, for offloading, a link.
        hardware: what the seconds are for.
        budget_bytes: most device bytes in use at any position of the step.

    Raises:
        BudgetError: no plan was found that fits; it names the least budget for which one was.
    """
    started = time.perf_counter()
    choice = recompute_choice(graph)
    best: _Played | None = _play(choice, Chosen(frozenset(choice.candidates)))
    bound_seconds = 0.0
    if best is not None and best.peak_bytes > budget_bytes:
        plan_it = _without_link if graph.link is None else _with_link
        best, bound_seconds = plan_it(choice, hardware, budget_bytes, best.seconds)
    if best is None:
        least = _least(graph, hardware)
        if least.predicted_peak_bytes > budget_bytes:
            raise infeasible(graph, least, budget_bytes)
        best = _exactly(graph, least.residences)
    return Plan(
        graph,
        best.residences,
        "joint",
        hardware.name,
        budget_bytes,
        bound_seconds,
        time.perf_counter() - started,
    )


def estimate(graph: StepGraph, budget_bytes: int) -> tuple[float, float]:
    """How `joint` would fare, told within milliseconds: bytes over the budget, and seconds of the step.

    The program in parts: a storage may be kept in one part, recomputed in another and offloaded in the rest. Where that
    does not fit, the seconds are infinite, and it may still be that recomputing more than once does.
    """
    choice = recompute_choice(graph)
    solution = solve(choice, budget_bytes, whole=False, time_limit_seconds=_PARTS_SECONDS)
    if math.isfinite(solution.added_seconds):
        return 0.0, sum(op.seconds for op in graph.ops) + solution.added_seconds
    least = solve(choice, None, whole=False, time_limit_seconds=_PARTS_SECONDS)
    chosen = least.chosen or Chosen(frozenset())
    return max(0.0, _play(choice, chosen).peak_bytes - budget_bytes), math.inf


def _without_link(
    choice: RecomputeChoice, hardware: Hardware, budget_bytes: int, plain_seconds: float
) -> tuple[_Played | None, float]:
    """The fastest plan of Keep and Recompute, and the lower bound of what it adds."""
    graph = choice.graph
    wide = recompute_choice(graph, every=True)  # a bound for every plan must leave every storage its choice
    bound_seconds = solve(wide, budget_bytes, early=False, time_limit_seconds=_BOUND_SECONDS).bound_seconds
    best = _with_more_kept(graph, budget_bytes, _once(choice, budget_bytes))
    if best is None or best.seconds - plain_seconds - bound_seconds > _CLOSE_ENOUGH * plain_seconds:
        best = _faster(best, _with_more_kept(graph, budget_bytes, _several_times(graph, hardware, budget_bytes)))
    if best is None or best.seconds - plain_seconds - bound_seconds > _FAR_OFF * plain_seconds:
        best = _faster(best, _dropped_again(choice, hardware, budget_bytes))
    return best, bound_seconds


def _with_link(
    choice: RecomputeChoice, hardware: Hardware, budget_bytes: int, plain_seconds: float
) -> tuple[_Played | None, float]:
    """The fastest plan of all three residences, and the lower bound of what it adds."""
    graph = choice.graph
    wide = recompute_choice(graph, every=True)
    bound = solve(wide, budget_bytes, early=False, time_limit_seconds=_BOUND_SECONDS, gap=_BOUND_GAP)
    best = _fitting(graph, hmms(graph, hardware, 0).residences, budget_bytes)
    if math.isfinite(bound.bound_seconds):
        enough_seconds = plain_seconds + bound.bound_seconds + _CLOSE_ENOUGH * plain_seconds
        search = Exchange(choice, budget_bytes, enough_seconds)
        chosen = search.improve(_starts(choice, bound.chosen, budget_bytes), _EXCHANGE_SECONDS)
        best = _faster(best, _fitting(graph, search.residences(chosen), budget_bytes))
        if best is None or best.seconds > enough_seconds:
            solution = solve(choice, budget_bytes, start=chosen, time_limit_seconds=_START_SECONDS, gap=_BOUND_GAP)
            starts = [start for start in (chosen, solution.chosen) if start is not None]
            chosen = search.improve(starts, _EXCHANGE_SECONDS / 2)
            best = _faster(best, _fitting(graph, search.residences(chosen), budget_bytes))
    alone = recompute_choice(replace(graph, link=None))
    at_least = solve(alone, budget_bytes, early=False, time_limit_seconds=_BOUND_SECONDS).bound_seconds
    if best is None or plain_seconds + at_least < best.seconds:
        without, _ = _without_link(alone, hardware, budget_bytes, plain_seconds)
        best = _faster(best, _with_more_kept(graph, budget_bytes, without))
    return best, bound.bound_seconds


def _starts(choice: RecomputeChoice, relaxed: Chosen | None, budget_bytes: int) -> Iterator[Chosen]:
    """Choices near a good one: the relaxation's, the program's in parts with some room set aside, the paper's, all."""
    graph, candidates = choice.graph, frozenset(choice.candidates)
    if relaxed is not None:
        yield Chosen(relaxed.kept & candidates, relaxed.offloaded & candidates)
    largest_bytes = max(graph.storages[s].nbytes for s in candidates) if candidates else 0
    for share in _SET_ASIDE:
        room_bytes = int(budget_bytes - share * largest_bytes)
        if room_bytes > 0:
            solution = solve(choice, room_bytes, whole=False, time_limit_seconds=_PARTS_SECONDS)
            if solution.chosen is not None:
                yield solution.chosen
    if graph.link is not None:
        by_the_paper = candidates.intersection(within_limit(graph, graph.link))
        yield Chosen(candidates - by_the_paper, by_the_paper)
    yield _everything_away(choice)


def _everything_away(choice: RecomputeChoice) -> Chosen:
    saved = frozenset(s for s in choice.graph.saved if choice.graph.storages[s].kind == "activation")
    return Chosen(frozenset(choice.candidates) - saved, saved)


def _once(choice: RecomputeChoice, budget_bytes: int) -> _Played | None:
    """The fastest plan that recomputes each storage at most once, exact in its peak."""
    room_bytes = budget_bytes
    start: Chosen | None = None
    for _ in range(_ROUNDS):
        solution = solve(choice, room_bytes, start=start, time_limit_seconds=_SOLVE_SECONDS)
        if solution.chosen is None:
            return None
        played = _play(choice, solution.chosen)
        if played.peak_bytes <= budget_bytes:
            return played
        start = solution.chosen
        room_bytes -= played.peak_bytes - budget_bytes
    return None


def _fitting(graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int) -> _Played | None:
    """The plan played, if device and host have room for it."""
    host_bytes = sum(s.host_bytes for s in graph.storages if isinstance(residences.get(s.name), Offload))
    limit_bytes = graph.link.host_bytes if graph.link is not None else 0
    played = _exactly(graph, residences)
    return played if played.peak_bytes <= budget_bytes and (not limit_bytes or host_bytes <= limit_bytes) else None


def _several_times(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> _Played | None:
    """The fastest plan of `chain`, which may recompute a storage more than once."""
    try:
        plan = chain(graph, hardware, budget_bytes)
    except BudgetError:
        return None
    return _exactly(graph, plan.residences)


def _dropped_again(choice: RecomputeChoice, hardware: Hardware, budget_bytes: int) -> _Played | None:
    """The fastest of what dropping makes of the least plans that recompute once and several times, and of `_narrow`."""
    graph = choice.graph
    starts = [least_peak(graph, hardware).residences, _least_once(choice), _narrow(choice)]
    deadline = time.perf_counter() + _DROP_SECONDS
    found = [
        drop_again(graph, start, budget_bytes, deadline - time.perf_counter()) for start in starts if start is not None
    ]
    played = [_with_more_kept(graph, budget_bytes, _exactly(graph, r)) for r in found if r is not None]
    return min((one for one in played if one is not None), key=lambda one: one.seconds, default=None)


def _least_once(choice: RecomputeChoice) -> Mapping[str, Residence] | None:
    solution = solve(choice, None, time_limit_seconds=_SOLVE_SECONDS, gap=0.005)
    return None if solution.chosen is None else _play(choice, solution.chosen).residences


def _narrow(choice: RecomputeChoice) -> Mapping[str, Residence]:
    """Keep only what is much smaller than what its recomputation makes on the way: a pooling's result, say."""
    ops, storages = choice.graph.ops, choice.graph.storages

    def widest_bytes(storage: int) -> int:
        return max(storages[made].nbytes for op in choice.reruns[storage] for made in ops[op].second.writes)

    kept = (s for s in choice.candidates if storages[s].nbytes <= _NARROW * widest_bytes(s))
    return _play(choice, Chosen(frozenset(kept))).residences


@lru_cache(maxsize=4)  # one answer for every budget that does not fit
def _least(graph: StepGraph, hardware: Hardware) -> Plan:
    """The plan with the least peak that is known.

    It is what dropping makes of the least plans, a step of 2 % at a time, or one that offloads as much as it can.
    """
    if graph.link is not None:
        return _least_with_link(graph, hardware)
    deadline = time.perf_counter() + _LEAST_SECONDS
    choice = recompute_choice(graph)
    starts = [_least_once(choice), _narrow(choice)]
    plans = [least_peak(graph, hardware)]
    plans.extend(Plan(graph, start, "joint", hardware.name) for start in starts if start is not None)
    least = min(plans, key=lambda plan: plan.predicted_peak_bytes)
    for start in plans:
        while time.perf_counter() < deadline:
            aim_bytes = int(0.98 * least.predicted_peak_bytes)
            lower = drop_again(graph, start.residences, aim_bytes, deadline - time.perf_counter())
            if lower is None:
                break
            least = start = Plan(graph, lower, "joint", hardware.name)
    return least


def _least_with_link(graph: StepGraph, hardware: Hardware) -> Plan:
    choice = recompute_choice(graph)
    plans = [replace(_least(replace(graph, link=None), hardware), graph=graph)]
    solution = solve(choice, None, time_limit_seconds=_BOUND_SECONDS, gap=_BOUND_GAP)
    for chosen in (_everything_away(choice), solution.chosen):
        if chosen is not None:
            kept = just_in_time(graph, choice.kept_for(chosen.kept | chosen.offloaded))
            residences = with_offloads(graph, kept, chosen.offloaded, budget_bytes=1)
            plans.append(Plan(graph, residences, "joint", hardware.name))
    host_bytes = graph.link.host_bytes if graph.link is not None else 0
    there_is_room = (plan for plan in plans if not host_bytes or plan.host_bytes <= host_bytes)
    return min(there_is_room, key=lambda plan: plan.predicted_peak_bytes)


def _faster(one: _Played | None, other: _Played | None) -> _Played | None:
    both = [played for played in (one, other) if played is not None]
    return min(both, key=lambda played: played.seconds, default=None)


def _with_more_kept(graph: StepGraph, budget_bytes: int, played: _Played | None) -> _Played | None:
    if played is None:
        return None
    return _exactly(graph, keep_more(graph, played.residences, budget_bytes, _KEEP_MORE_SECONDS))


def _play(choice: RecomputeChoice, chosen: Chosen) -> _Played:
    return _exactly(choice.graph, just_in_time(choice.graph, choice.kept_for(chosen.kept)))


def _exactly(graph: StepGraph, residences: Mapping[str, Residence]) -> _Played:
    return _Played(residences, *peak_and_seconds(graph, schedule(graph, residences)))
