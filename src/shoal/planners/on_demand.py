"""Plans with small peaks: everything is recomputed right before each op that reads it, in an order that suits that.

With nothing held between two backward ops, an op and the recomputation that it needs are one task, whose bytes do not
depend on when it runs. So the order of the backward pass is found for these tasks first: where patches share weights,
one patch is through before the next begins, and large weight gradients wait until activation gradients are gone. What
then fits in addition to the peak is held until it is read again (`hold_longer`), which saves most of the time.

`smallest_plan` starts from these plans. They recompute a storage as often as it is read, which the integer program
does not, and in a finer grain than the blocks of `chain`. What stays from the forward pass on: `kept_sets`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.core.order import op_names, reordered
from shoal.core.residence import Keep, Recompute, Residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import bytes_and_seconds, dropped_bytes, peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.fill_slack import without_needless_runs
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import Effort, Guard, Limits, cached_unless_stopped
from shoal.planners.order import best_order
from shoal.planners.pass_tasks import bytes_during, pass_tasks
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice
from shoal.planners.simulated import Simulated, simulated

_ROUNDS = 8  # of `hold_longer`
_SMALL_SHARE = 0.002  # of the largest storage: what is smaller may stay longer than needed while an order is looked for


# For each variant, in each loop, with either limits: 15 to 19 in a first step of ResNet-50, 90 where it is refused.
@cached_unless_stopped(128, lambda found: found[1])
def plans_on_demand(graph: StepGraph, limits: Limits) -> tuple[tuple[Simulated, ...], tuple[str, ...]]:
    """Plans of this module, the one with the smallest peak first, and what the time limit ended early.

    Args:
        graph: the step, without a link.
        limits: how far to search.
    """
    guard = Guard(limits.guard_seconds)
    starts = [graph]
    if limits.order:  # by activation gradients only first: that is a good start whatever is kept
        without = tuple(replace(s, nbytes=0) if s.kind == "activation" else s for s in graph.storages)
        first = _ordered(replace(graph, storages=without), range(len(without)), limits, guard)
        starts.append(reordered(graph, op_names(first)))
    found: list[Simulated] = []
    for start in dict.fromkeys(starts):
        choice = recompute_choice(start)
        sets = kept_sets(choice, limits.narrow_share, limits.way_shares)
        peaks = {kept: simulated(start, on_demand(start, kept)).peak_bytes for kept in sets}
        for kept in sorted(sets, key=peaks.__getitem__)[: limits.kept_sets]:
            step = _ordered(start, kept, limits, guard)
            one = simulated(step, on_demand(step, kept))
            found.append(one if one.peak_bytes <= peaks[kept] else simulated(start, on_demand(start, kept)))
    return tuple(sorted(found, key=lambda one: (one.peak_bytes, one.seconds))), tuple(guard.stopped)


def _ordered(graph: StepGraph, kept: Collection[int], limits: Limits, guard: Guard) -> StepGraph:
    if not limits.order:
        return graph
    return in_order_on_demand(graph, kept, Effort("order of ops", limits.order_ops, guard))


def on_demand(graph: StepGraph, kept: Collection[int]) -> dict[str, Residence]:
    """The residences that recompute what is not kept before every backward op that needs it, and hold it no longer.

    Args:
        graph: the step.
        kept: ids of storages that stay from the forward pass on, as for `just_in_time`.
    """
    backward = range(graph.n_forward, len(graph.ops))
    return just_in_time(graph, kept, dict.fromkeys(range(len(graph.storages)), backward))


def in_order_on_demand(graph: StepGraph, kept: Collection[int], effort: Effort) -> StepGraph:
    """The step with its ops in an order in which the plan `on_demand` has a low peak.

    Args:
        graph: the step.
        kept: as for `on_demand`.
        effort: what it may cost, after which the best order found so far counts.
    """
    runs = schedule(graph, on_demand(graph, kept))
    joined = _with_recomputation_inside(graph, runs)
    first = schedule(joined, {})
    begin = graph.n_forward + any(op.phase == "loss" for op in graph.ops)
    backward_tasks = pass_tasks(joined, first, begin, len(first))
    backward = best_order(backward_tasks, effort)
    forward = list(range(graph.n_forward))
    forward_bytes, _ = peak_and_seconds(graph, runs[: graph.n_forward])
    if forward_bytes > max(bytes_during(backward_tasks, backward), default=0):
        forward = best_order(pass_tasks(graph, runs, 0, graph.n_forward), effort)
    order = [*forward, *range(graph.n_forward, begin), *(begin + task for task in backward)]
    return reordered(graph, [graph.ops[op].name for op in order])


def _with_recomputation_inside(graph: StepGraph, runs: tuple[Run, ...]) -> StepGraph:
    """The step of which each backward op recomputes what it needs in its workspace."""
    given_up = {s for run in runs if run.again for s in run.writes}
    given_up |= {s for run in runs[: graph.n_forward] for s in run.frees}
    small_bytes = _SMALL_SHARE * max(s.nbytes for s in graph.storages)
    waits = {s.id for s in graph.storages if s.kind == "activation" and s.nbytes > small_bytes} - given_up
    ops = list(graph.ops[: graph.n_forward])
    for again, run in _groups(graph, runs):
        op = graph.ops[run.op]
        alive: set[int] = set()
        widest_bytes, in_use = 0, 0
        reads = dict.fromkeys(op.reads)
        for one in (*again, run):
            its_op = one.of(graph)
            if one.again:
                reads.update(dict.fromkeys(waits.intersection(its_op.reads)))
                in_use += sum(graph.storages[s].nbytes for s in one.writes)
                alive.update(one.writes)
            taken_bytes = graph.storages[one.takes_over].nbytes if one.takes_over in alive else 0
            scratch_bytes = its_op.workspace_bytes + dropped_bytes(graph, one, its_op)
            net_bytes = _net_bytes(graph, run) if one.again else 0
            widest_bytes = max(widest_bytes, in_use - taken_bytes + scratch_bytes - net_bytes)
            gone = alive.intersection(one.frees)
            in_use -= sum(graph.storages[s].nbytes for s in gone)
            alive -= gone
        overwrites = -1 if op.overwrites in given_up else op.overwrites
        ops.append(replace(op, reads=tuple(reads), workspace_bytes=widest_bytes, overwrites=overwrites))
    storages = tuple(replace(s, nbytes=0) if s.id in given_up else s for s in graph.storages)
    return replace(graph, ops=tuple(ops), storages=storages, link=None)


def _net_bytes(graph: StepGraph, run: Run) -> int:
    """By how much the op itself has more in use than what runs before it."""
    written_bytes = sum(graph.storages[s].nbytes for s in run.writes)
    return written_bytes - (graph.storages[run.takes_over].nbytes if run.takes_over >= 0 else 0)


def _groups(graph: StepGraph, runs: tuple[Run, ...]) -> Iterator[tuple[list[Run], Run]]:
    """Each run of a backward op, with the recomputations before it."""
    again: list[Run] = []
    for run in runs[graph.n_forward :]:
        if run.again:
            again.append(run)
        else:
            yield again, run
            again = []


@dataclass(frozen=True)
class _Hold:
    """A storage that need not be recomputed before an op if it stays.

    Attributes:
        storage: its id.
        since: the op that reads it last before.
        before: the op before which it is recomputed now.
        seconds: about what that takes, with what it needs.
        is_first: it would stay from the forward pass on.
    """

    storage: int
    since: int
    before: int
    seconds: float
    is_first: bool


def hold_longer(
    graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int, effort: Effort
) -> dict[str, Residence]:
    """Residences that recompute less often where the budget has room for what is recomputed to stay.

    Greedy, the most seconds for the bytes and the ops during which they are in use first. In contrast to `fill_slack`
    many changes are made before the step is simulated again, by an upper bound of the bytes at each op. Meant for plans
    with many recomputations.

    Args:
        graph: the step.
        residences: a plan whose peak fits; nothing is offloaded.
        budget_bytes: most bytes in use at any position.
        effort: what it may cost, after which the best found so far counts.
    """
    best = without_needless_runs(graph, residences)
    runs = schedule(graph, best)
    total_bytes, seconds = bytes_and_seconds(graph, runs)
    for _ in range(_ROUNDS):
        if effort.is_spent:
            break
        changed = _held(graph, best, runs, total_bytes, budget_bytes)
        changed = without_needless_runs(graph, changed)
        changed_runs = schedule(graph, changed)
        effort.spend(2 * (len(runs) + len(changed_runs)))
        changed_bytes, changed_seconds = bytes_and_seconds(graph, changed_runs)
        if changed_seconds >= seconds or max(changed_bytes) > budget_bytes:
            break
        best, runs, total_bytes, seconds = changed, changed_runs, changed_bytes, changed_seconds
    return best


def _held(
    graph: StepGraph,
    residences: Mapping[str, Residence],
    runs: tuple[Run, ...],
    total_bytes: list[int],
    budget_bytes: int,
) -> dict[str, Residence]:
    highest = np.zeros(len(graph.ops), np.int64)  # op → bytes in use during it or a recomputation for it
    again: list[int] = []
    for place, run in enumerate(runs):
        again.append(total_bytes[place])
        if not run.again:
            highest[run.op] = max(again)
            again = []
    before: dict[int, set[int]] = {}
    for s in graph.storages:
        residence = residences.get(s.name)
        if isinstance(residence, Recompute) and residence.before:
            before[s.id] = {graph.op_called[name].id for name in residence.before}
    holds = list(_holds(graph, runs))

    def worth(hold: _Hold) -> float:
        return hold.seconds / ((graph.storages[hold.storage].nbytes + 1) * (hold.before - hold.since + 1))

    kept = set()
    # To stay from the forward pass on, a storage must not be recomputed at all.
    for is_first in (False, True):
        for hold in sorted((h for h in holds if h.is_first == is_first), key=worth, reverse=True):
            during = highest[hold.since : hold.before + 1]
            nbytes = graph.storages[hold.storage].nbytes
            if during.max() + nbytes > budget_bytes or (is_first and len(before[hold.storage]) > 1):
                continue
            during += nbytes
            before[hold.storage].discard(hold.before)
            if is_first:
                kept.add(hold.storage)
    found = dict(residences)
    for storage, ops in before.items():
        name = graph.storages[storage].name
        found[name] = Keep() if storage in kept else Recompute(tuple(graph.ops[op].name for op in sorted(ops)))
    return found


def _holds(graph: StepGraph, runs: tuple[Run, ...]) -> Iterator[_Hold]:
    """Every recomputation of a storage, as what would be held instead."""
    last: dict[int, int] = {}  # storage → the op for which it was in use last
    for run in runs[: graph.n_forward]:
        last.update(dict.fromkeys((*graph.ops[run.op].reads, *run.writes), run.op))
    there: set[int] = set()  # those that were recomputed before
    for again, run in _groups(graph, runs):
        taken_seconds: dict[int, float] = {}  # storage → of the recomputations on the way to it, some counted twice
        for one in again:
            op = one.of(graph)
            seconds = op.longer_seconds + sum(taken_seconds.get(s, 0.0) for s in op.reads)
            for storage in one.writes:
                taken_seconds[storage] = seconds
                yield _Hold(storage, last[storage], run.op, seconds, storage not in there)
                there.add(storage)
            last.update(dict.fromkeys((*op.reads, *one.writes), run.op))
        last.update(dict.fromkeys(run.of(graph).reads, run.op))


def kept_sets(choice: RecomputeChoice, narrow_share: float, way_shares: Sequence[float]) -> list[frozenset[int]]:
    """Sets of storages that may stay, each once.

    What stays while everything else is recomputed on demand: those with which the peak is low. No rule is best for
    every step. What is much smaller than its way should stay; but much of it at once is a lot, and where batch
    norms join slices of a batch, one joined tensor is small compared with all slices together, not with each of
    them. So sets by several rules are tried, and a schedule says what each takes.

    Args:
        choice: of the step.
        narrow_share: how large a storage may be as a share of the largest on the way to it, for `narrow`.
        way_shares: the same of all that is in use on the way, for `beside_their_way`.
    """
    sets = [narrow(choice, narrow_share), choice.kept_for(())]
    return list(dict.fromkeys([*sets, *(beside_their_way(choice, share) for share in way_shares)]))


def narrow(choice: RecomputeChoice, share: float) -> frozenset[int]:
    """What must stay, and what is much smaller than what its recomputation makes on the way: a pooling's result, say.

    Args:
        choice: of the step.
        share: how large it may be, as a share of the largest storage on the way.
    """
    ops, storages = choice.graph.ops, choice.graph.storages

    def widest_bytes(storage: int) -> int:
        return max(storages[made].nbytes for op in choice.reruns[storage] for made in ops[op].second.writes)

    return choice.kept_for([s for s in choice.candidates if storages[s].nbytes <= share * widest_bytes(s)])


def beside_their_way(choice: RecomputeChoice, share: float) -> frozenset[int]:
    """What must stay, and in the order of the step each storage that is small compared with what its recomputation has
    in use.

    Args:
        choice: of the step.
        share: how large it may be, as a share of the most bytes in use on the way from what stays.
    """
    graph = choice.graph
    kept = set(choice.kept_for(()))
    found = []
    for storage in sorted(choice.candidates, key=graph.producer.__getitem__):
        if graph.storages[storage].nbytes <= share * _way_bytes(graph, storage, kept):
            kept.add(storage)
            found.append(storage)
    return choice.kept_for(found)


def _way_bytes(graph: StepGraph, storage: int, kept: set[int]) -> int:
    """The most bytes in use while a storage is recomputed from what stays."""
    ops, storages = graph.ops, graph.storages
    again: set[int] = set()
    pending = [graph.producer[storage]]
    while pending:
        number = pending.pop()
        if number not in again:
            again.add(number)
            pending += [graph.producer[s] for s in ops[number].second.reads if s in graph.producer and s not in kept]
    in_order = sorted(again)
    last = {s: number for number in in_order for s in ops[number].second.reads}
    made: set[int] = set()
    in_use = highest = 0
    for number in in_order:
        op = ops[number].second
        new = {s for s in op.writes if s in last or s == storage}
        made |= new
        in_use += sum(storages[s].nbytes for s in new)
        highest = max(highest, in_use + op.workspace_bytes)
        gone = {s for s in op.reads if s in made and last[s] == number and s != storage}
        made -= gone
        in_use -= sum(storages[s].nbytes for s in gone)
    return highest
