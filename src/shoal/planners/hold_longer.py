"""Hold what a plan recomputes more than once, if there is room: first what saves most for the price of its bytes.

A plan on demand recomputes in *groups*: each is what runs again right before one backward op. A storage that is held
from the group that has it last, or from the forward pass, need not be recomputed in the next one, and neither need what
was recomputed only for it. How much that saves depends on what is held already, so that it is computed when a hold's
turn comes (lazy greedy, Minoux 1978). A byte has a price at each op: the bytes that all holds together would take
there, as a multiple of those that are free. Many holds are chosen before the step is simulated again, by an upper bound
of the bytes at each op.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shoal.core.residence import Keep, Recompute, Residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import bytes_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.fill_slack import without_needless_runs
from shoal.planners.limits import Effort
from shoal.planners.on_demand import groups

_ROUNDS = 8  # a round that saves nothing ends them; plans of ResNet-50 took 5 to 7
_LOOKED_UP = 8  # recomputations are looked up in the time in which one is simulated: 1.4 and 8 to 14 us, ResNet-50


def hold_longer(
    graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int, effort: Effort
) -> dict[str, Residence]:
    """Residences that recompute less often if the budget has room for what is recomputed to stay.

    In contrast to `fill_slack` many changes are made before the step is simulated again. Meant for plans with many
    recomputations.

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
        holds = _Holds(graph, best, runs, total_bytes, budget_bytes, effort)
        holds.choose()
        changed = without_needless_runs(graph, holds.residences())
        changed_runs = schedule(graph, changed)
        effort.spend(2 * (len(runs) + len(changed_runs)))
        changed_bytes, changed_seconds = bytes_and_seconds(graph, changed_runs)
        if changed_seconds >= seconds or max(changed_bytes) > budget_bytes:
            break
        best, runs, total_bytes, seconds = changed, changed_runs, changed_bytes, changed_seconds
    return best


class _Hold(NamedTuple):
    """An op that need not run again in a group if what it writes there stays.

    Attributes:
        price: of its bytes, for each second that this saves, at least.
        op: its id.
        group: the op before which it runs again now.
    """

    price: float
    op: int
    group: int


class _Holds:
    """The groups of one plan, and which of their storages are held from an earlier one.

    Attributes:
        highest: op → bytes in use during it, or a recomputation for it, at most.
        again: group → the storages that are recomputed in it. groups_of: storage → these groups, in order.
        used_in: storage → the groups in which it is read or made, in order.
        wanted: group → those of its storages that later groups read as it leaves them.
    """

    def __init__(
        self,
        graph: StepGraph,
        residences: Mapping[str, Residence],
        runs: tuple[Run, ...],
        total_bytes: list[int],
        budget_bytes: int,
        effort: Effort,
    ) -> None:
        self._graph, self._before, self._budget_bytes, self._effort = graph, residences, budget_bytes, effort
        self.highest = np.zeros(len(graph.ops), np.int64)
        self.again: dict[int, set[int]] = {}
        self.used_in: dict[int, list[int]] = {}
        self._last_forward: dict[int, int] = {}  # storage → the op of the forward pass that has it last
        for place, run in enumerate(runs):
            if place < graph.n_forward:
                self.highest[run.op] = total_bytes[place]
                self._last_forward.update(dict.fromkeys((*graph.ops[run.op].reads, *run.writes), run.op))
        place = graph.n_forward
        for before, run in groups(graph, runs):
            end = place + len(before) + 1
            self.highest[run.op] = max(total_bytes[place:end])
            self.again[run.op] = {storage for one in before for storage in one.writes}
            used = {storage for one in (*before, run) for storage in (*one.of(graph).reads, *one.writes)}
            for storage in used:
                self.used_in.setdefault(storage, []).append(run.op)
            place = end
        self.groups_of: dict[int, list[int]] = {}
        for group, storages in self.again.items():
            for storage in storages:
                self.groups_of.setdefault(storage, []).append(group)
        self.wanted: dict[int, set[int]] = {group: set() for group in self.again}
        for storage, made_in in self.groups_of.items():
            for made, later in pairwise((*made_in, len(graph.ops))):
                if any(made < used < later for used in self.used_in[storage]):
                    self.wanted[made].add(storage)
        self._kept: set[int] = set()
        self._seconds = {group: self._needed(group)[0] for group in self.again}
        self._prices = self._price_sums()

    def choose(self) -> None:
        """Hold what saves most for its price, then keep from the forward pass on what would be recomputed once."""
        for is_first in (False, True):
            waiting = [
                self._hold(op, group, self._seconds[group])
                for group, storages in self.again.items()
                if self._seconds[group]
                for op in dict.fromkeys(self._graph.producer[storage] for storage in sorted(storages))
                if self._may_stay(op, group, is_first)
            ]
            heapq.heapify(waiting)
            while waiting and not self._effort.is_spent:
                self._take_or_put_back(waiting, is_first)

    def _made(self, op: int, group: int) -> list[int]:
        """The storages that an op writes again in a group."""
        return [storage for storage in self._graph.ops[op].writes if storage in self.again[group]]

    def _may_stay(self, op: int, group: int, is_first: bool) -> bool:
        """Whether what an op writes in a group can be held; if it `is_first`, some of it from the forward pass on, and
        that is recomputed in no other group."""
        made = self._made(op, group)
        first = [storage for storage in made if self._is_first(storage, group)]
        return bool(made) and bool(first) == is_first and all(len(self.groups_of[storage]) == 1 for storage in first)

    def _take_or_put_back(self, waiting: list[_Hold], is_first: bool) -> None:
        price, op, group = heapq.heappop(waiting)
        if not self._may_stay(op, group, is_first):
            return
        made = self._made(op, group)
        saved_seconds = self._seconds[group] - self._needed(group, made)[0]
        if saved_seconds <= 0.0:
            return  # it may save something once another one is held; the next round sees it
        now = self._hold(op, group, saved_seconds)
        if waiting and now > waiting[0] and now.price > price:
            heapq.heappush(waiting, now)
            return
        highest = self.highest.copy()
        for storage in made:
            highest[self._since(storage, group) : group + 1] += self._graph.storages[storage].nbytes
        if highest[: group + 1].max() <= self._budget_bytes:
            self.highest = highest
            self._take(made, group)

    def _take(self, made: Sequence[int], group: int) -> None:
        for storage in made:
            if self._is_first(storage, group):
                self._kept.add(storage)
            else:
                made_in = self.groups_of[storage]
                self.wanted[made_in[made_in.index(group) - 1]].add(storage)
                self.wanted[group].discard(storage)
            self._drop(storage, group)
        self._seconds[group], needed = self._needed(group)
        for other in self.again[group] - needed:  # they were recomputed only for it
            self._drop(other, group)
            self.used_in[other].remove(group)

    def _drop(self, storage: int, group: int) -> None:
        self.again[group].discard(storage)
        self.groups_of[storage].remove(group)

    def _hold(self, op: int, group: int, saved_seconds: float) -> _Hold:
        price = sum(
            (self._graph.storages[storage].nbytes + 1)
            * (self._prices[group + 1] - self._prices[self._since(storage, group)])
            for storage in self._made(op, group)
        )
        return _Hold(price / saved_seconds, op, group)

    def _since(self, storage: int, group: int) -> int:
        """The op that has a storage last before a group."""
        used_in = self.used_in[storage]
        place = bisect_left(used_in, group)
        return used_in[place - 1] if place else self._last_forward[storage]

    def _is_first(self, storage: int, group: int) -> bool:
        """Whether no group before has the storage: it would stay from the forward pass on."""
        return self.used_in[storage][0] == group

    def _needed(self, group: int, held: Collection[int] = ()) -> tuple[float, set[int]]:
        """Seconds of the recomputations in a group, and the storages they are for, while some are held."""
        graph, again = self._graph, self.again[group]
        pending = [storage for storage in (*graph.ops[group].reads, *self.wanted[group]) if storage in again]
        needed: set[int] = set()
        ops: set[int] = set()
        while pending:
            storage = pending.pop()
            if storage in held or storage in needed:
                continue
            needed.add(storage)
            op = graph.producer[storage]
            if op not in ops:
                ops.add(op)
                pending += [read for read in graph.ops[op].second.reads if read in again]
        self._effort.spend(len(ops) // _LOOKED_UP)
        return sum(graph.ops[op].second.longer_seconds for op in sorted(ops)), needed

    def _price_sums(self) -> np.ndarray:
        """For each op, what a byte costs at all ops before it."""
        asked = np.zeros(len(self._graph.ops) + 1)
        for group, storages in self.again.items():
            for storage in storages:
                nbytes = self._graph.storages[storage].nbytes
                asked[self._since(storage, group)] += nbytes
                asked[group + 1] -= nbytes
        free = np.maximum(self._budget_bytes - self.highest, 1)
        return np.concatenate([[0.0], np.cumsum((np.cumsum(asked)[:-1] + 1) / free)])

    def residences(self) -> dict[str, Residence]:
        """Those with what is held now."""
        graph, found = self._graph, dict(self._before)
        for name, residence in self._before.items():
            storage = graph.storage_called[name].id
            if isinstance(residence, Recompute) and residence.before:
                before = (graph.ops[group].name for group in self.groups_of[storage])
                found[name] = Keep() if storage in self._kept else Recompute(tuple(before))
        return found
