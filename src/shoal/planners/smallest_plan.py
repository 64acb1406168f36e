"""The plan with the smallest peak: what to answer where none fits a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shoal.core.hardware import Hardware
from shoal.core.order import op_names, reordered
from shoal.core.plan import Plan
from shoal.core.residence import Keep, Offload, Recompute, Residence
from shoal.core.sizes import MAX_BYTES
from shoal.core.step import Again, StepGraph
from shoal.planners.chain import smallest_peak
from shoal.planners.infeasible import fewest_bytes, infeasible
from shoal.planners.integer_program import Chosen, lower_bound, relaxed_choices, solve
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import DEFAULT, Effort, Guard, Limits, cached_unless_stopped
from shoal.planners.local_search import local_search
from shoal.planners.on_demand import narrow, plans_on_demand
from shoal.planners.order import lower_peak
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice
from shoal.planners.simulated import as_chosen, everything_away, in_lower_order, simulated
from shoal.planners.transfer_places import with_offloads

_NEAR = 0.02  # of what every plan needs: a plan this near is not searched for a smaller one
_LESS_WHERE_NOTHING_FITS = 10  # the search only tells what would fit then
_SMALL_OPS = 200  # of a step whose blocks are tried then too


def smallest_plan(graph: StepGraph, hardware: Hardware, budget_bytes: int, limits: Limits) -> Plan:
    """The plan with the smallest peak that is known in whatever order, or the first one found that fits."""
    fewest = fewest_bytes(graph)
    if limits.on_demand and budget_bytes < fewest:  # it only tells what would fit
        one = _least_on_demand(graph, hardware, _in_a_moment(limits))
        if one.predicted_peak_bytes <= (1 + _NEAR) * fewest:
            return one
    on_demand = _least_on_demand(graph, hardware, limits) if limits.on_demand else None
    if on_demand is not None and on_demand.predicted_peak_bytes <= budget_bytes:
        return on_demand
    below_bytes = on_demand.predicted_peak_bytes if on_demand is not None else MAX_BYTES
    if on_demand is not None and (below_bytes <= (1 + _NEAR) * fewest or not limits.smallest_search):
        return on_demand
    if budget_bytes < fewest:
        less_ops = limits.smallest_peak_ops // _LESS_WHERE_NOTHING_FITS
        limits = replace(limits, smallest_peak_ops=less_ops, chain=limits.chain and len(graph.ops) <= _SMALL_OPS)
    searched = _smallest_in_either_order(graph, hardware, budget_bytes, below_bytes, limits)
    if on_demand is None:
        return searched
    return _smaller(on_demand, searched)


def refuse_in_a_moment(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The planner of a step that is hopeless inside the budget: it makes one plan with a small peak, of which it tells.

    Where that has none, as with ops that cannot run again, it tells of the step with everything kept.

    Raises:
        BudgetError: always. `joint` finds a plan inside the budget that it names.
    """
    plans = Plan(graph, {}, "joint", hardware.name), _least_on_demand(graph, hardware, _in_a_moment(DEFAULT))
    raise infeasible(min(plans, key=lambda plan: plan.predicted_peak_bytes), budget_bytes, searched=False)


def smallest_inside(graph: StepGraph, hardware: Hardware, budget_bytes: int, *, limits: Limits = DEFAULT) -> Plan:
    """The planner of which only whether a step fits is asked: any plan will do, however slow.

    Raises:
        BudgetError: none was found that fits; it names the least budget for which one was.
    """
    least = smallest_plan(graph, hardware, budget_bytes, limits)
    if least.predicted_peak_bytes > budget_bytes:
        raise infeasible(least, budget_bytes)
    return least


def _in_a_moment(limits: Limits) -> Limits:
    return replace(limits, order=False, kept_sets=1)


def _least_on_demand(graph: StepGraph, hardware: Hardware, limits: Limits) -> Plan:
    found, stopped = plans_on_demand(replace(graph, link=None), limits)
    least = found[0]
    return Plan(
        replace(least.graph, link=graph.link),
        least.residences,
        "joint",
        hardware.name,
        stopped_early=stopped,
        captured_order=op_names(graph),
    )


def _smallest_in_either_order(
    graph: StepGraph, hardware: Hardware, budget_bytes: int, below_bytes: int, limits: Limits
) -> Plan:
    guard = Guard(limits.guard_seconds)
    choice = recompute_choice(graph)
    ordered = in_lower_order(as_chosen(choice, Chosen(frozenset(choice.candidates))), limits, guard)
    if ordered is None:
        return _smallest(graph, hardware, below_bytes, limits)
    least = _smallest(ordered.graph, hardware, below_bytes, limits)
    stopped = dict.fromkeys((*guard.stopped, *least.stopped_early))
    least = replace(least, captured_order=op_names(graph), stopped_early=tuple(stopped))
    least_bytes = min(least.predicted_peak_bytes, below_bytes)
    if least_bytes <= budget_bytes or math.isinf(lower_bound(graph, least_bytes, limits, guard).bound_seconds):
        return least
    return _smaller(least, _smallest(graph, hardware, least_bytes, limits))


def _smaller(one: Plan, other: Plan) -> Plan:
    """The plan with the smaller peak, with what was ended early of the search for either."""
    stopped = dict.fromkeys((*one.stopped_early, *other.stopped_early))
    smaller = min(one, other, key=lambda plan: plan.predicted_peak_bytes)
    return replace(smaller, stopped_early=tuple(stopped)) if stopped else smaller


@cached_unless_stopped(4, lambda least: least.stopped_early)  # one answer for every budget that does not fit
def _smallest(graph: StepGraph, hardware: Hardware, below_bytes: int, limits: Limits) -> Plan:
    """The plan with the smallest peak that is known in this order.

    It is what local search makes of the smallest ones, a step of 2 % at a time, or one that offloads as much as it can.
    A plan with a peak of `below_bytes` is known already: the local search is for less.
    """
    guard = Guard(limits.guard_seconds)
    search = _smallest_with_link if graph.link is not None else _lowered
    least = search(graph, hardware, below_bytes, limits, guard)
    guard.note(*least.stopped_early)
    # With a link it may be the plan without one, which has an order of its own.
    if (ordered := in_lower_order(simulated(least.graph, least.residences), limits, guard)) is not None:
        least = replace(least, graph=ordered.graph, residences=ordered.residences, captured_order=op_names(graph))
    guard.warn(graph.model)
    return replace(least, stopped_early=tuple(guard.stopped))


def _lowered(graph: StepGraph, hardware: Hardware, below_bytes: int, limits: Limits, guard: Guard) -> Plan:
    starts = _starts(recompute_choice(graph), hardware, limits, guard)
    plans = [Plan(graph, start, "joint", hardware.name) for start in starts]
    least = min(plans, key=lambda plan: plan.predicted_peak_bytes)
    effort = Effort("search for the smallest peak", limits.smallest_peak_ops, guard)
    for start in plans if limits.local_search else ():
        while not effort.is_spent:
            aim_bytes = min(int(limits.lower_peak_share * least.predicted_peak_bytes), below_bytes - 1)
            lower = local_search(graph, start.residences, aim_bytes, limits, effort)
            if lower is None:
                break
            least = start = Plan(graph, lower, "joint", hardware.name)
    return least


def _smallest_with_link(graph: StepGraph, hardware: Hardware, below_bytes: int, limits: Limits, guard: Guard) -> Plan:
    choice = recompute_choice(graph)
    alone = _smallest(replace(graph, link=None), hardware, below_bytes, limits)
    plans = [replace(alone, graph=replace(alone.graph, link=graph.link))]
    chosen_ones = [everything_away(choice)]
    if limits.integer_program:
        solution = solve(choice, None, limits=limits, guard=guard)
        chosen_ones += [solution.chosen] if solution.chosen is not None else []
    for chosen in (fitting for one in chosen_ones for fitting in _that_fit_the_host(graph, one)):
        plans.append(plan := _with_copies(graph, chosen, hardware))
        if (ordered := in_order_for_copies(graph, plan.residences, limits, guard)) is not None:
            plans.append(replace(_with_copies(ordered, chosen, hardware), captured_order=op_names(graph)))
    host_bytes = graph.link.host_bytes if graph.link is not None else 0
    there_is_room = (plan for plan in plans if not host_bytes or plan.host_bytes <= host_bytes)
    return min(there_is_room, key=lambda plan: plan.predicted_peak_bytes)


def _that_fit_the_host(graph: StepGraph, chosen: Chosen) -> list[Chosen]:
    """The choice, or if the host has no room for all of it, those with what does not fit kept or recomputed.

    The first ones that are written leave: at the turn, where most is alive, each byte counts as much as another, and
    later those are alive for longest.
    """
    room_bytes = graph.link.host_bytes if graph.link is not None else 0
    if not room_bytes:
        return [chosen]
    leaving = set()
    for storage in sorted(chosen.offloaded, key=lambda s: (graph.producer[s], s)):
        if (nbytes := graph.storages[storage].host_bytes) <= room_bytes:
            room_bytes -= nbytes
            leaving.add(storage)
    if len(leaving) == len(chosen.offloaded):
        return [chosen]
    stay = chosen.offloaded - leaving
    return [Chosen(chosen.kept | kept, frozenset(leaving)) for kept in (stay, frozenset())]


def _with_copies(graph: StepGraph, chosen: Chosen, hardware: Hardware) -> Plan:
    """The plan that keeps and offloads what is chosen, each for as short as can be on the device."""
    kept = just_in_time(graph, recompute_choice(graph).kept_for(chosen.kept | chosen.offloaded))
    residences = with_offloads(graph, kept, chosen.offloaded, budget_bytes=1)
    return Plan(graph, residences, "joint", hardware.name)


def in_order_for_copies(
    graph: StepGraph, residences: Mapping[str, Residence], limits: Limits, guard: Guard
) -> StepGraph | None:
    """The step in an order of ops in which a plan that offloads has a lower peak; None where none was found.

    A storage that comes back from the host takes no op to be there again. So the order is that of a plan which
    recomputes it from nothing; the copies are to be placed again in it. Of an op with several results only the first is
    moved so; the others, statistics mostly, count as there.
    """
    if not limits.order:
        return None
    back = {name: one.fetch_before for name, one in residences.items() if isinstance(one, Offload)}
    from_nothing = {
        op.id: name for op in graph.ops if op.writes and (name := graph.storages[op.writes[0]].name) in back
    }
    ops = tuple(
        replace(op, again=Again(op.target, ()), recomputable=True) if op.id in from_nothing else op for op in graph.ops
    )
    moved = frozenset(from_nothing.values())
    with_them = {graph.storages[s].name for op in from_nothing for s in graph.ops[op].writes} - moved
    as_recomputed = {
        name: Recompute((back[name],)) if name in moved else Keep() if name in back or name in with_them else one
        for name, one in residences.items()
    }
    stand_in = replace(graph, ops=ops, link=None)
    ordered = lower_peak(stand_in, as_recomputed, Effort("order of ops", limits.order_ops, guard))
    return None if ordered is None else reordered(graph, op_names(ordered.graph))


def _starts(choice: RecomputeChoice, hardware: Hardware, limits: Limits, guard: Guard) -> list[Mapping[str, Residence]]:
    """Plans with small peaks: of the dynamic program, of the program with the least room, and by a rule of thumb."""
    found: list[Mapping[str, Residence]] = []
    if limits.chain:
        found.append(smallest_peak(choice.graph, hardware).residences)
    if limits.integer_program:
        least_room = replace(limits, more_room=(0.0,))
        found += [as_chosen(choice, one).residences for one in relaxed_choices(choice, 1, least_room, guard)]
    return [*found, just_in_time(choice.graph, narrow(choice, limits.narrow_share))]
