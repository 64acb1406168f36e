"""What a link can carry, as rows of a linear program: the backlog of bytes still to be copied.

The link is modelled as divisible bandwidth. For every storage s a binary o_s says whether it leaves. From one position
of the forward pass to the next, the backlog B of the way to the host grows by what is written and falls by bandwidth
times seconds, stalls x included; it is empty when the forward pass ends:

    B_j >= B_(j-1) + sum of bytes_s * o_s - bandwidth * (seconds_j + x_j),      B_end = 0.

What of it no forward reader holds anyway is in use at j. The backward pass is the same read from its end: F_j is what
must be back ahead of its first reader. A real copy frees its bytes at its end and takes them at its start, never
earlier than divisible bandwidth does, so the rows are a relaxation for every plan that offloads.

The latency of a copy counts as the bytes that the link could carry meanwhile. Those take no room on the device, so a
relaxation has two backlogs, of bytes for the room and of both for the time. To choose by, the second does for both.

Where the link does not overlap, a copy is added time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.hardware import Link
from shoal.planners.linear_program import LinearProgram
from shoal.planners.recompute_choice import RecomputeChoice


@dataclass(frozen=True)
class LinkRows:
    """The variables that the link brings in.

    Attributes:
        off: candidate → its binary.
        added: variables of added time in the backward pass, in seconds: stalls and recomputations alike.
        ahead: number of a row of `choice.rows` → entries to add to the bytes in use there.
    """

    off: Mapping[int, int]
    added: tuple[int, ...]
    ahead: Mapping[int, Mapping[int, float]]


def add_link_rows(
    program: LinearProgram, choice: RecomputeChoice, link: Link, unit_bytes: float, *, relaxed: bool
) -> LinkRows:
    """Add the variables and rows of both ways.

    Args:
        program: gets them.
        choice: the step's numbers.
        link: of the step.
        unit_bytes: bytes that count as 1 in the rows.
        relaxed: be below every plan there is; else be near the plans that `transfer_places` makes.
    """
    graph = choice.graph
    saved = set(graph.saved)
    leaving = [s for s in choice.candidates if relaxed or s in saved]
    both_ways_seconds = {
        s: link.to_host_seconds(graph.storages[s].nbytes) + link.to_device_seconds(graph.storages[s].nbytes)
        for s in leaving
    }
    off = {s: program.variable(0.0 if link.overlaps else both_ways_seconds[s], binary=True) for s in leaving}
    if link.host_bytes:
        program.at_least(
            -link.host_bytes / unit_bytes, {off[s]: -graph.storages[s].host_bytes / unit_bytes for s in off}
        )
    max_seconds = sum(both_ways_seconds.values()) + sum(op.second.seconds for op in graph.ops[: graph.n_forward])
    if not link.overlaps:
        return LinkRows(off, (program.variable(1.0, upper=max_seconds),), {})
    ways = _Ways(program, choice, link, off, unit_bytes, max_seconds, relaxed)
    ahead = ways.add_there()
    added, ahead_back = ways.add_back()
    return LinkRows(off, added, {**ahead, **ahead_back})


class _Ways:
    """The backlogs of both directions, each a chain of variables from one position to the next."""

    def __init__(
        self,
        program: LinearProgram,
        choice: RecomputeChoice,
        link: Link,
        off: Mapping[int, int],
        unit_bytes: float,
        max_seconds: float,
        relaxed: bool,
    ) -> None:
        self._program = program
        self._choice = choice
        self._link = link
        self._off = off
        self._unit_bytes = unit_bytes
        self._max_seconds = max_seconds
        self._relaxed = relaxed
        self._starts = [0.0]  # of each op, in the plain step
        for op in choice.graph.ops:
            self._starts.append(self._starts[-1] + op.seconds)

    def add_there(self) -> dict[int, dict[int, float]]:
        """The way to the host: row → entries to add to the bytes in use there."""
        graph, program = self._choice.graph, self._program
        rows_at = self._rows_at(0, graph.n_forward)
        stops = [*sorted(rows_at), graph.n_forward]
        seconds = [self._starts[b] - self._starts[a] for a, b in zip([0, *stops], stops, strict=False)]
        stalls = [program.variable(1.0, upper=self._max_seconds) for _ in stops]
        born = sorted(self._off, key=graph.producer.__getitem__)
        begins = [sum(graph.producer[s] < stop for s in born) for stop in stops]
        comes = [born[a:b] for a, b in zip([0, *begins], begins, strict=False)]
        backlogs = self._chains(self._link.to_host_bytes_per_second, seconds, stalls, comes)
        ahead: dict[int, dict[int, float]] = {}
        for backlog, op, n_born in zip(backlogs, stops, begins, strict=True):
            for number in rows_at.get(op, ()):
                waiting = set(self._choice.rows[number].waiting)
                in_use = program.variable(upper=self._max_bytes())
                held = {self._off[s]: self._bytes(s) for s in born[:n_born] if s not in waiting}
                program.at_least(0.0, {in_use: 1.0, backlog: -1.0, **held})
                ahead[number] = {in_use: 1.0}
        return ahead

    def add_back(self) -> tuple[tuple[int, ...], dict[int, dict[int, float]]]:
        """The way back, from the end of the step: variables of added time, and entries as of `add_there`."""
        choice, program = self._choice, self._program
        graph = choice.graph
        first = next((op.id for op in graph.ops if op.phase == "backward"), len(graph.ops))
        due: dict[int, list[int]] = {}
        for storage in self._off:
            due.setdefault(choice.demands[choice.due[storage] - 1], []).append(storage)
        rows_at = self._rows_at(first, len(graph.ops))
        stops = sorted({*rows_at, *due, first}, reverse=True)
        # From one stop back to the one before; what the first op finds must come before it, while the device waits.
        seconds = [0.0, *(self._starts[b] - self._starts[a] for a, b in zip(stops[1:], stops, strict=False)), 0.0]
        comes = [[], *([*due.get(stop, ())] for stop in stops)]
        added = [program.variable(1.0, upper=self._max_seconds) for _ in comes]
        backlogs = self._chains(self._link.to_device_bytes_per_second, seconds, added, comes)
        ahead = {
            number: {backlog: 1.0}
            for backlog, op in zip(backlogs, stops, strict=False)
            for number in rows_at.get(op, ())
        }
        return tuple(added), ahead

    def _chains(
        self, bytes_per_second: float, seconds: Sequence[float], added: Sequence[int], comes: Sequence[Sequence[int]]
    ) -> list[int]:
        """Variables of the bytes that the link still has to carry at each stop; at the last there are none.

        Args:
            bytes_per_second: what the link carries.
            seconds: from each stop's predecessor to it.
            added: variables of the time added meanwhile.
            comes: the storages that there are to be carried since.
        """
        latency_bytes = self._link.latency_seconds * bytes_per_second / self._unit_bytes
        if self._relaxed and latency_bytes:
            self._chain(bytes_per_second, seconds, added, comes, latency_bytes)
            latency_bytes = 0.0
        return self._chain(bytes_per_second, seconds, added, comes, latency_bytes)

    def _chain(
        self,
        bytes_per_second: float,
        seconds: Sequence[float],
        added: Sequence[int],
        comes: Sequence[Sequence[int]],
        latency_bytes: float,
    ) -> list[int]:
        rate = bytes_per_second / self._unit_bytes
        max_bytes = self._max_bytes() + latency_bytes * len(self._off)
        backlogs: list[int] = []
        for number, (duration, extra, coming) in enumerate(zip(seconds, added, comes, strict=True)):
            is_last = number == len(added) - 1
            backlog = self._program.variable(upper=0.0 if is_last else max_bytes)
            entries = {backlog: 1.0, extra: rate}
            if backlogs:
                entries[backlogs[-1]] = -1.0
            entries.update({self._off[s]: -self._bytes(s) - latency_bytes for s in coming})
            self._program.at_least(-rate * duration, entries)
            backlogs.append(backlog)
        return backlogs

    def _rows_at(self, first: int, end: int) -> dict[int, list[int]]:
        """Op of first..end-1 → numbers of the rows there."""
        found: dict[int, list[int]] = {}
        for number, row in enumerate(self._choice.rows):
            if first <= row.op < end:
                found.setdefault(row.op, []).append(number)
        return found

    def _bytes(self, storage: int) -> float:
        return self._choice.graph.storages[storage].nbytes / self._unit_bytes

    def _max_bytes(self) -> float:
        return sum(self._bytes(s) for s in self._off)
