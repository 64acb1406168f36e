"""Where offloaded storages are released and fetched, given which they are: without a stall where the budget allows.

Each is released at the first op that ends after its copy has, and fetched by the last op that begins early enough.
Where that is over the budget it is released earlier, or fetched later, and the device waits. Both directions are one
rule, read forwards and backwards in time; copies of one direction follow one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shoal.errors import PlanError
from shoal.hardware import Link
from shoal.residence import Offload, Residence
from shoal.schedule import Run, schedule
from shoal.simulate import bytes_and_seconds
from shoal.step import StepGraph


def with_offloads(
    graph: StepGraph, residences: Mapping[str, Residence], offloaded: Collection[int], budget_bytes: int = 0
) -> dict[str, Residence]:
    """`residences` with `offloaded` on the host instead of on the device.

    Args:
        graph: the step, with a link.
        residences: by storage name; the offloaded ones are kept in it.
        offloaded: ids of storages that the backward pass reads.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit. What does not fit even with stalls is
            placed as if it did: play the result to know.
    """
    if not offloaded:
        return dict(residences)
    if graph.link is None:
        raise PlanError("this step has no link to the host, so nothing can be offloaded")
    runs = schedule(graph, residences)
    totals, _ = bytes_and_seconds(graph, runs)
    room = [budget_bytes - total for total in totals] if budget_bytes else [1 << 62] * len(totals)
    first_reader = _first_readers(graph, runs, offloaded)
    leaving = sorted(first_reader, key=graph.producer.__getitem__)
    released = _releases(graph, graph.link, runs[: graph.n_forward], leaving, room)
    fetched = _fetches(graph, graph.link, runs, first_reader, room)
    placed = dict(residences)
    for storage in leaving:
        after, before = graph.ops[released[storage]].name, graph.ops[fetched[storage]].name
        placed[graph.storages[storage].name] = Offload(after, before)
    return placed


def last_forward_reader(graph: StepGraph, storage: int) -> int:
    """The last op of the forward pass that needs the storage: its producer where no other does."""
    readers = [reader for reader in graph.readers[storage] if reader < graph.n_forward]
    return readers[-1] if readers else graph.producer[storage]


def _first_readers(graph: StepGraph, runs: Sequence[Run], offloaded: Collection[int]) -> dict[int, int]:
    """Offloaded storage → number of the first run of the backward pass that reads it."""
    found: dict[int, int] = {}
    wanted = set(offloaded)
    for number in range(graph.n_forward, len(runs)):
        for storage in wanted.intersection(runs[number].of(graph).reads):
            found[storage] = number
            wanted.discard(storage)
    return found


def _releases(
    graph: StepGraph, link: Link, runs: Sequence[Run], leaving: Sequence[int], room: Sequence[int]
) -> dict[int, int]:
    """Offloaded storage → the forward op after which it is freed."""
    written_by: dict[int, list[int]] = {}
    for storage in leaving:
        written_by.setdefault(graph.producer[storage], []).append(storage)
    last_reader = {storage: last_forward_reader(graph, storage) for storage in leaving}
    waiting: list[tuple[int, float]] = []  # storage and the time at which its copy has ended, in that order
    released: dict[int, int] = {}
    freed_bytes, now, link_until = 0, 0.0, 0.0
    for number, run in enumerate(runs):
        while room[number] + freed_bytes < 0:
            ready = next((entry for entry in waiting if last_reader[entry[0]] < number), None)
            if ready is None:
                break
            storage, done = ready
            waiting.remove(ready)
            released[storage] = number - 1
            freed_bytes += graph.storages[storage].nbytes
            now = max(now, done)
        now += run.of(graph).seconds
        for storage in written_by.get(number, ()):
            link_until = max(now, link_until) + link.to_host_seconds(graph.storages[storage].nbytes)
            waiting.append((storage, link_until))
            if not link.overlaps:
                now = link_until
        for entry in list(waiting):
            storage, done = entry
            if done <= now and last_reader[storage] <= number:
                waiting.remove(entry)
                released[storage] = number
                freed_bytes += graph.storages[storage].nbytes
    released.update({storage: len(runs) - 1 for storage, _ in waiting})
    return released


def _fetches(
    graph: StepGraph, link: Link, runs: Sequence[Run], first_reader: Mapping[int, int], room: Sequence[int]
) -> dict[int, int]:
    """Offloaded storage → the backward op before which its copy back begins."""
    starts, now = [], 0.0
    for run in runs:
        starts.append(now)
        now += run.of(graph).seconds
    begins = _group_begins(graph, runs)
    left = list(room)
    for storage, reader in first_reader.items():  # until they are fetched, they leave room
        for number in range(graph.n_forward, reader):
            left[number] += graph.storages[storage].nbytes
    fetched: dict[int, int] = {}
    link_from = float("inf")
    for storage in sorted(first_reader, key=lambda s: (first_reader[s], s), reverse=True):
        nbytes = graph.storages[storage].nbytes
        link_from = min(starts[first_reader[storage]], link_from) - link.to_device_seconds(nbytes)
        places = [number for number in begins if number <= first_reader[storage]]
        place = places.pop()
        while places and starts[place] > link_from and all(left[n] >= nbytes for n in range(places[-1], place)):
            for number in range(places[-1], place):
                left[number] -= nbytes
            place = places.pop()
        fetched[storage] = begins[place]
    return fetched


def _group_begins(graph: StepGraph, runs: Sequence[Run]) -> dict[int, int]:
    """Number of the first run that serves a backward op (it, or a recomputation for it) → that op, in order."""
    found: dict[int, int] = {}
    begins = graph.n_forward
    for number in range(graph.n_forward, len(runs)):
        if not runs[number].again:
            if graph.ops[runs[number].op].phase == "backward":
                found[begins] = runs[number].op
            begins = number + 1
    return found
