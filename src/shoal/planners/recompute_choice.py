"""The choice "keep or recompute" of one step as numbers: who can be given up, what that costs, when it must be back.

Both the mixed-integer program (`joint`) and its lower bound read these numbers. Positions are op ids; a *demand* is a
backward op at which some storage is read for the first time since the forward pass, so that the set of storages that
are back changes only at demands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.core.schedule import schedule
from shoal.core.simulate import bytes_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.transfer_places import last_forward_reader

_SMALL_SHARE = 1 / 4000  # of all saved bytes: storages below it are kept without asking


@dataclass(frozen=True)
class PositionRow:
    """What is in use at one position: `fixed_bytes`, plus every kept storage of `waiting`, plus what is back early.

    Attributes:
        op: the position; of all at which the same storages wait the one with the most bytes.
        interval: how many demands lie at or before the position; 0 in the forward pass.
        fixed_bytes: in a plan that keeps every storage about which there is no choice.
        min_bytes: a lower bound of the same for every plan, the highest of these positions.
        waiting: storages that are alive here if kept, and else only if they are back early.
    """

    op: int
    interval: int
    fixed_bytes: int
    min_bytes: int
    waiting: tuple[int, ...]


@dataclass(frozen=True)
class RecomputeChoice:
    """A step's choice between keeping and recomputing.

    Attributes:
        graph: the step.
        candidates: storages that a plan may keep or give up; every other one follows from them.
        always_kept: small or unrecomputable storages.
        demands: op ids of the demands, ascending.
        due: candidate → number of the demand at which it is read first, or, if no backward op reads it, the last one
            at which a recomputation can need it.
        needs: candidate → candidates that its recomputation reads, directly or through ops that are always rerun.
        reruns: candidate → ids of the ops that run again if it is recomputed (its own and those it drags along).
        rows: memory in use at the positions that matter.
    """

    graph: StepGraph
    candidates: tuple[int, ...]
    always_kept: frozenset[int]
    demands: tuple[int, ...]
    due: Mapping[int, int]
    needs: Mapping[int, tuple[int, ...]]
    reruns: Mapping[int, tuple[int, ...]]
    rows: tuple[PositionRow, ...]

    def kept_for(self, chosen: Collection[int]) -> frozenset[int]:
        """Every storage that stays when `chosen` of the candidates do: input for `just_in_time`."""
        return self.always_kept.union(chosen)


def recompute_choice(graph: StepGraph, *, every: bool = False) -> RecomputeChoice:
    """Read the choice off a step.

    Args:
        graph: the step.
        every: leave no storage out because keeping another one is as good: offloading it may be better.
    """
    saved = set(graph.saved)
    saved_bytes = sum(graph.storages[s].nbytes for s in saved)
    free = set(graph.can_be_recomputed)
    small = {s for s in free if s in saved and graph.storages[s].nbytes < _SMALL_SHARE * saved_bytes}
    fixed = {s.id for s in graph.storages if s.id not in free}
    backward_reads = {s: [r for r in graph.readers[s] if r >= graph.n_forward] for s in free}
    candidates = {s for s in free - small if s in saved or every or not _follows(graph, s, saved)}
    transients = free - small - candidates

    needs: dict[int, tuple[int, ...]] = {}
    reruns: dict[int, tuple[int, ...]] = {}
    for storage in sorted(candidates):
        needs[storage], reruns[storage] = _closure(graph, storage, candidates, transients)
    first_read = {s: backward_reads[s][0] for s in candidates if backward_reads[s]}
    demands = tuple(sorted(set(first_read.values())))
    number = {op: place for place, op in enumerate(demands, 1)}
    due = {s: number[first] for s, first in first_read.items()}
    for storage in sorted(candidates, reverse=True):  # consumers come before what they need
        for needed in needs[storage]:
            if needed not in first_read and storage in due:
                due[needed] = max(due.get(needed, 0), due[storage])
    candidates = {s for s in candidates if s in due}
    # The host can take what must not be recomputed; too little to plan for, but the bound must not count on it.
    only_host = graph.can_leave & saved - free if graph.link is not None else set()
    rows = _rows(graph, candidates, small | only_host, demands, due, first_read)
    return RecomputeChoice(
        graph,
        tuple(sorted(candidates)),
        frozenset(small | fixed),
        demands,
        due,
        {s: tuple(n for n in needs[s] if n in candidates) for s in candidates},
        {s: reruns[s] for s in candidates},
        rows,
    )


def _follows(graph: StepGraph, storage: int, saved: set[int]) -> bool:
    """Whether keeping an unsaved storage is never better than keeping what its one reader makes of it."""
    readers = graph.readers[storage]
    if len(readers) != 1:
        return not readers
    made = [s for s in graph.ops[readers[0]].writes if s in saved]
    return any(graph.storages[s].nbytes <= graph.storages[storage].nbytes for s in made)


def _closure(
    graph: StepGraph, storage: int, candidates: set[int], transients: set[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    needs: set[int] = set()
    ops = set()
    pending = [storage]
    while pending:
        op = graph.ops[graph.producer[pending.pop()]].second
        if op.id in ops:
            continue
        ops.add(op.id)
        for read in op.reads:
            if read in candidates:
                needs.add(read)
            elif read in transients:
                pending.append(read)
    return tuple(sorted(needs)), tuple(sorted(ops))


def _rows(
    graph: StepGraph,
    candidates: set[int],
    small: set[int],
    demands: tuple[int, ...],
    due: Mapping[int, int],
    first_read: Mapping[int, int],
) -> tuple[PositionRow, ...]:
    storages, n_forward = graph.storages, graph.n_forward
    runs = schedule(graph, {})
    total_bytes, _ = bytes_and_seconds(graph, runs)
    starts, ends = _waiting_times(graph, candidates, demands, due, first_read)
    small_bytes = 0  # of small storages that are alive
    alive: set[int] = set()
    waiting: set[int] = set()
    waiting_bytes = 0  # of those of them that are alive when everything is kept
    in_order: tuple[int, ...] = ()
    highest: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    least: dict[tuple[int, tuple[int, ...]], int] = {}
    for op, run in zip(graph.ops, runs, strict=True):
        alive.update(run.writes)
        small_bytes += sum(storages[s].nbytes for s in run.writes if s in small)
        joins, leaves = starts.get(op.id, ()), ends.get(op.id, ())
        waiting.update(joins)
        waiting.difference_update(leaves)
        waiting_bytes += sum(storages[s].nbytes for s in joins if s in alive)
        waiting_bytes -= sum(storages[s].nbytes for s in leaves if s in alive)
        taken = run.takes_over
        at_once = op.id < n_forward and taken in candidates  # its block is taken: it is not alive here already
        if joins or leaves:
            in_order = tuple(sorted(waiting))
        fixed_bytes = total_bytes[op.id] - waiting_bytes
        extra = set()
        if op.overwrites in alive and op.overwrites != taken and op.overwrites not in waiting:
            extra.add(op.overwrites)  # kept, it must not be overwritten; given up, it may be
        if op.id >= n_forward:  # given up again between two backward reads
            extra |= (candidates & alive) - waiting - {*op.reads, taken}
        avoided_bytes = small_bytes - (storages[taken].nbytes if taken in small else 0)
        avoided_bytes += sum(storages[s].nbytes for s in extra if s not in small)
        key = (bisect_right(demands, op.id), tuple(sorted((*in_order, taken))) if at_once else in_order)
        highest[key] = max(highest.get(key, (0, 0)), (fixed_bytes, op.id))
        least[key] = max(least.get(key, 0), fixed_bytes - avoided_bytes)
        alive.difference_update(run.frees)
        small_bytes -= sum(storages[s].nbytes for s in run.frees if s in small)
    return tuple(
        PositionRow(op, interval, fixed_bytes, least[interval, waiting], waiting)
        for (interval, waiting), (fixed_bytes, op) in highest.items()
    )


def _waiting_times(
    graph: StepGraph,
    candidates: set[int],
    demands: tuple[int, ...],
    due: Mapping[int, int],
    first_read: Mapping[int, int],
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """By op id: the candidates that nothing in the forward pass reads any more, and those that are read again."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for s in sorted(candidates):
        starts.setdefault(last_forward_reader(graph, s) + 1, []).append(s)
        last_needed = max(demands[due[s] - 1], first_read.get(s, 0))
        ends.setdefault(min(last_needed + 1, first_read.get(s, len(graph.ops))), []).append(s)
    return starts, ends
