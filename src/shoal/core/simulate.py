"""StepGraph + residences → Timeline: what runs when, and every byte in use while it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.core.link_queue import LinkQueue
from shoal.core.residence import Residence
from shoal.core.schedule import Run, schedule
from shoal.core.step import Op, StepGraph
from shoal.core.timeline import Moment, MomentPhase, Timeline, Transfer, TransferWay

_CATEGORY = {"activation": "kept", "output": "kept", "gradient": "gradient"}


def simulate(graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int = 0) -> Timeline:
    """Play the step through, op by op.

    Args:
        graph: the step, with seconds, workspaces and, where the residences offload, a link.
        residences: by storage name; an absent storage is kept.
        budget_bytes: carried into the timeline for the report.

    Raises:
        PlanError: the residences do not fit the step (see `shoal.core.schedule`).
    """
    return _Player(graph).play(schedule(graph, residences), budget_bytes)


class _Player:
    """Plays runs one by one and writes down what happens."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._live = dict.fromkeys(("kept", "recomputed", "fetched", "error", "gradient"), 0)
        self._category_of: dict[int, str] = {}
        self._now = 0.0
        self._moments: list[Moment] = []
        self._transfers: list[Transfer] = []
        self._links: LinkQueue | None = None

    def play(self, runs: Iterable[Run], budget_bytes: int) -> Timeline:
        for run in runs:
            op = run.of(self._graph)
            for storage in run.fetches:
                self._add(storage, "fetched")
                self._transfer(storage, "to device", *self._queue().fetch(storage, self._now))
                self._stall(storage, op, self._queue().stall_at_once(storage, self._now))
            for storage in run.awaits:
                self._stall(storage, op, self._queue().stall(storage, self._now))
            for storage in run.writes:
                kind = self._graph.storages[storage].kind
                self._add(storage, "recomputed" if run.again else _CATEGORY.get(kind, "error"))
            if run.takes_over >= 0:
                self._drop(run.takes_over)
            phase: MomentPhase = "recompute" if run.again else op.phase
            self._note(op.name, op, phase, op.seconds, op.workspace_bytes + dropped_bytes(self._graph, run, op))
            for storage in run.offloads:
                self._transfer(storage, "to host", *self._queue().offload(storage, self._now))
                self._stall(storage, op, self._queue().stall_at_once(storage, self._now))
            for storage in run.frees:
                if storage != run.takes_over:
                    self._drop(storage)
            for storage in run.releases:
                self._stall(storage, op, self._queue().stall(storage, self._now))
                self._drop(storage)
        return Timeline(self._graph.model, tuple(self._moments), budget_bytes, tuple(self._transfers))

    def _queue(self) -> LinkQueue:
        self._links = self._links or LinkQueue(self._graph)
        return self._links

    def _add(self, storage: int, category: str) -> None:
        self._category_of[storage] = category
        self._live[category] += self._graph.storages[storage].nbytes

    def _drop(self, storage: int) -> None:
        self._live[self._category_of[storage]] -= self._graph.storages[storage].nbytes

    def _stall(self, storage: int, op: Op, stall_seconds: float) -> None:
        if stall_seconds > 0:
            self._note(self._graph.storages[storage].name, op, "stall", stall_seconds, 0)

    def _note(self, name: str, op: Op, phase: MomentPhase, seconds: float, workspace_bytes: int) -> None:
        live = self._live
        self._moments.append(
            Moment(
                name,
                op.target,
                op.layer,
                phase,
                self._now,
                seconds,
                self._graph.resident_bytes,
                live["kept"],
                live["recomputed"],
                live["error"],
                live["gradient"],
                workspace_bytes,
                live["fetched"],
            )
        )
        self._now += seconds

    def _transfer(self, storage: int, way: TransferWay, start_seconds: float, end_seconds: float) -> None:
        moved = self._graph.storages[storage]
        self._transfers.append(
            Transfer(moved.name, moved.layer, way, moved.nbytes, start_seconds, end_seconds - start_seconds)
        )


def dropped_bytes(graph: StepGraph, run: Run, op: Op) -> int:
    """What a recomputation writes although no one asked for it again; it is dropped as soon as the op ends."""
    if not run.again:
        return 0
    return sum(graph.storages[s].nbytes for s in op.writes if s not in run.writes)


def peak_and_seconds(graph: StepGraph, runs: Iterable[Run]) -> tuple[int, float]:
    """The peak in bytes and the duration in seconds of a schedule: `simulate` without the record."""
    totals, seconds = bytes_and_seconds(graph, runs)
    return max([graph.resident_bytes, *totals]), seconds


def bytes_and_seconds(graph: StepGraph, runs: Iterable[Run]) -> tuple[list[int], float]:
    """The bytes in use during each run of a schedule, and the duration of all in seconds."""
    storages = graph.storages
    in_use = graph.resident_bytes
    totals = []
    seconds = 0.0
    links: LinkQueue | None = None
    for run in runs:
        op = run.of(graph)
        if run.fetches:
            links = links or LinkQueue(graph)
            for storage in run.fetches:
                links.fetch(storage, seconds)
                seconds += links.stall_at_once(storage, seconds)
                in_use += storages[storage].nbytes
        if links is not None:
            for storage in run.awaits:
                seconds += links.stall(storage, seconds)
        for storage in run.writes:
            in_use += storages[storage].nbytes
        if run.takes_over >= 0:
            in_use -= storages[run.takes_over].nbytes
        totals.append(in_use + op.workspace_bytes + dropped_bytes(graph, run, op))
        seconds += op.seconds
        if run.offloads:
            links = links or LinkQueue(graph)
            for storage in run.offloads:
                links.offload(storage, seconds)
                seconds += links.stall_at_once(storage, seconds)
        for storage in run.frees:
            if storage != run.takes_over:
                in_use -= storages[storage].nbytes
        if links is not None:
            for storage in run.releases:
                seconds += links.stall(storage, seconds)
                in_use -= storages[storage].nbytes
    return totals, seconds
