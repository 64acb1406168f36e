"""StepGraph + residences → Timeline: what runs when, and every byte in use while it does.

Two queues run side by side: the host launches one op after another, and the device runs each when it is launched, its
copies have ended and the op before it has. Where launches take no time, as on the CPU, only the device's is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shoal.core.hardware import Link
from shoal.core.residence import Residence
from shoal.core.schedule import Run, schedule
from shoal.core.step import RESIDENT, Op, StepGraph
from shoal.core.timeline import Moment, MomentPhase, Timeline, Transfer, TransferWay
from shoal.errors import PlanError

_CATEGORY = {"activation": "kept", "crossing": "kept", "output": "kept", "gradient": "gradient"}


def simulate(graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int = 0) -> Timeline:
    """Simulate the step, op by op.

    Args:
        graph: the step, with seconds, workspaces and, where the residences offload, a link.
        residences: by storage name; an absent storage is kept.
        budget_bytes: carried into the timeline for the report.

    Raises:
        PlanError: the residences do not fit the step (see `shoal.core.schedule`).
    """
    record = _Record(graph)
    _play(graph, schedule(graph, residences), record)
    return Timeline(graph.model, tuple(record.moments), budget_bytes, tuple(record.transfers))


def peak_and_seconds(graph: StepGraph, runs: Iterable[Run]) -> tuple[int, float]:
    """The peak in bytes and the duration in seconds of a schedule: `simulate` without the record."""
    totals, seconds = bytes_and_seconds(graph, runs)
    return max([graph.resident_bytes, *totals]), seconds


def bytes_and_seconds(graph: StepGraph, runs: Iterable[Run]) -> tuple[list[int], float]:
    """The bytes in use during each run of a schedule, and the duration of all in seconds."""
    return _play(graph, runs, None)


def launch_waits(graph: StepGraph, runs: Iterable[Run]) -> list[float]:
    """How long the device waits for the host before each run of a schedule, where it waits for no transfer."""
    waits = []
    now = launched = 0.0
    for run in runs:
        op = run.of(graph)
        launched += op.launch_seconds
        waits.append(max(0.0, launched - now))
        now += waits[-1] + op.seconds
    return waits


def launched_seconds(seconds: Sequence[float], launches: Sequence[float]) -> float:
    """When the last of some runs ends that wait for no transfer.

    Args:
        seconds: of each run. launches: what the host takes to launch it, after the ones before.
    """
    now = launched = 0.0
    for run_seconds, launch_seconds in zip(seconds, launches, strict=True):
        launched += launch_seconds
        now = max(now, launched) + run_seconds
    return now


def _play(graph: StepGraph, runs: Iterable[Run], record: _Record | None) -> tuple[list[int], float]:
    """The event loop: bytes in use during each run, and seconds of all. Planners call it often, without a record."""
    storages = graph.storages
    in_use = graph.resident_bytes
    totals = []
    now = 0.0
    launched = 0.0  # when the host has launched the run: it goes from one to the next and waits for nothing
    links: LinkQueue | None = None
    ops = graph.ops
    for run in runs:
        op = ops[run.op].second if run.again else ops[run.op]
        if run.fetches or run.offloads:
            links = links or LinkQueue(graph)
        if links is not None:
            for storage in run.fetches:
                start, end = links.fetch(storage, now)
                stall = links.stall_at_once(storage, now)
                in_use += storages[storage].nbytes
                if record is not None:
                    record.add(storage, "fetched")
                    record.transfer(storage, "to device", start, end)
                    record.stall(storage, op, now, stall)
                now += stall
            for storage in run.awaits:
                stall = links.stall(storage, now)
                if record is not None:
                    record.stall(storage, op, now, stall)
                now += stall
        launched += op.launch_seconds
        if launched > now:
            if record is not None:
                record.launch(op, now, launched - now)
            now = launched
        for storage in run.writes:
            in_use += storages[storage].nbytes
        if run.takes_over >= 0:
            in_use -= storages[run.takes_over].nbytes
        workspace_bytes = op.workspace_bytes
        if run.again:
            workspace_bytes += dropped_bytes(graph, run, op)
        totals.append(in_use + workspace_bytes)
        if record is not None:
            record.run(run, op, now, workspace_bytes)
        now += op.seconds
        if links is not None:
            for storage in run.offloads:
                start, end = links.offload(storage, now)
                stall = links.stall_at_once(storage, now)
                if record is not None:
                    record.transfer(storage, "to host", start, end)
                    record.stall(storage, op, now, stall)
                now += stall
        for storage in run.frees:
            if storage != run.takes_over:
                in_use -= storages[storage].nbytes
                if record is not None:
                    record.drop(storage)
        if links is not None:
            for storage in run.releases:
                stall = links.stall(storage, now)
                in_use -= storages[storage].nbytes
                if record is not None:
                    record.stall(storage, op, now, stall)
                    record.drop(storage)
                now += stall
    return totals, now


def alive_during(graph: StepGraph, runs: Sequence[Run], place: int, *, waits: bool = False) -> set[int]:
    """The storages that are on the device during a run of a schedule.

    Args:
        place: of the run.
        waits: before the run begins to write.
    """
    alive = {s.id for s in graph.storages if s.kind in RESIDENT}
    for run in runs[:place]:
        alive.update(run.fetches, run.writes)
        alive.difference_update(run.frees, run.releases)
    alive.update(runs[place].fetches)
    return alive if waits else (alive | {*runs[place].writes}) - {runs[place].takes_over}


def dropped_bytes(graph: StepGraph, run: Run, op: Op) -> int:
    """Results of a recomputation that the plan does not ask for; they are dropped when the op ends."""
    if not run.again:
        return 0
    return sum(graph.storages[s].nbytes for s in op.writes if s not in run.writes)


class _Record:
    """The events of a simulated step, and the bytes of each category."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._live = dict.fromkeys(("kept", "recomputed", "fetched", "activation_gradient", "gradient"), 0)
        self._category_of: dict[int, str] = {}
        self.moments: list[Moment] = []
        self.transfers: list[Transfer] = []

    def add(self, storage: int, category: str) -> None:
        """An instance of the storage begins."""
        self._category_of[storage] = category
        self._live[category] += self._graph.storages[storage].nbytes

    def drop(self, storage: int) -> None:
        """It ends."""
        self._live[self._category_of[storage]] -= self._graph.storages[storage].nbytes

    def run(self, run: Run, op: Op, now: float, workspace_bytes: int) -> None:
        """An op runs."""
        for storage in run.writes:
            kind = self._graph.storages[storage].kind
            self.add(storage, "recomputed" if run.again else _CATEGORY.get(kind, "activation_gradient"))
        if run.takes_over >= 0:
            self.drop(run.takes_over)
        self._note(op.name, op, "recompute" if run.again else op.phase, now, op.seconds, workspace_bytes)

    def stall(self, storage: int, op: Op, now: float, seconds: float) -> None:
        """The device waits for a copy of the storage, where `seconds` is more than 0."""
        if seconds > 0:
            self._note(self._graph.storages[storage].name, op, "stall", now, seconds, 0)

    def launch(self, op: Op, now: float, seconds: float) -> None:
        """The device waits until the host has launched the op."""
        self._note(op.name, op, "launch", now, seconds, 0)

    def transfer(self, storage: int, way: TransferWay, start_seconds: float, end_seconds: float) -> None:
        """A copy begins."""
        moved = self._graph.storages[storage]
        self.transfers.append(
            Transfer(moved.name, moved.layer, way, moved.nbytes, start_seconds, end_seconds - start_seconds)
        )

    def _note(self, name: str, op: Op, phase: MomentPhase, now: float, seconds: float, workspace_bytes: int) -> None:
        live = self._live
        self.moments.append(
            Moment(
                name,
                op.target,
                op.layer,
                phase,
                now,
                seconds,
                self._graph.resident_bytes,
                live["kept"],
                live["recomputed"],
                live["activation_gradient"],
                live["gradient"],
                workspace_bytes,
                live["fetched"],
            )
        )


class LinkQueue:
    """The link between device and host while a step is simulated: one queue each way.

    Transfers of each direction run one after another, in the order they were begun; the two directions at once.

    Times are seconds since the step began.

    Raises:
        PlanError: the step has no link to the host.
    """

    def __init__(self, graph: StepGraph) -> None:
        if graph.link is None:
            raise PlanError(
                f"the plan offloads, but this step of {graph.model or 'the model'} has no link to the host; give "
                "hardware=, or offload_to= to shoal.compile"
            )
        self._storages = graph.storages
        self._link: Link = graph.link
        self._to_host_until = 0.0
        self._to_device_until = 0.0
        self._done: dict[int, float] = {}

    def offload(self, storage: int, now: float) -> tuple[float, float]:
        """Begin the copy to the host: when it starts and when it ends."""
        start = max(now, self._to_host_until)
        self._to_host_until = start + self._link.to_host_seconds(self._storages[storage].nbytes)
        self._done[storage] = self._to_host_until
        return start, self._to_host_until

    def fetch(self, storage: int, now: float) -> tuple[float, float]:
        """Begin the copy back: when it starts and when it ends."""
        start = max(now, self._to_device_until)
        self._to_device_until = start + self._link.to_device_seconds(self._storages[storage].nbytes)
        self._done[storage] = self._to_device_until
        return start, self._to_device_until

    def stall(self, storage: int, now: float) -> float:
        """How long the device waits at `now` for the storage's latest copy."""
        return max(0.0, self._done[storage] - now)

    def stall_at_once(self, storage: int, now: float) -> float:
        """How long the device waits at `now` for a copy that has just begun: for links that do not overlap."""
        return 0.0 if self._link.overlaps else self.stall(storage, now)


def rewritten(graph: StepGraph, as_written: StepGraph) -> StepGraph:
    """A step that lossless rewrites made of another one, with what they save of its peak with everything kept."""
    saved_bytes = simulate(as_written, {}).peak_bytes - simulate(graph, {}).peak_bytes
    return replace(graph, as_written=as_written, rewrites_save_bytes=saved_bytes)
