"""What a change of a few residences does to the bytes and seconds of a plan, without scheduling the whole step again.

A change moves some recomputations. It matters to the storages that these write and read; all others stay where they
are. So their bytes are taken out of what is in use during each run, runs are removed and put in, and the bytes of the
few come back where they are now. The result is that of `schedule` and `bytes_and_seconds`, to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.residence import Recompute, Residence, exact_residence
from shoal.core.schedule import Run
from shoal.core.simulate import dropped_bytes, launched_seconds
from shoal.core.step import Op, StepGraph
from shoal.errors import PlanError

Bytes = NDArray[np.int64]


class _Put(NamedTuple):
    """A recomputation that the change adds, before the run at `at`."""

    at: int
    producer: int
    writes: frozenset[int]


class _Instance(NamedTuple):
    """A storage from the run that writes it to the last that reads it, which may write over it."""

    first: int
    last: int
    is_overwritten: bool


class _ChangedRunsReader(NamedTuple):
    """A run that reads a storage: its place, its op, and what it writes."""

    place: int
    op: Op
    writes: Iterable[int]


class _Moves(NamedTuple):
    """Recomputations that a change adds, those that it takes away, by place, and what others write now, by place."""

    put: Sequence[_Put]
    removed: Sequence[int]
    rewritten: Mapping[int, frozenset[int]]

    def moved(self, place: int) -> int:
        """Where a run is now that stays."""
        return place + bisect_right(self.put, place, key=lambda one: one.at) - bisect_left(self.removed, place)

    def place_of(self, number: int) -> int:
        """Where an added recomputation is."""
        at = self.put[number].at
        return at + number - bisect_left(self.removed, at)


class PlannedRuns:
    """The runs of a plan that offloads nothing, by what they read and write.

    Args:
        graph: the step.
        residences: of the plan, by storage name.
        runs: its schedule.

    Raises:
        PlanError: it offloads.
    """

    def __init__(self, graph: StepGraph, residences: Mapping[str, Residence], runs: Sequence[Run]) -> None:
        self._graph, self._residences, self._runs = graph, residences, runs
        self._reads: dict[int, list[int]] = defaultdict(list)
        self._writes: dict[int, list[int]] = defaultdict(list)
        self._place: dict[int, int] = {}  # of each op's own run
        self._again: dict[int, dict[int, int]] = defaultdict(dict)  # op → producer recomputed for it → place
        self._instances: dict[int, list[_Instance]] = {}
        before, during, seconds, launches = [], [], [], []
        storages, in_use = graph.storages, graph.resident_bytes
        waiting: dict[int, int] = {}
        for place, run in enumerate(runs):
            if run.fetches or run.offloads:
                raise PlanError("changes are counted in plans that offload nothing; this one has a link")
            op = run.of(graph)
            before.append(in_use)
            for storage in run.writes:
                in_use += storages[storage].nbytes
                self._writes[storage].append(place)
            if run.takes_over >= 0:
                in_use -= storages[run.takes_over].nbytes
            during.append(in_use + op.workspace_bytes + dropped_bytes(graph, run, op))
            for storage in run.frees:
                if storage != run.takes_over:
                    in_use -= storages[storage].nbytes
            for storage in op.reads:
                self._reads[storage].append(place)
            seconds.append(op.seconds)
            launches.append(op.launch_seconds)
            if run.again:
                waiting[run.op] = place
            else:
                self._place[run.op] = place
                if waiting:
                    self._again[run.op], waiting = waiting, {}
        self._before: Bytes = np.array(before, dtype=np.int64)
        self._during: Bytes = np.array(during, dtype=np.int64)
        self._seconds, self._launches = np.array(seconds), np.array(launches)

    def is_back(self, storage: int, op: int) -> bool:
        """Whether a recomputed storage exists, to be read, when the recomputations for a backward op begin."""
        first = min(self._again[op].values()) if op in self._again else self._place[op]
        n_forward = self._graph.n_forward
        return any(n_forward <= one.first < first <= one.last for one in self._instances_of(storage))

    def after(self, changes: Mapping[str, Recompute]) -> tuple[Bytes, float]:
        """The bytes in use during each run and the duration of all in seconds, with these residences changed.

        Args:
            changes: by storage name; each names ops of the backward pass.

        Raises:
            PlanError: a storage that must not be recomputed, or a reader without the storage it reads.
        """
        moves = self._moves(changes)
        touched = [self._runs[place] for place in (*moves.removed, *moves.rewritten)]
        producers = {*(run.op for run in touched), *(one.producer for one in moves.put)}
        again = [self._graph.ops[producer].second for producer in producers]
        concerned = {self._graph.storage_called[name].id for name in changes}
        concerned.update(storage for op in again for storage in (*op.reads, *op.writes))
        concerned -= self._graph.never_freed
        n_runs = len(self._runs)
        old, new = np.zeros(n_runs + 1, np.int64), np.zeros(n_runs + len(moves.put) - len(moves.removed) + 1, np.int64)
        waiting = np.zeros(n_runs + 2, np.int64)  # before each run
        for storage in concerned:
            nbytes = self._graph.storages[storage].nbytes
            for one in self._instances_of(storage):
                _count(old, one, nbytes)
                waiting[one.first + 1] += nbytes
                waiting[one.last + 1] -= nbytes
            for one in self._changed_instances(storage, moves, changes):
                _count(new, one, nbytes)
        during = self._during - old.cumsum()[:-1]
        for place, writes in moves.rewritten.items():
            run = self._runs[place]
            during[place] += self._dropped(run.op, writes) - self._dropped(run.op, run.writes)
        before = self._before - waiting.cumsum()[:n_runs]
        ops = [self._graph.ops[one.producer].second for one in moves.put]
        added = [
            before[one.at] + op.workspace_bytes + self._dropped(one.producer, one.writes)
            for one, op in zip(moves.put, ops, strict=True)
        ]
        return self._with(during, moves, added) + new.cumsum()[:-1], self._end(moves, ops)

    def _end(self, moves: _Moves, ops: Sequence[Op]) -> float:
        seconds = self._with(self._seconds, moves, [op.seconds for op in ops])
        if not self._graph.has_launches:
            return float(seconds.cumsum()[-1])  # one after another, as `simulate` adds them
        launches = self._with(self._launches, moves, [op.launch_seconds for op in ops])
        return launched_seconds(seconds.tolist(), launches.tolist())

    def _with(self, values: NDArray[np.generic], moves: _Moves, added: Sequence[float]) -> NDArray[np.generic]:
        kept = np.delete(values, moves.removed) if moves.removed else values
        places = [one.at - bisect_left(moves.removed, one.at) for one in moves.put]
        return np.insert(kept, places, added) if places else kept

    def _dropped(self, producer: int, writes: Iterable[int]) -> int:
        op = self._graph.ops[producer].second
        return sum(self._graph.storages[s].nbytes for s in op.writes if s not in writes)

    def _moves(self, changes: Mapping[str, Recompute]) -> _Moves:
        graph = self._graph
        more: dict[tuple[int, int], set[int]] = defaultdict(set)  # (op, producer) → what it recomputes besides
        less: dict[tuple[int, int], set[int]] = defaultdict(set)
        for name, residence in changes.items():
            storage = graph.storage_called[name].id
            producer = _producer_of_what_may_go(graph, storage, residence)
            old = exact_residence(self._residences.get(name))
            was, now = set(old.before if isinstance(old, Recompute) else ()), set(residence.before)
            for served in now - was:
                more[graph.op_called[served].id, producer.id].add(storage)
            for served in was - now:
                less[graph.op_called[served].id, producer.id].add(storage)
        put, removed, rewritten = [], [], {}
        for op, producer_id in {*more, *less}:
            places = self._again.get(op, {})
            place = places.get(producer_id)
            written = frozenset(self._runs[place].writes if place is not None else ())
            writes = written - less.get((op, producer_id), set()) | more.get((op, producer_id), set())
            if place is None:
                later = [there for other, there in places.items() if other > producer_id]
                put.append(_Put(min(later, default=self._place[op]), producer_id, writes))
            elif not writes:
                removed.append(place)
            else:
                rewritten[place] = writes
        return _Moves(sorted(put, key=lambda one: one[:2]), sorted(removed), rewritten)

    def _instances_of(self, storage: int) -> list[_Instance]:
        found = self._instances.get(storage)
        if found is None:
            readers = [self._reader(place) for place in self._reads.get(storage, ())]
            found = self._instances[storage] = self._divided(storage, self._writes.get(storage, ()), readers)
        return found

    def _reader(self, place: int) -> _ChangedRunsReader:
        run = self._runs[place]
        return _ChangedRunsReader(place, run.of(self._graph), run.writes)

    def _changed_instances(self, storage: int, moves: _Moves, changes: Mapping[str, Recompute]) -> Iterable[_Instance]:
        writers, readers = [], []
        for place in self._writes.get(storage, ()):
            if place not in moves.removed and storage in moves.rewritten.get(place, (storage,)):
                writers.append(moves.moved(place))
        for place, writes in moves.rewritten.items():
            if storage in writes and storage not in self._runs[place].writes:
                writers.append(moves.moved(place))
        for place in self._reads.get(storage, ()):
            if place not in moves.removed:
                old = self._reader(place)
                readers.append(_ChangedRunsReader(moves.moved(place), old.op, moves.rewritten.get(place, old.writes)))
        for number, one in enumerate(moves.put):
            op = self._graph.ops[one.producer].second
            if storage in one.writes:
                writers.append(moves.place_of(number))
            if storage in op.reads:
                readers.append(_ChangedRunsReader(moves.place_of(number), op, one.writes))
        writers.sort()
        readers.sort(key=lambda reader: reader.place)
        name = self._graph.storages[storage].name
        residence = changes.get(name) or exact_residence(self._residences.get(name))
        if isinstance(residence, Recompute):
            self._reject_missing_reads(name, writers, readers)
        return self._divided(storage, writers, readers)

    def _reject_missing_reads(self, name: str, writers: Sequence[int], readers: Sequence[_ChangedRunsReader]) -> None:
        n_forward = self._graph.n_forward
        comes_back = next((place for place in writers if place >= n_forward), None)
        for reader in readers:
            if reader.place >= n_forward:
                if comes_back is None or comes_back >= reader.place:
                    raise PlanError(f"{reader.op.name!r} reads {name!r}, which is not recomputed before it")
                return

    def _divided(self, storage: int, writers: Sequence[int], readers: Sequence[_ChangedRunsReader]) -> list[_Instance]:
        n_forward = self._graph.n_forward
        comes_back = next((place for place in writers if place >= n_forward), None)
        is_saved = self._graph.producer.get(storage, n_forward) < n_forward
        found, begin = [], 0
        for number, first in enumerate(writers):
            until = writers[number + 1] if number + 1 < len(writers) else len(self._runs) * 2
            last = None
            while begin < len(readers) and readers[begin].place <= until:
                last = readers[begin]
                begin += 1
            if last is None:
                found.append(_Instance(first, first, False))
                continue
            over = last.op.overwrites == storage and last.op.writes[0] in last.writes
            if over and is_saved and last.place >= n_forward:
                over = comes_back is not None and last.place >= comes_back
            found.append(_Instance(first, last.place, over))
        return found


def _count(changes: Bytes, one: _Instance, nbytes: int) -> None:
    changes[one.first] += nbytes
    changes[one.last if one.is_overwritten else one.last + 1] -= nbytes


def _producer_of_what_may_go(graph: StepGraph, storage: int, residence: Recompute) -> Op:
    """The op that writes an activation of the forward pass.

    Raises:
        PlanError: nothing may recompute it.
    """
    name, kind = graph.storages[storage].name, graph.storages[storage].kind
    producer = graph.ops[graph.producer[storage]] if storage in graph.producer else None
    if producer is None or producer.phase != "forward" or kind != "activation":
        raise PlanError(f"{name!r} ({kind}) cannot be recomputed: only activations of the forward pass can")
    if storage in graph.never_given_up:
        raise PlanError(f"{name!r} cannot be recomputed: it cannot be given up")
    if residence.before and not producer.recomputable:
        raise PlanError(f"{name!r} cannot be recomputed: running {producer.target} twice changes the training")
    return producer
