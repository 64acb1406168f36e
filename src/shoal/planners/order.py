"""Run the ops of a step in an order that needs fewer bytes: nothing is recomputed, nothing moves.

Also known as: operator scheduling for memory (Steiner et al., MODeL / OLLA, ICML'23; Shu et al., ROAM, 2023), pebbling
of a directed acyclic graph, which is NP-hard. Those programs choose a time for every tensor; this search asks one
question again and again: which ops must have run so that the op at the peak runs in the fewest bytes? The answer is a
minimum cut (`least_prefix`), and it is exact for that op.

1. *Split.* The ops of that set run first, then the op at the peak, then the others. Where either part now has a peak as
   high, it is split in turn.
2. *Move*, where no split helps: a single op, with what it needs or what needs it, is taken across the peak.

A peak that no cut can lower is the minimum of any order, and one near `least_peak` is lowered no further. Otherwise
nothing is proven; on random graphs of ten ops the peak is 0.3 % above the optimum on average (`bench.order`).

The forward pass and the backward pass are ordered each by itself, and in a step of several graphs so is each pass of a
graph: no op moves across the eager code between them. The last forward op stays last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.order import reordered
from shoal.core.residence import Offload, Recompute, Residence, exact_residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.limits import Effort
from shoal.planners.pass_tasks import PassTasks, bytes_during, least_peak, pass_tasks

_CUT = 10  # tasks played through take as long as one task of a minimum cut
_MAX_DEPTH = 50  # of parts within parts
_WORTH = 1 / 1000  # of a peak: the search ends if no more can be gained, by `least_peak`
# Capacities are 32-bit integers, and so is a capacity plus the flow against it.
_NO_CUT = 2**30
_MOST = 2**29  # what all blocks together count as, at most: bytes are rounded up to units of that


@dataclass(frozen=True)
class Ordered:
    """A step in another order, the residences that it has there, and its exact peak."""

    graph: StepGraph
    residences: Mapping[str, Residence]
    peak_bytes: int


def lower_peak(graph: StepGraph, residences: Mapping[str, Residence], effort: Effort) -> Ordered | None:
    """An order of the step's ops in which the same storages are kept and recomputed inside fewer bytes.

    Everything is recomputed as often as before, though before another op where that lowers the peak; where an op then
    runs again for two storages at once, it runs once for both.

    Args:
        graph: the step.
        residences: by storage name.
        effort: what it may cost, after which the best found so far counts.

    Returns:
        None where no better order was found, or where something is offloaded: its copies would have to be placed again.
    """
    if any(isinstance(exact_residence(residence), Offload) for residence in residences.values()):
        return None
    runs = schedule(graph, residences)
    loss = next((place for place, run in enumerate(runs) if graph.ops[run.op].phase == "loss"), graph.n_forward - 1)
    backward = [runs[loss + 1 + task] for task in best_order(pass_tasks(graph, runs, loss + 1, len(runs)), effort)]
    forward = [runs[task] for task in best_order(pass_tasks(graph, runs, 0, graph.n_forward), effort)]
    ordered = [*forward, *runs[graph.n_forward : loss + 1], *backward]
    step = reordered(graph, [graph.ops[run.op].name for run in ordered if not run.again])
    found = _recomputed_where(graph, residences, ordered)
    peak_bytes, _ = peak_and_seconds(step, schedule(step, found))
    before_bytes, _ = peak_and_seconds(graph, runs)
    return Ordered(step, found, peak_bytes) if peak_bytes < before_bytes else None


def _recomputed_where(graph: StepGraph, residences: Mapping[str, Residence], runs: list[Run]) -> dict[str, Residence]:
    """The residences with the ops named before which these runs recompute."""
    before: dict[str, list[str]] = {}
    again: list[str] = []
    for run in runs:
        if run.again:
            again += [graph.storages[storage].name for storage in run.writes]
        else:
            for name in again:
                before.setdefault(name, []).append(graph.ops[run.op].name)
            again = []
    return {
        name: Recompute(tuple(before.get(name, ()))) if isinstance(residence, Recompute) else residence
        for name, residence in residences.items()
    }


def best_order(tasks: PassTasks, effort: Effort) -> list[int]:
    """An order of the tasks with a low peak; the given one where none is better."""
    return _OrderSearch(tasks, effort).run()


class _OrderSearch:
    def __init__(self, tasks: PassTasks, effort: Effort) -> None:
        self._tasks = tasks
        self._effort = effort

    def run(self) -> list[int]:
        order = list(range(len(self._tasks)))
        least_bytes = least_peak(self._tasks)
        while order and not self._effort.is_spent:
            peak_bytes, at = self._peak(order, 0, len(order))
            if (1 - _WORTH) * peak_bytes <= least_bytes:
                break
            better = self._split(order, 0, len(order), peak_bytes) or self._moved(order, at, peak_bytes)
            if better is None:
                break
            order = better
        return order

    def _peak(self, order: list[int], begin: int, end: int) -> tuple[int, int]:
        """The highest number of bytes in a part of the order, and its place."""
        self._effort.spend(len(order))
        during = bytes_during(self._tasks, order)[begin:end]
        highest = max(during, default=0)
        return highest, begin + during.index(highest) if during else begin

    def _split(self, order: list[int], begin: int, end: int, below_bytes: int, depth: int = 0) -> list[int] | None:
        """An order with another arrangement of `order[begin:end]`, whose peak is below; None where none was found."""
        peak_bytes, at = self._peak(order, begin, end)
        if peak_bytes < below_bytes:
            return order
        task = order[at]
        for largest in (False, True):
            if self._effort.is_spent or depth > _MAX_DEPTH:
                return None
            self._effort.spend(_CUT * (end - begin))
            first = least_prefix(self._tasks, order, begin, end, task, largest=largest)
            part = order[begin:end]
            before = [other for other in part if other in first]
            later = [other for other in part if other not in first and other != task]
            middle = begin + len(before)
            changed: list[int] | None = [*order[:begin], *before, task, *later, *order[end:]]
            assert changed is not None
            if self._peak(changed, middle, middle + 1)[0] >= below_bytes:
                return None  # nor is it in any other order of this part
            changed = self._split(changed, begin, middle, below_bytes, depth + 1)
            changed = changed and self._split(changed, middle + 1, end, below_bytes, depth + 1)
            if changed is not None:
                return changed
        return None

    def _moved(self, order: list[int], at: int, below_bytes: int) -> list[int] | None:
        """The order with one op, and what must go with it, moved across the peak; None where that does not help."""
        for group in self._groups(order, at):
            rest = [task for task in order if task not in group]
            moved = [task for task in order if task in group]
            for place in self._places(rest, group, order[at], order.index(moved[0]) < at):
                if self._effort.is_spent:
                    return None
                changed = [*rest[:place], *moved, *rest[place:]]
                if self._peak(changed, 0, len(changed))[0] < below_bytes:
                    return changed
        return None

    def _groups(self, order: list[int], at: int) -> Iterator[set[int]]:
        """A later task with what it needs, or an earlier one with what needs it, where the peak is free of both."""
        after = self._tasks.after
        place = {task: number for number, task in enumerate(order)}
        for number in range(1, len(order)):
            if at + number < len(order):
                group, pending = {order[at + number]}, [order[at + number]]
                while pending:
                    needed = {task for task in after[pending.pop()] if place[task] >= at} - group
                    group |= needed
                    pending.extend(needed)
                self._effort.spend(len(group))
                if order[at] not in group:
                    yield group
            if number <= at:
                group = {order[at - number]}
                for task in order[at - number + 1 : at + 1]:
                    if not after[task].isdisjoint(group):
                        group.add(task)
                self._effort.spend(number)
                if order[at] not in group:
                    yield group

    def _places(self, rest: list[int], group: set[int], peak: int, was_earlier: bool) -> Iterator[int]:
        """Where the group may go on the other side of the peak: near it first, then in growing steps."""
        after = self._tasks.after
        here = rest.index(peak)
        if was_earlier:
            here += 1
            end = next((n for n in range(here, len(rest)) if not after[rest[n]].isdisjoint(group)), len(rest))
        else:
            needed = {earlier for task in group for earlier in after[task]}
            end = next((n + 1 for n in range(here - 1, -1, -1) if rest[n] in needed), 0)
        step, span = 1, abs(end - here)
        yield here
        while step < span:
            yield here + step if was_earlier else here - step
            step *= 2
        if span:
            yield end


class _FlowNetwork:
    """A flow network under construction."""

    def __init__(self, n_tasks: int) -> None:
        self.source, self.sink = n_tasks, n_tasks + 1
        self.n_nodes = n_tasks + 2
        self._tails: list[int] = []
        self._heads: list[int] = []
        self._capacities: list[int] = []

    def edge(self, tail: int, head: int, nbytes: int = -1) -> None:
        """From `tail` to `head`; without bytes it cannot be cut."""
        self._tails.append(tail)
        self._heads.append(head)
        self._capacities.append(nbytes)

    def block(self, tail: int, heads: Sequence[int], nbytes: int) -> None:
        """Bytes that count once `tail` is in the set, as long as one of `heads` is not."""
        if len(heads) == 1:
            self.edge(tail, heads[0], nbytes)
            return
        node = self.n_nodes
        self.n_nodes += 1
        self.edge(tail, node, nbytes)
        for head in heads:
            self.edge(node, head)

    def source_side(self, largest: bool) -> set[int]:
        """The nodes on the source's side of a minimum cut: of all such cuts the smallest side, or the largest."""
        from scipy.sparse import csr_matrix  # a tenth of what `import shoal` would take
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        nbytes = np.array(self._capacities, dtype=np.int64)
        unit = max(1, -(-int(nbytes[nbytes > 0].sum()) // _MOST))
        capacities = np.where(nbytes < 0, _NO_CUT, -(-nbytes // unit))
        shape = (self.n_nodes, self.n_nodes)
        summed = csr_matrix((capacities, (self._tails, self._heads)), shape=shape)
        data = np.minimum(summed.data, _NO_CUT).astype(np.int32)
        network = csr_matrix((data, summed.indices.astype(np.int32), summed.indptr.astype(np.int32)), shape=shape)
        left = network - maximum_flow(network, self.source, self.sink).flow
        left.data = (left.data > 0).astype(np.int32)
        left.eliminate_zeros()
        if largest:
            beyond = breadth_first_order(left.T.tocsr(), self.sink, return_predecessors=False)
            return set(range(self.n_nodes)).difference(beyond.tolist())
        return set(breadth_first_order(left, self.source, return_predecessors=False).tolist())


def least_prefix(
    tasks: PassTasks, order: Sequence[int], begin: int, end: int, task: int, *, largest: bool = False
) -> set[int]:
    """The tasks of `order[begin:end]` to run before `task`, one of them.

    A set of tasks that can have run at some moment is closed under "runs before". The blocks in use after it are
    those that a task of the set writes and a task outside it still reads. So the set with the fewest bytes is the
    source side of a minimum cut (a maximum closure, Picard '76), and no order has fewer bytes in use while the task
    runs.

    Args:
        tasks: of the pass.
        order: all of them, in an order in which they can run; what comes before `begin` has run.
        begin, end: of the part whose order is free.
        task: the one for which memory is to be made.
        largest: of several such sets, the one with the most tasks instead of the fewest.
    """
    number = {other: place for place, other in enumerate(order[begin:end])}
    done = set(order[:begin])
    network = _FlowNetwork(len(number))
    seen: set[int] = set()
    for other, node in number.items():
        for earlier in tasks.after[other]:
            if earlier in number:
                network.edge(node, number[earlier])
        for index in (*tasks.reads[other], *tasks.writes[other]):
            if index in seen:
                continue
            seen.add(index)
            block = tasks.blocks[index]
            tail = number.get(block.producer, network.source)
            readers = [number[reader] for reader in block.readers if reader in number]
            if block.stays or any(r not in number and r not in done for r in block.readers):
                if tail != network.source:  # else it counts whatever the order
                    network.edge(tail, network.sink, block.nbytes)
            elif readers:
                network.block(tail, readers, block.nbytes)
    _count_overwriting(network, tasks, number, done, task)
    network.edge(number[task], network.sink)
    for earlier in tasks.after[task]:
        if earlier in number:
            network.edge(network.source, number[earlier])
    before = network.source_side(largest)
    return {other for other, node in number.items() if node in before}


def _count_overwriting(
    network: _FlowNetwork, tasks: PassTasks, number: dict[int, int], done: set[int], task: int
) -> None:
    """The task's first result takes bytes of its own, unless all other readers of what it overwrites have run."""
    target = tasks.overwrites[task]
    if target < 0 or tasks.blocks[target].stays:
        return
    others = [reader for reader in tasks.blocks[target].readers if reader != task and reader not in done]
    if others and all(reader in number for reader in others):
        network.block(network.source, [number[reader] for reader in others], tasks.blocks[target].nbytes)
