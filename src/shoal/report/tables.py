"""The page's tables: the largest storages and what became of them, and the parts of the model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from shoal.plan import Plan
from shoal.report.words import format_seconds
from shoal.residence import Keep
from shoal.schedule import schedule
from shoal.sizes import format_bytes
from shoal.step import Storage
from shoal.timeline import Timeline

MOST_PARTS = 14

_FATES = {
    "parameter": "Resident: a parameter",
    "buffer": "Resident: a buffer",
    "input": "Resident: the input batch",
    "constant": "Resident: a constant",
    "gradient": "Held for the optimizer until the step ends",
    "tangent": "Held until the step ends: the gradient of the output",
    "error": "Handed from one backward op to the next, then freed",
    "output": "Handed to the caller, who holds it until the step ends",
}


@dataclass(frozen=True)
class StorageRow:
    """A storage and what became of it. `at_peak` says whether it is in memory when most bytes are in use."""

    size: str
    layer: str
    content: str
    fate: str
    at_peak: bool


@dataclass(frozen=True)
class PartRow:
    """A part of the model: bytes of its saved storages ("" where no plan is known) and time spent in its ops."""

    name: str
    kept: str
    given_up: str
    forward: str
    recompute: str
    backward: str


class PartTable(NamedTuple):
    """`sizes_known` is False where only a timeline is there."""

    rows: list[PartRow]
    sizes_known: bool


def largest_storages(plan: Plan | None, count: int = 10) -> list[StorageRow]:
    """The `count` largest storages of the step; among equals those that a plan can decide about come first."""
    if plan is None:
        return []
    graph = plan.graph
    saved, at_peak = set(graph.saved), _alive_at_peak(plan)
    ranked = sorted(graph.storages, key=lambda s: (-s.nbytes, s.id not in saved, s.id))
    rows = []
    for storage in ranked[:count]:
        producer = graph.producer.get(storage.id)
        made_by = graph.ops[producer].target if producer is not None else storage.kind
        shape = "\u00d7".join(map(str, storage.shape)) or "scalar"
        rows.append(
            StorageRow(
                format_bytes(storage.nbytes),
                storage.layer or "(top level)",
                f"{short_target(made_by)}, {shape} {storage.dtype.removeprefix('torch.')}",
                _fate(plan, storage, storage.id in saved),
                storage.id in at_peak,
            )
        )
    return rows


def short_target(target: str) -> str:
    """`aten.convolution.default` → `convolution`."""
    parts = target.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else target


def _fate(plan: Plan, storage: Storage, saved: bool) -> str:
    if saved and storage.kind == "activation":
        fate = plan.fate(storage)
        if fate == "kept":
            last = plan.graph.ops[plan.graph.readers[storage.id][-1]]
            fate += f" until the backward pass of {last.layer or last.name}"
        return fate[:1].upper() + fate[1:]
    return _FATES.get(storage.kind, "Freed within the forward pass")


def _alive_at_peak(plan: Plan) -> set[int]:
    graph = plan.graph
    alive = {s.id for s in graph.storages if s.kind in ("parameter", "buffer", "input", "constant")}
    runs = schedule(graph, plan.residences)
    moments = plan.timeline.moments
    peak = sum(moment.phase != "stall" for moment in moments[: moments.index(plan.timeline.peak)])
    for run in runs[:peak]:
        alive.update(run.fetches, run.writes)
        alive.difference_update(run.frees, run.releases)
    alive.update(runs[peak].fetches, runs[peak].writes)
    alive.discard(runs[peak].takes_over)
    return alive


def parts_of_model(timeline: Timeline, plan: Plan | None) -> PartTable:
    """Bytes and seconds by part of the model, in the order of the forward pass; the small ones are added up."""
    layers = {moment.layer for moment in timeline.moments}
    if plan is not None:
        layers |= {storage.layer for storage in plan.graph.storages}
    depth = _depth(layers)
    kept: dict[str, int] = defaultdict(int)
    given_up: dict[str, int] = defaultdict(int)
    seconds: dict[str, dict[str, float]] = {}
    for moment in timeline.moments:
        spent = seconds.setdefault(_part(moment.layer, depth), defaultdict(float))
        spent["forward" if moment.phase == "loss" else moment.phase] += moment.seconds
    if plan is not None:
        for storage in (plan.graph.storages[i] for i in plan.graph.saved):
            stays = isinstance(plan.residences.get(storage.name, Keep()), Keep)
            (kept if stays else given_up)[_part(storage.layer, depth)] += storage.nbytes
    names = [*seconds, *(name for name in (kept | given_up) if name not in seconds)]
    if len(names) > MOST_PARTS:
        weight = {n: (kept[n] + given_up[n], sum(seconds.get(n, {}).values())) for n in names}
        large = set(sorted(names, key=lambda n: weight[n], reverse=True)[: MOST_PARTS - 1])
        groups = [(n, [n]) for n in names if n in large]
        rest = [n for n in names if n not in large]
        groups.append((f"{len(rest)} others", rest))
    else:
        groups = [(n, [n]) for n in names]

    def spent_in(members: list[str], phase: str) -> str:
        return format_seconds(sum(seconds.get(n, {}).get(phase, 0.0) for n in members))

    rows = [
        PartRow(
            name,
            format_bytes(sum(kept[n] for n in members)),
            format_bytes(sum(given_up[n] for n in members)),
            spent_in(members, "forward"),
            spent_in(members, "recompute"),
            spent_in(members, "backward"),
        )
        for name, members in groups
    ]
    return PartTable(rows if len(rows) > 1 else [], plan is not None)


def _part(layer: str, depth: int) -> str:
    return ".".join(layer.split(".")[:depth]) or "(top level)"


def _depth(layers: set[str]) -> int:
    """The finest cut of the module paths into at most `MOST_PARTS` parts, at least their first names."""
    deepest = max((layer.count(".") + 1 for layer in layers), default=1)
    fits = [d for d in range(1, deepest + 1) if len({_part(layer, d) for layer in layers}) <= MOST_PARTS]
    return max(fits, default=1)
