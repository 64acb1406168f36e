"""StepGraph + residences → Timeline: what runs when, and every byte in use while it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.residence import Residence
from shoal.schedule import Run, schedule
from shoal.step import Op, StepGraph
from shoal.timeline import Moment, MomentPhase, Timeline

_CATEGORY = {"activation": 0, "output": 0, "error": 2, "tangent": 2, "gradient": 3}


def simulate(graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int = 0) -> Timeline:
    """Play the step through, op by op.

    Args:
        graph: the step, with seconds and workspaces.
        residences: by storage name; an absent storage is kept.
        budget_bytes: carried into the timeline for the report.

    Raises:
        PlanError: the residences do not fit the step (see `shoal.schedule`).
    """
    live = [0, 0, 0, 0]  # kept, recomputed, error, gradient
    category_of: dict[int, int] = {}
    moments = []
    start_seconds = 0.0
    for run in schedule(graph, residences):
        op = run.of(graph)
        for storage in run.writes:
            category = 1 if run.again else _CATEGORY.get(graph.storages[storage].kind, 2)
            category_of[storage] = category
            live[category] += graph.storages[storage].nbytes
        if run.takes_over >= 0:
            live[category_of[run.takes_over]] -= graph.storages[run.takes_over].nbytes
        phase: MomentPhase = "recompute" if run.again else op.phase
        kept_bytes, recomputed_bytes, error_bytes, gradient_bytes = live
        moments.append(
            Moment(
                op.name,
                op.target,
                op.layer,
                phase,
                start_seconds,
                op.seconds,
                graph.resident_bytes,
                kept_bytes,
                recomputed_bytes,
                error_bytes,
                gradient_bytes,
                op.workspace_bytes + dropped_bytes(graph, run, op),
            )
        )
        start_seconds += op.seconds
        for storage in run.frees:
            if storage != run.takes_over:
                live[category_of[storage]] -= graph.storages[storage].nbytes
    return Timeline(graph.model, tuple(moments), budget_bytes)


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
    for run in runs:
        op = run.of(graph)
        for storage in run.writes:
            in_use += storages[storage].nbytes
        if run.takes_over >= 0:
            in_use -= storages[run.takes_over].nbytes
        totals.append(in_use + op.workspace_bytes + dropped_bytes(graph, run, op))
        seconds += op.seconds
        for storage in run.frees:
            if storage != run.takes_over:
                in_use -= storages[storage].nbytes
    return totals, seconds
