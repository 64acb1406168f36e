"""What a link can carry, as rows of a linear program: bytes that should be away by now and are not.

Offloading is a fluid here. For every storage s a binary o_s says whether it leaves. From one position of the forward
pass to the next, the backlog B of the way to the host grows by what is written and falls by bandwidth times seconds,
stalls x included; it is empty when the forward pass ends:

    B_j >= B_(j-1) + sum of bytes_s * o_s - bandwidth * (seconds_j + x_j),      B_end = 0.

What of it no forward reader holds anyway is in use at j. The backward pass is the same read from its end: F_j is what
must be back ahead of its first reader. A real copy frees its bytes at its end and takes them at its start, never
earlier than the fluid does, so the rows are a relaxation for every plan that offloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


def add_link_rows(program: LinearProgram, choice: RecomputeChoice, unit_bytes: float) -> LinkRows:
    """Add the variables and rows of both ways.

    Args:
        program: gets them.
        choice: the step's numbers; its graph has a link.
        unit_bytes: bytes that count as 1 in the rows.
    """
    off = {s: program.variable(binary=True) for s in choice.candidates if s in choice.graph.saved}
    link = choice.graph.link
    assert link is not None  # asked for steps with a link alone
    if link.host_bytes:
        entries = {off[s]: -choice.graph.storages[s].nbytes / unit_bytes for s in off}
        program.at_least(-link.host_bytes / unit_bytes, entries)
    starts = [0.0]
    for op in choice.graph.ops:
        starts.append(starts[-1] + op.seconds)
    ahead: dict[int, dict[int, float]] = {}
    _to_host(program, choice, off, unit_bytes, starts, ahead)
    added = _to_device(program, choice, off, unit_bytes, starts, ahead)
    return LinkRows(off, added, ahead)


def _to_host(
    program: LinearProgram,
    choice: RecomputeChoice,
    off: Mapping[int, int],
    unit_bytes: float,
    starts: list[float],
    ahead: dict[int, dict[int, float]],
) -> None:
    graph, link = choice.graph, choice.graph.link
    assert link is not None
    rate = link.to_host_bytes_per_second / unit_bytes
    rows_at: dict[int, list[int]] = {}
    for number, row in enumerate(choice.rows):
        if row.op < graph.n_forward:
            rows_at.setdefault(row.op, []).append(number)
    born = sorted(off, key=graph.producer.__getitem__)
    most_bytes = sum(graph.storages[s].nbytes for s in off) / unit_bytes
    before, position, next_born = -1, 0, 0
    for op in [*sorted(rows_at), graph.n_forward]:
        stall = program.variable(1.0, most=most_bytes / rate)
        backlog = program.variable(most=most_bytes if op < graph.n_forward else 0.0)
        entries = {backlog: 1.0, stall: rate}
        if before >= 0:
            entries[before] = -1.0
        while next_born < len(born) and graph.producer[born[next_born]] < op:
            storage = born[next_born]
            entries[off[storage]] = -graph.storages[storage].nbytes / unit_bytes
            next_born += 1
        program.at_least(-rate * (starts[op] - starts[position]), entries)
        before, position = backlog, op
        for number in rows_at.get(op, ()):
            waiting = set(choice.rows[number].waiting)
            in_use = program.variable(most=most_bytes)
            held = {off[s]: graph.storages[s].nbytes / unit_bytes for s in born[:next_born] if s not in waiting}
            program.at_least(0.0, {in_use: 1.0, backlog: -1.0, **held})
            ahead[number] = {in_use: 1.0}


def _to_device(
    program: LinearProgram,
    choice: RecomputeChoice,
    off: Mapping[int, int],
    unit_bytes: float,
    starts: list[float],
    ahead: dict[int, dict[int, float]],
) -> tuple[int, ...]:
    graph, link = choice.graph, choice.graph.link
    assert link is not None
    rate = link.to_device_bytes_per_second / unit_bytes
    first = next(op.id for op in graph.ops if op.phase == "backward")
    due: dict[int, list[int]] = {}
    for storage in off:
        due.setdefault(choice.demands[choice.due[storage] - 1], []).append(storage)
    rows_at: dict[int, list[int]] = {}
    for number, row in enumerate(choice.rows):
        if row.op >= first:
            rows_at.setdefault(row.op, []).append(number)
    most_bytes = sum(graph.storages[s].nbytes for s in off) / unit_bytes
    most_seconds = most_bytes / rate + sum(op.second.seconds for op in graph.ops[: graph.n_forward])
    positions = sorted({*rows_at, *due, first}, reverse=True)
    added = []
    after, later = -1, positions[0]
    for op in positions:
        extra = program.variable(1.0, most=most_seconds)
        added.append(extra)
        fetched = program.variable(most=most_bytes)
        entries = {fetched: 1.0, extra: rate}
        if after >= 0:
            entries[after] = -1.0
            for storage in due.get(later, ()):
                entries[off[storage]] = -graph.storages[storage].nbytes / unit_bytes
        program.at_least(-rate * (starts[later] - starts[op]), entries)
        after, later = fetched, op
        for number in rows_at.get(op, ()):
            ahead[number] = {fetched: 1.0}
    # What the first backward op finds must have come before it: the device waits for all of it.
    extra = program.variable(1.0, most=most_seconds)
    added.append(extra)
    entries = {extra: rate, after: -1.0}
    entries.update({off[s]: -graph.storages[s].nbytes / unit_bytes for s in due.get(first, ())})
    program.at_least(0.0, entries)
    return tuple(added)
