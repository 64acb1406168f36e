"""Plans with small peaks: everything is recomputed right before each op that reads it, in an order that suits that.

With nothing held between two backward ops, an op and the recomputation that it needs are one task, whose bytes do not
depend on when it runs. So the order of the backward pass is found for these tasks first: where patches share weights,
one patch is through before the next begins, and large weight gradients wait until activation gradients are gone. What
then fits in addition to the peak is held until it is read again (`hold_longer`), which saves most of the time.

`smallest_plan` starts from these plans. They recompute a storage as often as it is read, which the integer program
does not, and in a finer grain than the blocks of `chain`. What stays from the forward pass on: `kept_sets`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from shoal.core.order import op_names, reordered
from shoal.core.residence import Residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import dropped_bytes, peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import Effort, Guard, Limits, cached_unless_stopped
from shoal.planners.order import best_order
from shoal.planners.pass_tasks import bytes_during, pass_tasks
from shoal.planners.recompute_choice import RecomputeChoice, recompute_choice
from shoal.planners.simulated import Simulated, simulated

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
    for again, run in groups(graph, runs):
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


def groups(graph: StepGraph, runs: tuple[Run, ...]) -> Iterator[tuple[list[Run], Run]]:
    """Each run of a backward op, with the recomputations before it."""
    again: list[Run] = []
    for run in runs[graph.n_forward :]:
        if run.again:
            again.append(run)
        else:
            yield again, run
            again = []


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
