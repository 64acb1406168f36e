"""The mixed-integer program of `joint` and of its lower bound, solved with HiGHS.

For every candidate storage s a binary k_s says whether it is kept. For every op o that may run again y_o >= 1 - k_s
for each s it writes or is dragged along by. For every demand i before the one at which s is due, a continuous b_si says
whether s is back early, because the recomputation of another storage d reads it:

    b_si >= (1 - k_d) - k_s      at the demand i at which d is due,
    b_si >= b_di - k_s           at earlier demands,
    b_si >= b_s(i-1)             once back it stays,

and at every position what is fixed, kept and back early must fit the budget:

    fixed + sum over waiting s of bytes_s * (k_s + b_si) <= budget.

Where the step has a link, o_s says whether s waits on the host, and is added to k_s in the first row. What that takes
of the link and of the device is in `link_rows`; the objective is then all added time, during which copies go on. Where
the host takes time to launch ops, `add_launch_rows` has what that adds.

With binary k the least b is integral, so only the k need branching. The objective is the time of the reruns. Without
the b the program is a relaxation for every plan that keeps or recomputes, however often: its optimum is the lower
bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.core.step import StepGraph
from shoal.planners.limits import DEFAULT, Guard, Limits
from shoal.planners.linear_program import LinearProgram
from shoal.planners.link_rows import add_link_rows
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice

_WINDOW = 48  # a storage may be back at most that many demands early
_ROUNDING = 1e-4  # of the solver: a program with just the room that it needs must not be infeasible


@dataclass(frozen=True)
class Chosen:
    """Which candidates stay on the device and which wait on the host; the others are recomputed."""

    kept: frozenset[int]
    offloaded: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    Attributes:
        chosen: None where it found none within its limits or there is none.
        bound_seconds: proven least time; infinite where no choice fits.
    """

    chosen: Chosen | None
    bound_seconds: float


NOTHING_KNOWN = Solution(None, 0.0)


def solve(
    choice: RecomputeChoice,
    budget_bytes: int | None,
    *,
    early: bool = True,
    whole: bool = True,
    start: Chosen | None = None,
    gap: float | None = None,
    limits: Limits = DEFAULT,
    guard: Guard | None = None,
) -> Solution:
    """Solve the program.

    Args:
        choice: the step's numbers.
        budget_bytes: most bytes in use at any position. None minimises the peak instead.
        early: count what is back early. False gives the relaxation for the lower bound.
        whole: take each storage for one thing. False lets parts of it be kept and offloaded, in a small part of the
            time; each is then where most of it is.
        start: a choice to start from.
        gap: relative gap at which to stop; None takes that of `limits`.
        limits: nodes and iterations after which the best found so far counts.
        guard: the time limit of the planner that asks.
    """
    return _Program(choice, budget_bytes, early).run(start, whole, gap, limits, guard or Guard(limits.guard_seconds))


def relaxed_choices(choice: RecomputeChoice, budget_bytes: int, limits: Limits, guard: Guard) -> Iterator[Chosen]:
    """What linear programs choose whose room is the budget, or where that is too little for them, the least they need.

    They get that and some shares more (`Limits.more_room`), and each storage is where most of it is. None of these
    choices has to fit: they are starts for `local_search`, which recomputes more than once. Each program is solved when
    its choice is asked for.
    """
    least = _Program(choice, None, early=True)
    found = least.program.run(
        whole=False,
        gap=limits.gap,
        max_nodes=1,
        max_simplex_iterations=limits.max_simplex_iterations,
        time_limit_seconds=guard.left_seconds / 4,
    )
    if found.values is None or least.peak is None:
        return
    room_bytes = max(budget_bytes, math.ceil(found.values[least.peak] * least.unit_bytes * (1 + _ROUNDING)))
    before: set[Chosen] = set()
    for share in limits.more_room:
        chosen = solve(choice, int(room_bytes * (1 + share)), whole=False, limits=limits, guard=guard).chosen
        if chosen is not None and chosen not in before:
            before.add(chosen)
            yield chosen


def lower_bound(graph: StepGraph, budget_bytes: int, limits: Limits, guard: Guard, *, whole: bool = True) -> Solution:
    """The relaxation below every plan in this order of ops, which must leave every storage its choice.

    Args:
        graph, budget_bytes, limits, guard: as for `solve`.
        whole: as for `solve`; False gives a bound that is a little lower, in a tenth of the time.
    """
    if not limits.lower_bound:
        return NOTHING_KNOWN
    wide = recompute_choice(graph, every=True)
    return solve(wide, budget_bytes, early=False, whole=whole, limits=limits, guard=guard)


class _Program:
    """The rows and columns of one step's choice."""

    def __init__(self, choice: RecomputeChoice, budget_bytes: int | None, early: bool) -> None:
        self.choice = choice
        ops = choice.graph.ops
        rerun = sorted({op for s in choice.candidates for op in choice.reruns[s]})
        # A variable of added time is a second, not one rerun: all of them at 1 would be minutes, and so would the gap.
        rerun_seconds = sum(ops[op].second.longer_seconds for op in rerun)
        is_sum = choice.graph.link is None and not choice.graph.has_launches
        self.program = program = LinearProgram(0.0 if is_sum else max(rerun_seconds, 1e-12))
        self.infeasible = False
        self.unit_bytes = budget_bytes or max(row.fixed_bytes for row in choice.rows)
        self.keep = {s: program.variable(binary=True) for s in choice.candidates}
        link = choice.graph.link
        self.link = add_link_rows(program, choice, link, self.unit_bytes, relaxed=not early) if link else None
        self.off: Mapping[int, int] = self.link.off if self.link is not None else {}
        # With a link the added time is variables of its own: copies go on during reruns.
        self.rerun = {op: program.variable(0.0 if self.link is not None else ops[op].second.seconds) for op in rerun}
        if self.link is not None:
            spent = {variable: -ops[op].second.seconds for op, variable in self.rerun.items()}
            program.at_least(0.0, {**dict.fromkeys(self.link.added, 1.0), **spent})
        self.launch_wait_seconds = add_launch_rows(program, choice.graph, self.rerun)
        self.early = early
        self.minimises_peak = budget_bytes is None
        self.saved = frozenset(choice.graph.saved).intersection(choice.candidates)
        self.back: dict[tuple[int, int], int] = {}
        self.peak: int | None = None  # the variable that is the peak in units, where that is minimised
        self._add_reruns()
        if early:
            self._add_back_early()
        self._add_memory(budget_bytes)

    def _stays(self, storage: int) -> dict[int, float]:
        """The variables of which one must be 1 for the storage not to be recomputed."""
        entries = {self.keep[storage]: 1.0}
        if storage in self.off:
            entries[self.off[storage]] = 1.0
        return entries

    def _add_reruns(self) -> None:
        choice, producer = self.choice, self.choice.graph.producer
        for storage in choice.candidates:
            if storage in self.saved:
                for op in choice.reruns[storage]:
                    self.program.at_least(1.0, {self.rerun[op]: 1.0, **self._stays(storage)})
            for needed in choice.needs[storage]:
                if needed not in self.saved:
                    asked_by = self.rerun[producer[storage]]
                    for op in choice.reruns[needed]:
                        if self.rerun[op] != asked_by:
                            self.program.at_least(0.0, {self.rerun[op]: 1.0, **self._stays(needed), asked_by: -1.0})

    def _add_back_early(self) -> None:
        choice = self.choice
        last = {s: choice.due[s] - (s in self.saved) for s in choice.candidates}
        for storage in choice.candidates:
            demands = range(max(1, choice.due[storage] - _WINDOW), last[storage] + 1)
            for demand in demands:
                self.back[storage, demand] = self.program.variable()
                if (storage, demand - 1) in self.back:
                    self.program.at_least(0.0, {self.back[storage, demand]: 1.0, self.back[storage, demand - 1]: -1.0})
        for reader in choice.candidates:
            for needed in choice.needs[reader]:
                for demand in range(1, min(choice.due[reader], last[needed]) + 1):
                    entries = {self.keep[needed]: 1.0}
                    if (needed, demand) in self.back:
                        entries[self.back[needed, demand]] = 1.0
                    if reader in self.saved and demand == choice.due[reader]:
                        self.program.at_least(1.0, {**entries, **self._stays(reader)})
                    elif (reader, demand) in self.back:
                        self.program.at_least(0.0, {**entries, self.back[reader, demand]: -1.0})

    def _add_memory(self, budget_bytes: int | None) -> None:
        choice, program = self.choice, self.program
        storages = choice.graph.storages
        peak = self.peak = None if budget_bytes else program.variable(program.unit_cost * 1e3, upper=math.inf)
        for number, row in enumerate(choice.rows):
            fixed_bytes = row.fixed_bytes if self.early else row.min_bytes
            room = 0.0 if peak is not None else 1.0
            room -= fixed_bytes / self.unit_bytes
            entries: dict[int, float] = {}
            for storage in row.waiting:
                if not self.early and storage not in self.saved and row.interval == choice.due[storage]:
                    continue  # the recomputation that read it last is over
                share = storages[storage].nbytes / self.unit_bytes
                entries[self.keep[storage]] = -share
                if (storage, row.interval) in self.back:
                    entries[self.back[storage, row.interval]] = -share
            on_the_way = self.link.ahead.get(number, {}) if self.link is not None else {}
            may_bind = -sum(entries.values()) > room
            entries.update({variable: -factor for variable, factor in on_the_way.items()})
            if peak is not None:
                entries[peak] = 1.0
                program.at_least(-room, entries)
            elif room < 0:
                self.infeasible = True
            elif may_bind or on_the_way:
                program.at_least(-room, entries)

    def run(self, start: Chosen | None, whole: bool, gap: float | None, limits: Limits, guard: Guard) -> Solution:
        if self.infeasible:
            return Solution(None, math.inf)
        values = None
        if start is not None:
            values = {column: float(s in start.kept) for s, column in self.keep.items()}
            values.update({column: float(s in start.offloaded) for s, column in self.off.items()})
        has_link = self.link is not None
        if gap is None:
            gap = limits.gap_with_link if has_link else limits.gap
        max_nodes = limits.max_nodes_with_link if has_link else limits.max_nodes
        is_small = not self.minimises_peak or max_nodes * self.program.entries <= limits.max_peak_entries
        found = self.program.run(
            values,
            whole=whole,
            gap=gap,
            max_nodes=max_nodes if is_small else max(1, limits.max_peak_entries // self.program.entries),
            max_simplex_iterations=limits.max_simplex_iterations,
            sub_programs=not has_link and is_small,
            time_limit_seconds=guard.left_seconds / 4,  # the rest is for the other parts
        )
        if found.timed_out:
            guard.note("integer program" if whole else "linear program")
        bound_seconds = found.cost_bound
        if self.launch_wait_seconds:
            bound_seconds = max(0.0, bound_seconds - self.launch_wait_seconds)
        if found.values is None:
            return Solution(None, bound_seconds)
        kept, offloaded = set(), set()
        for storage, column in self.keep.items():
            here = found.values[column]
            there = found.values[self.off[storage]] if storage in self.off else 0.0
            if here >= max(there, 1 - here - there):
                kept.add(storage)
            elif there >= 1 - here - there:
                offloaded.add(storage)
        return Solution(Chosen(frozenset(kept), frozenset(offloaded)), bound_seconds)


def add_launch_rows(program: LinearProgram, graph: StepGraph, rerun: Mapping[int, int]) -> float:
    """Add the wait for the host and the rows, once all other costs are in the program.

    The device runs an op when it has run the one before and the host has launched it. Played through, a step takes
    the most, over all its runs j, of the time of the launches up to j and of the ops from j on. A recomputation,
    which is among the backward ops, adds its time on the device to that of each j of the forward pass, its launch
    to that of the last run, and at least the shorter of the two to any other. That leaves three rows for E, the
    time beyond that of the ops themselves, and y_o, which says whether op o runs again:

        E >= the most of any forward op    - D + sum of seconds_o * y_o
        E >= that of the last op           - D + sum of launch_seconds_o * y_o
        E >= the most of all ops           - D + sum of min(seconds_o, launch_seconds_o) * y_o,

    where all are those of the plain step, and D is the sum of its ops' times. Waits for copies only add to the left
    side. The program minimises E, in which the waits for the host are a variable of their own; what a plan adds is
    E less what the plain step itself waits.

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
