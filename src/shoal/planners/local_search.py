"""Local search that lowers the peak of a plan by changing when what fills it exists.

What waits at the peak is given up and recomputed, once more if need be, when it is read. And what is recomputed at the
peak is recomputed a few ops earlier, where less is in use: before a pooling's gradient unfolds to four times its size,
say.

A storage that comes back for one reader may have its next reader far away: a U-Net's skip is read first by the
concatenation's recomputation and last at the other end of the backward pass. Greedy, in the spirit of dynamic tensor
rematerialisation (Kirisame et al., DTR, ICLR'21: evict by bytes and staleness over cost), but on the simulated step,
where every future reader is known. No optimum is claimed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.residence import Recompute, Residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import bytes_and_seconds
from shoal.core.step import StepGraph
from shoal.errors import PlanError
from shoal.planners.changed_runs import PlannedRuns
from shoal.planners.limits import DEFAULT, Effort, Guard, Limits

_ENOUGH_CHANGES = 6  # after which it is foreseen how many more it takes
_HOPELESS = 2.0  # as many more than may be made: the search ends


@dataclass(frozen=True)
class _Simulated:
    """Residences, the runs they stand for, and what is in use during each."""

    residences: Mapping[str, Residence]
    runs: tuple[Run, ...]
    total_bytes: Sequence[int]
    seconds: float

    def excess_bytes(self, budget_bytes: int) -> int:
        """Bytes over the budget, added up over all runs."""
        return sum(total - budget_bytes for total in self.total_bytes if total > budget_bytes)


@dataclass(frozen=True)
class _Wait:
    """A storage that is in use at the peak and read only later, by the backward op `op` or a recomputation for it."""

    storage: int
    op: int


def local_search(
    graph: StepGraph,
    residences: Mapping[str, Residence],
    budget_bytes: int,
    limits: Limits = DEFAULT,
    effort: Effort | None = None,
) -> dict[str, Residence] | None:
    """Residences derived from `residences` whose peak fits, or None where no change within the limits gets there.

    Args:
        graph: the step.
        residences: a plan whose peak is over the budget.
        budget_bytes: most bytes in use at any position.
        limits: how many changes to make, and to compare each time.
        effort: what it may cost; None for what `limits` say.
    """
    effort = effort or Effort("local search", limits.local_search_ops, Guard(limits.guard_seconds))
    current = _simulated(graph, residences)
    first_bytes, first_ops = current.excess_bytes(budget_bytes), effort.left_ops
    for done in range(limits.max_drops):
        over_bytes = current.excess_bytes(budget_bytes)
        if over_bytes == 0:
            return dict(current.residences)
        if done >= _ENOUGH_CHANGES:
            needed = done * over_bytes / (first_bytes - over_bytes)  # changes, as large as those so far
            may_make = min(limits.max_drops - done, done * effort.left_ops / max(1, first_ops - effort.left_ops))
            if needed > _HOPELESS * may_make:
                return None
        best: tuple[float, dict[str, Recompute]] | None = None
        planned = PlannedRuns(graph, current.residences, current.runs)
        for changes in _changes(graph, current, planned, limits):
            try:
                total_bytes, seconds = planned.after(changes)
            except PlanError:  # what it reads is not back there yet
                continue
            effort.spend(len(total_bytes))
            less_bytes = over_bytes - int((total_bytes - budget_bytes).clip(0).sum())
            if less_bytes > 0:
                gain = less_bytes / max(seconds - current.seconds, 1e-9)
                if best is None or gain > best[0]:
                    best = (gain, changes)
        if best is None or effort.is_spent:
            return None
        current = _simulated(graph, {**current.residences, **best[1]})
    return None


def _simulated(graph: StepGraph, residences: Mapping[str, Residence]) -> _Simulated:
    runs = schedule(graph, residences)
    return _Simulated(residences, runs, *bytes_and_seconds(graph, runs))


def _changes(
    graph: StepGraph, simulated: _Simulated, planned: PlannedRuns, limits: Limits
) -> Iterator[dict[str, Recompute]]:
    """Residences that may be others."""
    peak = max(range(len(simulated.runs)), key=simulated.total_bytes.__getitem__)
    for wait in _waiting_at(graph, simulated.runs, peak)[: limits.max_dropped_candidates]:
        yield _recompute_before(graph, simulated.residences, planned, wait)
    if not limits.recompute_earlier:
        return
    served = _served(simulated.runs, peak)
    for op in reversed(range(max(graph.n_forward, served - limits.max_earlier_ops), served)):
        yield _recompute_earlier(graph, simulated.residences, served, op)


def _recompute_earlier(
    graph: StepGraph, residences: Mapping[str, Residence], served: int, earlier: int
) -> dict[str, Recompute]:
    """What is recomputed before the op `served` is recomputed before the op `earlier` instead."""
    changed = {}
    old, new = graph.ops[served].name, graph.ops[earlier].name
    for name, residence in residences.items():
        if isinstance(residence, Recompute) and old in residence.before:
            changed[name] = Recompute(_in_order(graph, {*residence.before, new} - {old}))
    return changed


def _in_order(graph: StepGraph, names: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: graph.op_called[name].id))


def _waiting_at(graph: StepGraph, runs: tuple[Run, ...], peak: int) -> list[_Wait]:
    """What can be given up at position `peak` until its next reader after it, most bytes first.

    What the run there reads itself counts too: it may write over an operand that nothing waits for.
    """
    alive = _untouched(graph, runs, peak)
    for run in runs[:peak]:
        if run.again:
            alive.update(run.writes)
        alive.difference_update(run.frees)
    written = {*runs[peak].of(graph).writes, *runs[peak].writes}
    idle = alive - written
    waits = []
    for position in range(peak + 1, len(runs)):
        for storage in idle.intersection(runs[position].of(graph).reads):
            waits.append(_Wait(storage, _served(runs, position)))
            idle.discard(storage)
    return sorted(waits, key=lambda wait: -graph.storages[wait.storage].nbytes)


def _untouched(graph: StepGraph, runs: tuple[Run, ...], peak: int) -> set[int]:
    """Kept storages that no one has read since the forward pass and that could be recomputed instead."""
    if peak < graph.n_forward:
        return set()
    read = {storage for run in runs[graph.n_forward : peak + 1] for storage in run.of(graph).reads}
    return set(graph.can_be_recomputed - read)


def _served(runs: tuple[Run, ...], position: int) -> int:
    """The backward op that the run at `position` is, or recomputes for."""
    return next(run.op for run in runs[position:] if not run.again)


def _recompute_before(
    graph: StepGraph, residences: Mapping[str, Residence], planned: PlannedRuns, wait: _Wait
) -> dict[str, Recompute]:
    """Recompute the storage before the op, and with it whatever given-up storage that takes and is not back there."""
    changed: dict[str, Recompute] = {}
    pending = [wait.storage]
    done: set[int] = set()
    while pending:
        storage = pending.pop()
        name = graph.storages[storage].name
        residence = residences.get(name)
        if storage == wait.storage and not isinstance(residence, Recompute):
            residence = Recompute()
        if storage in done or not isinstance(residence, Recompute):
            continue
        if storage != wait.storage and planned.is_back(storage, wait.op):
            continue
        done.add(storage)
        changed[name] = Recompute(_in_order(graph, {*residence.before, graph.ops[wait.op].name}))
        pending.extend(graph.ops[graph.producer[storage]].second.reads)
    return changed
