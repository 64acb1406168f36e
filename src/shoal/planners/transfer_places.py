"""Offload and prefetch positions for a given set of offloaded storages: without a stall where the budget allows.

Each is released at the first op that ends after its copy has, and fetched by the last op that begins early enough.
Where that is over the budget it is released earlier, or fetched later, and the device waits, as short as can be. Both
directions are one rule, read forwards and backwards in time; copies of one direction follow one another.

Going forwards no other places make the device wait less, for copies leave in the order in which their storages are
written. Copies back come in the order in which their storages are read; another order could now and then wait less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.hardware import Link
from shoal.core.residence import Offload, Residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import bytes_and_seconds, launch_waits
from shoal.core.step import StepGraph
from shoal.errors import PlanError

_NO_LIMIT = 1 << 62  # bytes


@dataclass(frozen=True)
class Placed:
    """The places of one set of offloaded storages.

    Attributes:
        released: storage → the forward op after which it is freed.
        fetched: storage → the backward op before which its copy back begins.
        seconds: no less than the step takes with them; what it takes, but for copies back that begin early.
        excess_bytes: over the budget, added up over all places where even waiting does not get below it.
        host_bytes: of all that is offloaded.
    """

    released: Mapping[int, int]
    fetched: Mapping[int, int]
    seconds: float
    excess_bytes: int
    host_bytes: int


class _FirstRead(NamedTuple):
    """Where the backward pass reads a storage first.

    Attributes:
        group: number of the backward op that does, or for which the recomputation runs that does.
        run: number of the run.
        begin_seconds: from the first run of the group until that run.
    """

    group: int
    run: int
    begin_seconds: float


@dataclass(frozen=True)
class _TransferUnit:
    """A stretch of runs within which no storage can go, in the time of its direction.

    Attributes:
        op: the op by which a residence names the end of the stretch.
        seconds: how long it takes, with waits for the host to launch its ops.
        room_bytes: what is left of the budget in it with everything kept.
    """

    op: int
    seconds: float
    room_bytes: int


class TransferPlaces:
    """Places for any storages of one schedule.

    Args:
        graph: the step, with a link.
        residences: by storage name, without Offload.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit.

    Raises:
        PlanError: the step has no link, or the residences do not fit it.
    """

    def __init__(self, graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int = 0) -> None:
        if graph.link is None:
            raise PlanError("this step has no link to the host, so nothing can be offloaded")
        self._graph = graph
        runs = schedule(graph, residences)
        totals, _ = bytes_and_seconds(graph, runs)
        room = [budget_bytes - total for total in totals] if budget_bytes else [_NO_LIMIT] * len(totals)
        waits = launch_waits(graph, runs)
        self._between: list[_TransferUnit] = []
        backward, read = self._groups(graph, runs, room, waits)
        backward.reverse()
        self._nbytes = {s.id: s.nbytes for s in graph.storages if s.id in read and s.id in graph.can_leave}
        self._there = self._way_there(graph, graph.link, room, waits)
        self._back = self._way_back(graph.link, backward, read)

    def _groups(
        self, graph: StepGraph, runs: Sequence[Run], room: Sequence[int], waits: Sequence[float]
    ) -> tuple[list[_TransferUnit], dict[int, _FirstRead]]:
        """The backward pass in units: each op with the recomputations for it, as nothing is fetched between these."""
        units: list[_TransferUnit] = []
        first: dict[int, _FirstRead] = {}
        between: set[int] = set()  # what is read before the backward pass begins would be back too late
        seconds, min_room, read = 0.0, _NO_LIMIT, []
        for number in range(graph.n_forward, len(runs)):
            op = runs[number].of(graph)
            seconds += waits[number]
            read += [(storage, _FirstRead(len(units), number, seconds)) for storage in op.reads]
            seconds += op.seconds
            min_room = min(min_room, room[number])
            if runs[number].again:
                continue
            if op.phase == "backward":
                for storage, reader in read:
                    first.setdefault(storage, reader)
                units.append(_TransferUnit(op.id, seconds, min_room))
            else:
                between.update(storage for storage, _ in read)
                self._between.append(_TransferUnit(op.id, seconds, min_room))
            seconds, min_room, read = 0.0, _NO_LIMIT, []
        return units, {storage: reader for storage, reader in first.items() if storage not in between}

    def _way_there(self, graph: StepGraph, link: Link, room: Sequence[int], waits: Sequence[float]) -> _Way:
        written = sorted(self._nbytes, key=lambda s: (graph.producer[s], s))
        copies = []
        for s in written:
            seconds = link.to_host_seconds(self._nbytes[s])
            copies.append(_Copy(s, self._nbytes[s], seconds, graph.producer[s], last_forward_reader(graph, s)))
        forward = zip(graph.ops[: graph.n_forward], room, waits, strict=False)
        return _Way(
            [_TransferUnit(op.id, wait + op.seconds, left) for op, left, wait in forward], copies, link.overlaps
        )

    def _way_back(self, link: Link, backward: Sequence[_TransferUnit], read: Mapping[int, _FirstRead]) -> _Way:
        last_first = sorted(self._nbytes, key=lambda s: (read[s].run, s), reverse=True)
        last = len(backward) - 1
        copies = []
        for s in last_first:
            unit, seconds = last - read[s].group, link.to_device_seconds(self._nbytes[s])
            copies.append(_Copy(s, self._nbytes[s], seconds, unit, unit, read[s].begin_seconds))
        return _Way(backward, copies, link.overlaps)

    @property
    def seconds(self) -> float:
        """How long the step takes with nothing offloaded."""
        return sum(unit.seconds for units in (self._there.units, self._between, self._back.units) for unit in units)

    def can_leave(self, storage: int) -> bool:
        """Whether it is an activation of the forward pass that only the backward pass reads under these residences."""
        return storage in self._nbytes

    def place(self, offloaded: Collection[int]) -> Placed:
        """Where those of `offloaded` that can leave do so, and come back."""
        wanted = set(offloaded)
        there_ends, there_seconds, there_excess = self._there.carry(wanted)
        back_ends, back_seconds, back_excess = self._back.carry(wanted)
        away_bytes = sum(self._nbytes[s] for s in there_ends)
        between_excess = sum(max(0, -unit.room_bytes - away_bytes) for unit in self._between)
        return Placed(
            {s: self._there.units[end].op for s, end in there_ends.items()},
            {s: self._back.units[end].op for s, end in back_ends.items()},
            there_seconds + sum(unit.seconds for unit in self._between) + back_seconds,
            there_excess + between_excess + back_excess,
            sum(self._graph.storages[s].host_bytes for s in there_ends),
        )


@dataclass(frozen=True)
class _Copy:
    """One storage on its way in one direction, units counted in that direction's time.

    Attributes:
        storage: its id.
        nbytes: its size.
        seconds: how long its copy takes.
        arrives: unit at whose end its copy can begin.
        stays: last unit in which it must be on the device.
        early: how many seconds before the end of `arrives` its copy can begin.
    """

    storage: int
    nbytes: int
    seconds: float
    arrives: int
    stays: int
    early: float = 0.0


@dataclass(frozen=True)
class _Way:
    """One direction of the link, in its own time: forwards for what leaves, backwards for what comes back.

    Attributes:
        units: in this direction's time.
        copies: of all that can take this way, in the order in which they would.
        overlaps: whether the device goes on meanwhile.
    """

    units: Sequence[_TransferUnit]
    copies: Sequence[_Copy]
    overlaps: bool

    def carry(self, wanted: Collection[int]) -> tuple[dict[int, int], float, int]:
        """Storage → unit at whose end it is gone; seconds until all are; bytes over the room, of all units."""
        queue = [copy for copy in self.copies if copy.storage in wanted]
        ends: dict[int, int] = {}
        waiting: list[tuple[float, _Copy]] = []  # with the time at which the copy has ended, in that order
        freed_bytes = excess_bytes = arrived = 0
        now = link_until = 0.0
        for number, unit in enumerate(self.units):
            short_bytes = -unit.room_bytes - freed_bytes
            while short_bytes > 0:
                ready = next((entry for entry in waiting if entry[1].stays < number), None)
                if ready is None:
                    excess_bytes += short_bytes
                    break
                waiting.remove(ready)
                done, copy = ready
                ends[copy.storage] = number - 1
                freed_bytes += copy.nbytes
                short_bytes -= copy.nbytes
                now = max(now, done)
            now += unit.seconds
            while arrived < len(queue) and queue[arrived].arrives == number:
                copy = queue[arrived]
                arrived += 1
                begin = now - copy.early if self.overlaps else now
                link_until = max(begin, link_until) + copy.seconds
                waiting.append((link_until, copy))
                if not self.overlaps:
                    now = link_until
            if waiting and waiting[0][0] <= now:
                left = []
                for done, copy in waiting:
                    if done <= now and copy.stays <= number:
                        ends[copy.storage] = number
                        freed_bytes += copy.nbytes
                    else:
                        left.append((done, copy))
                waiting = left
        for done, copy in waiting:
            ends[copy.storage] = len(self.units) - 1
            now = max(now, done)
        return ends, now, excess_bytes


def with_offloads(
    graph: StepGraph, residences: Mapping[str, Residence], offloaded: Collection[int], budget_bytes: int = 0
) -> dict[str, Residence]:
    """`residences` with `offloaded` on the host instead of on the device.

    Args:
        graph: the step, with a link.
        residences: by storage name; the offloaded ones are kept in it.
        offloaded: ids of storages; those that the backward pass does not read stay as they are.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit. What does not fit even with stalls is
            placed as if it did: play the result to know.
    """
    if not offloaded:
        return dict(residences)
    return placed_residences(graph, residences, TransferPlaces(graph, residences, budget_bytes).place(offloaded))


def placed_residences(graph: StepGraph, residences: Mapping[str, Residence], placed: Placed) -> dict[str, Residence]:
    """`residences` with what was placed on the host, in the order of the step's storages."""
    found = dict(residences)
    for storage, after in placed.released.items():
        before = graph.ops[placed.fetched[storage]].name
        found[graph.storages[storage].name] = Offload(graph.ops[after].name, before)
    return {s.name: found[s.name] for s in graph.storages if s.name in found}


def last_forward_reader(graph: StepGraph, storage: int) -> int:
    """The last op of the forward pass that needs the storage: its producer where no other does."""
    readers = [reader for reader in graph.readers[storage] if reader < graph.n_forward]
    return readers[-1] if readers else graph.producer[storage]
