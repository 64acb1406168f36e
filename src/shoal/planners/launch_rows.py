"""The host's queue of launches, as rows of a linear program: a step takes no less than its launches.

The device runs an op when it has run the one before and the host has launched it. Played through, a step takes the
most, over all its runs j, of the time of the launches up to j and of the ops from j on. A recomputation, which is among
the backward ops, adds its time on the device to that of each j of the forward pass, its launch to that of the last run,
and at least the shorter of the two to any other. That leaves three rows for E, the time beyond that of the ops
themselves, and y_o, which says whether op o runs again:

    E >= the most of any forward op    - D + sum of seconds_o * y_o
    E >= that of the last op           - D + sum of launch_seconds_o * y_o
    E >= the most of all ops           - D + sum of min(seconds_o, launch_seconds_o) * y_o,

where all are those of the plain step, and D is the sum of its ops' times. Waits for copies only add to the left side.
The program minimises E, in which the waits for the host are a variable of their own; what a plan adds is E less what
the plain step itself waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.core.step import StepGraph
from shoal.planners.linear_program import LinearProgram


def add_launch_rows(program: LinearProgram, graph: StepGraph, rerun: Mapping[int, int]) -> float:
    """Add the wait for the host and the rows, once all other costs are in the program.

    Args:
        program: whose costs are the seconds of reruns and of waits for copies.
        graph: the step.
        rerun: op → its variable, where it may run again.

    Returns:
        Seconds that the plain step waits for the host.
    """
    if not graph.has_launches:
        return 0.0
    program.variable(1.0, upper=math.inf)
    extra = program.objective
    launched, to_come = 0.0, sum(op.seconds for op in graph.ops)
    busy_seconds = to_come
    if_critical = []  # how long the step takes at least for each op to wait for its launch
    for op in graph.ops:
        launched += op.launch_seconds
        if_critical.append(launched + to_come)
        to_come -= op.seconds
    seconds = {place: graph.ops[op].second.seconds for op, place in rerun.items()}
    launches = {place: graph.ops[op].second.launch_seconds for op, place in rerun.items()}
    shorter = {place: min(seconds[place], launches[place]) for place in seconds}
    forward = max(if_critical[: graph.n_forward], default=0.0)
    for least_seconds, spent in ((forward, seconds), (if_critical[-1], launches), (max(if_critical), shorter)):
        entries = {place: extra.get(place, 0.0) - spent.get(place, 0.0) for place in extra.keys() | spent.keys()}
        program.at_least(
            least_seconds - busy_seconds, {place: entries[place] for place in sorted(entries) if entries[place]}
        )
    return max(0.0, graph.plain_seconds - busy_seconds)
