"""Where offloaded storages are released and fetched, given which they are: without a stall where the budget allows.

Each is released at the first op that ends after its copy has, and fetched by the last op that begins early enough.
Where that is over the budget it is released earlier, or fetched later, and the device waits, as short as can be. Both
directions are one rule, read forwards and backwards in time; copies of one direction follow one another.

Going forwards no other places make the device wait less, for copies leave in the order in which their storages are
written. Copies back come in the order in which their storages are read; another order could now and then wait less.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.hardware import Link
from shoal.residence import Offload, Residence
from shoal.schedule import Run, schedule
from shoal.simulate import bytes_and_seconds
from shoal.step import StepGraph

_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Placed:
    """The places of one set of offloaded storages.

    Attributes:
        released: storage → the forward op after which it is freed.
        fetched: storage → the backward op before which its copy back begins.
        seconds: no less than the step takes with them; what it takes, but for copies back that begin early.
        excess_bytes: over the budget, added up over all places where even waiting does not get below it.
    """

    released: Mapping[int, int]
    fetched: Mapping[int, int]
    seconds: float
    excess_bytes: int


@dataclass(frozen=True)
class _Unit:
    """A stretch of runs within which no storage can go, in the time of its direction.

    Attributes:
        op: the op by which a residence names the end of the stretch.
        seconds: how long it takes.
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
        self._link: Link = graph.link
        runs = schedule(graph, residences)
        totals, _ = bytes_and_seconds(graph, runs)
        room = [budget_bytes - total for total in totals] if budget_bytes else [_NO_LIMIT] * len(totals)
        n_forward = graph.n_forward
        forward = zip(runs[:n_forward], room[:n_forward], strict=True)
        self._forward = [_Unit(run.op, graph.ops[run.op].seconds, left) for run, left in forward]
        self._backward: list[_Unit] = []
        self._between: list[_Unit] = []
        self._first_read: dict[int, tuple[int, int]] = {}  # storage → its group, counted from the first; the run
        self._begin: dict[int, float] = {}  # storage → seconds from the begin of that group to that run
        self._split_backward(runs, room)
        self._backward.reverse()

    def _split_backward(self, runs: Sequence[Run], room: Sequence[int]) -> None:
        """Each backward op with the recomputations that serve it is a unit: nothing is fetched amidst them."""
        graph = self._graph
        seconds, least_room, read = 0.0, _NO_LIMIT, []
        for number in range(graph.n_forward, len(runs)):
            run = runs[number]
            op = run.of(graph)
            read += [(storage, number, seconds) for storage in op.reads]
            seconds += op.seconds
            least_room = min(least_room, room[number])
            if run.again:
                continue
            backward = op.phase == "backward"
            for storage, reader, begin in read:
                # What is read between the passes is back for no backward op: it stays.
                self._first_read.setdefault(storage, (len(self._backward) if backward else -1, reader))
                self._begin.setdefault(storage, begin)
            (self._backward if backward else self._between).append(_Unit(op.id, seconds, least_room))
            seconds, least_room, read = 0.0, _NO_LIMIT, []

    def can_leave(self, storage: int) -> bool:
        """Whether it is an activation of the forward pass that the backward pass reads under these residences."""
        written = self._graph.producer.get(storage, self._graph.n_forward) < self._graph.n_forward
        activation = self._graph.storages[storage].kind == "activation"
        return written and activation and self._first_read.get(storage, (-1, 0))[0] >= 0

    def place(self, offloaded: Collection[int]) -> Placed:
        """Where those of `offloaded` that can leave do so, and come back."""
        graph, link = self._graph, self._link
        leaving = [s for s in offloaded if self.can_leave(s)]
        there = _Way(
            self._forward,
            {s: graph.producer[s] for s in leaving},
            {s: last_forward_reader(graph, s) for s in leaving},
            {},
            {s: link.to_host_seconds(graph.storages[s].nbytes) for s in leaving},
        )
        last = len(self._backward) - 1
        read_in = {s: last - self._first_read[s][0] for s in leaving}
        back = _Way(
            self._backward,
            read_in,
            read_in,
            self._begin,
            {s: link.to_device_seconds(graph.storages[s].nbytes) for s in leaving},
        )
        nbytes = {s: graph.storages[s].nbytes for s in leaving}
        there_ends, there_seconds, there_excess = there.carry(
            sorted(leaving, key=lambda s: (graph.producer[s], s)), nbytes, link.overlaps
        )
        back_ends, back_seconds, back_excess = back.carry(
            sorted(leaving, key=lambda s: (self._first_read[s][1], s), reverse=True), nbytes, link.overlaps
        )
        away_bytes = sum(nbytes.values())
        between_excess = sum(max(0, -unit.room_bytes - away_bytes) for unit in self._between)
        return Placed(
            {s: self._forward[end].op for s, end in there_ends.items()},
            {s: self._backward[end].op for s, end in back_ends.items()},
            there_seconds + sum(unit.seconds for unit in self._between) + back_seconds,
            there_excess + between_excess + back_excess,
        )


@dataclass(frozen=True)
class _Way:
    """One direction of the link, in its own time: forwards for what leaves, backwards for what comes back.

    Attributes:
        units: in this direction's time.
        arrives: storage → unit at whose end its copy can begin.
        stays: storage → last unit in which it must be on the device.
        early: storage → how many seconds before that unit's end its copy can begin; absent for none.
        copy_seconds: of each storage.
    """

    units: Sequence[_Unit]
    arrives: Mapping[int, int]
    stays: Mapping[int, int]
    early: Mapping[int, float]
    copy_seconds: Mapping[int, float]

    def carry(
        self, queue: Sequence[int], nbytes: Mapping[int, int], overlaps: bool
    ) -> tuple[dict[int, int], float, int]:
        """Storage → unit at whose end it is gone; seconds until all are; bytes over the room in all units."""
        ends: dict[int, int] = {}
        waiting: list[tuple[int, float]] = []  # storage and the time at which its copy has ended, in that order
        freed_bytes = excess_bytes = arrived = 0
        now = link_until = 0.0
        for number, unit in enumerate(self.units):
            short_bytes = -unit.room_bytes - freed_bytes
            while short_bytes > 0:
                ready = next((entry for entry in waiting if self.stays[entry[0]] < number), None)
                if ready is None:
                    excess_bytes += short_bytes
                    break
                storage, done = ready
                waiting.remove(ready)
                ends[storage] = number - 1
                freed_bytes += nbytes[storage]
                short_bytes -= nbytes[storage]
                now = max(now, done)
            now += unit.seconds
            while arrived < len(queue) and self.arrives[queue[arrived]] == number:
                storage = queue[arrived]
                arrived += 1
                begin = now - self.early.get(storage, 0.0) if overlaps else now
                link_until = max(begin, link_until) + self.copy_seconds[storage]
                waiting.append((storage, link_until))
                if not overlaps:
                    now = link_until
            if waiting and waiting[0][1] <= now:
                left = []
                for storage, done in waiting:
                    if done <= now and self.stays[storage] <= number:
                        ends[storage] = number
                        freed_bytes += nbytes[storage]
                    else:
                        left.append((storage, done))
                waiting = left
        for storage, done in waiting:
            ends[storage] = len(self.units) - 1
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
