"""Keep, recompute or offload, decided for all storages at once: a mixed-integer program, then exact play.

Also known as: optimal rematerialisation at the granularity of tensors (Jain et al., Checkmate, MLSys'20; Shah et al.,
MONeT, ICLR'21). Those programs have a variable for every pair of op and time; this one has one for every storage, since
"as late as possible" already says when a recomputation happens (see `integer_program`).

The program's memory is what `simulate` adds up, but for the scratch of the reruns themselves. So each solution is
played exactly; where its peak is over the budget the program is solved again with the difference set aside. What room
the exact peak leaves is then used up by `keep_more`.

Where the step has a link, a storage may also wait on the host. The program treats the link as a fluid; the real copies
are placed by `transfer_places`, and `hmms` competes.

Without a link it equals the optimum among plans that recompute each storage at most once, and as late as possible, up
to the solver's gap and the window of `integer_program`. Where such a plan is far from the lower bound, or there is
none, the plans of `chain`, which recompute more than once, compete, and further off those of `drop_again`, which also
recompute earlier; there the result is good, not proven. The lower bound holds for every plan of these residences.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shoal.errors import BudgetError
from shoal.hardware import Hardware
from shoal.plan import Plan
from shoal.planners.chain import chain, least_peak
from shoal.planners.drop_again import drop_again
from shoal.planners.hmms import hmms
from shoal.planners.infeasible import infeasible
from shoal.planners.integer_program import Chosen, solve
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_more import keep_more
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice
from shoal.planners.transfer_places import with_offloads
from shoal.residence import Offload, Residence
from shoal.schedule import schedule
from shoal.simulate import peak_and_seconds
from shoal.step import StepGraph

_ROUNDS = 5
_BOUND_SECONDS = 5.0  # limit of each solve; most take one
_SOLVE_SECONDS = 10.0
_KEEP_MORE_SECONDS = 2.0
_LEAST_SECONDS = 30.0  # after which the least plan found so far counts
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
    plain = _play(choice, Chosen(frozenset(choice.candidates)), budget_bytes)
    best: _Played | None = plain
    bound_seconds = 0.0
    if plain.peak_bytes > budget_bytes:
        bound = solve(choice, budget_bytes, early=False, time_limit_seconds=_BOUND_SECONDS)
        bound_seconds = bound.bound_seconds
        best = _with_more_kept(graph, budget_bytes, _once(choice, budget_bytes))
        best = _faster(best, _with_more_kept(graph, budget_bytes, _by_the_paper(graph, hardware, budget_bytes)))
        if best is None or best.seconds - plain.seconds - bound_seconds > _CLOSE_ENOUGH * plain.seconds:
            best = _faster(best, _with_more_kept(graph, budget_bytes, _several_times(graph, hardware, budget_bytes)))
        if best is None or best.seconds - plain.seconds - bound_seconds > _FAR_OFF * plain.seconds:
            best = _faster(best, _dropped_again(choice, hardware, budget_bytes))
    if best is None:
        raise infeasible(graph, _least(graph, hardware), budget_bytes)
    return Plan(
        graph,
        best.residences,
        "joint",
        hardware.name,
        budget_bytes,
        bound_seconds,
        time.perf_counter() - started,
    )


def _once(choice: RecomputeChoice, budget_bytes: int) -> _Played | None:
    """The fastest plan that recomputes each storage at most once, exact in its peak."""
    room_bytes = budget_bytes
    start: Chosen | None = None
    for _ in range(_ROUNDS):
        solution = solve(choice, room_bytes, start=start, time_limit_seconds=_SOLVE_SECONDS)
        if solution.chosen is None:
            return None
        played = _play(choice, solution.chosen, budget_bytes)
        if played.peak_bytes <= budget_bytes:
            return played
        start = solution.chosen
        room_bytes -= played.peak_bytes - budget_bytes
    return None


def _by_the_paper(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> _Played | None:
    """The plan of `hmms`, and what it offloads placed anew, whichever fits and is faster."""
    if graph.link is None:
        return None
    residences = hmms(graph, hardware, 0).residences
    offloaded = [s.id for s in graph.storages if isinstance(residences.get(s.name), Offload)]
    kept = just_in_time(graph, range(len(graph.storages)))
    found = [_exactly(graph, residences), _exactly(graph, with_offloads(graph, kept, offloaded, budget_bytes))]
    return min((p for p in found if p.peak_bytes <= budget_bytes), key=lambda p: p.seconds, default=None)


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
    found = [drop_again(graph, start, budget_bytes) for start in starts if start is not None]
    played = [_with_more_kept(graph, budget_bytes, _exactly(graph, r)) for r in found if r is not None]
    return min((one for one in played if one is not None), key=lambda one: one.seconds, default=None)


def _least_once(choice: RecomputeChoice) -> Mapping[str, Residence] | None:
    solution = solve(choice, None, time_limit_seconds=_SOLVE_SECONDS, gap=0.005)
    return None if solution.chosen is None else _play(choice, solution.chosen, 0).residences


def _narrow(choice: RecomputeChoice) -> Mapping[str, Residence]:
    """Keep only what is much smaller than what its recomputation makes on the way: a pooling's result, say."""
    ops, storages = choice.graph.ops, choice.graph.storages

    def widest_bytes(storage: int) -> int:
        return max(storages[made].nbytes for op in choice.reruns[storage] for made in ops[op].second.writes)

    kept = (s for s in choice.candidates if storages[s].nbytes <= _NARROW * widest_bytes(s))
    return _play(choice, Chosen(frozenset(kept)), 0).residences


@lru_cache(maxsize=4)  # one answer for every budget that does not fit
def _least(graph: StepGraph, hardware: Hardware) -> Plan:
    """The plan with the least peak that is known: what dropping makes of the least plans, a step of 2 % at a time."""
    deadline = time.perf_counter() + _LEAST_SECONDS
    choice = recompute_choice(graph)
    starts = [_least_once(choice), _narrow(choice)]
    plans = [least_peak(graph, hardware)]
    plans.extend(Plan(graph, start, "joint", hardware.name) for start in starts if start is not None)
    least = min(plans, key=lambda plan: plan.predicted_peak_bytes)
    for start in plans:
        while time.perf_counter() < deadline:
            lower = drop_again(graph, start.residences, int(0.98 * least.predicted_peak_bytes))
            if lower is None:
                break
            least = start = Plan(graph, lower, "joint", hardware.name)
    return least


def _faster(one: _Played | None, other: _Played | None) -> _Played | None:
    both = [played for played in (one, other) if played is not None]
    return min(both, key=lambda played: played.seconds, default=None)


def _with_more_kept(graph: StepGraph, budget_bytes: int, played: _Played | None) -> _Played | None:
    if played is None:
        return None
    return _exactly(graph, keep_more(graph, played.residences, budget_bytes, _KEEP_MORE_SECONDS))


def _play(choice: RecomputeChoice, chosen: Chosen, budget_bytes: int) -> _Played:
    graph = choice.graph
    residences = just_in_time(graph, choice.kept_for(chosen.kept | chosen.offloaded))
    return _exactly(graph, with_offloads(graph, residences, chosen.offloaded, budget_bytes))


def _exactly(graph: StepGraph, residences: Mapping[str, Residence]) -> _Played:
    return _Played(residences, *peak_and_seconds(graph, schedule(graph, residences)))
