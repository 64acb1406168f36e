"""The page's tables: the largest storages with their residences, and the parts of the model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.plan import Plan
from shoal.core.residence import Encode, Offload, Recompute, exact_residence
from shoal.core.schedule import schedule
from shoal.core.simulate import alive_during
from shoal.core.sizes import format_bytes
from shoal.core.step import Storage
from shoal.core.timeline import WAITS, Timeline
from shoal.core.variant import COLUMNS
from shoal.report.words import format_seconds

MOST_PARTS = 14

_FATES = {
    "parameter": "Resident: a parameter",
    "buffer": "Resident: a buffer",
    "input": "Resident: the input batch",
    "constant": "Resident: a constant",
    "gradient": "Parameter gradient: in use until the step ends",
    "tangent": "Gradient of the output: in use until the step ends",
    "activation_gradient": "Activation gradient: freed after the next backward op",
    "output": "Returned to the caller: in use until the step ends",
}


@dataclass(frozen=True)
class StorageRow:
    """A storage and its residence. `at_peak`: it is in memory at the peak."""

    size: str
    layer: str
    content: str
    fate: str
    at_peak: bool


class PartTable(NamedTuple):
    """Of each part its name, the bytes of its saved and offloaded storages, the time of its ops and of its waits.

    `columns`: those of the rows that are shown, and their titles; no sizes without a plan.
    """

    rows: list[dict[str, str]]
    columns: dict[str, str]


class VariantTable(NamedTuple):
    """`columns`: the titles of what stands between the variant and its outcome."""

    rows: list[tuple[str, ...]]
    columns: tuple[str, ...]


def variants_of_step(plan: Plan | None) -> VariantTable:
    """The variants of the step that were considered; no rows where there was no choice."""
    candidates = plan.candidates if plan is not None else ()
    return VariantTable([one.cells() for one in candidates], COLUMNS[1:-1])


def largest_storages(plan: Plan | None, count: int = 10) -> list[StorageRow]:
    """The `count` largest storages of the step; of equal ones, those that a plan decides about come first."""
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
    given = isinstance(plan.residences.get(storage.name), Offload | Encode)
    if given or (saved and storage.kind == "activation"):
        fate = plan.fate(storage)
        if fate == "kept":
            last = plan.graph.ops[plan.graph.readers[storage.id][-1]]
            fate += f" until the backward pass of {last.layer or last.name}"
        return fate[:1].upper() + fate[1:]
    return _FATES.get(storage.kind, "Freed within the forward pass")


def _alive_at_peak(plan: Plan) -> set[int]:
    moments, peak = plan.timeline.moments, plan.timeline.peak
    place = sum(moment.phase not in WAITS for moment in moments[: moments.index(peak)])
    return alive_during(plan.graph, schedule(plan.graph, plan.residences), place, waits=peak.phase in WAITS)


def parts_of_model(timeline: Timeline, plan: Plan | None) -> PartTable:
    """Bytes and seconds by part of the model, in the order of the forward pass; small parts are added up."""
    layers = {moment.layer for moment in timeline.moments}
    if plan is not None:
        layers |= {storage.layer for storage in plan.graph.storages}
    depth = _depth(layers)
    seconds: dict[str, dict[str, float]] = {}
    for moment in timeline.moments:
        spent = seconds.setdefault(_part(moment.layer, depth), defaultdict(float))
        spent["forward" if moment.phase == "loss" else moment.phase] += moment.seconds
    sizes: dict[str, dict[str, int]] = {} if plan is None else _sizes(plan, depth)
    names = [*seconds, *(name for name in sizes if name not in seconds)]
    if len(names) > MOST_PARTS:
        weight = {n: (sum(sizes.get(n, {}).values()), sum(seconds.get(n, {}).values())) for n in names}
        large = set(sorted(names, key=lambda n: weight[n], reverse=True)[: MOST_PARTS - 1])
        groups = [(n, [n]) for n in names if n in large]
        rest = [n for n in names if n not in large]
        groups.append((f"{len(rest)} others", rest))
    else:
        groups = [(n, [n]) for n in names]

    rows = []
    for name, members in groups:
        row = {"name": name}
        for fate in ("kept", "recomputed", "offloaded"):
            row[fate] = format_bytes(sum(sizes.get(n, {}).get(fate, 0) for n in members))
        for phase in ("forward", "recompute", "backward", "stall", "launch"):
            row[phase] = format_seconds(sum(seconds.get(n, {}).get(phase, 0.0) for n in members))
        rows.append(row)
    fates = {fate for of_part in sizes.values() for fate in of_part}
    return PartTable(rows if len(rows) > 1 else [], _columns(timeline, fates, plan is not None))


def _columns(timeline: Timeline, fates: set[str], sizes_known: bool) -> dict[str, str]:
    """Titles of the columns; recomputed and offloaded bytes have one each, columns of zeros are left out."""
    shown = {"kept": "Saved, kept"} if sizes_known else {}
    if "offloaded" in fates:
        if "recomputed" in fates:
            shown["recomputed"] = "Saved, recomputed"
        shown["offloaded"] = "Saved, offloaded"
    elif sizes_known:
        shown["recomputed"] = "Saved, freed"
    shown["forward"] = "Forward"
    if timeline.recompute_seconds > 0 or not timeline.transfers:
        shown["recompute"] = "Recompute"
    shown["backward"] = "Backward"
    if timeline.stall_seconds > 0:
        shown["stall"] = "Stalls"
    if timeline.launch_wait_seconds > 0:
        shown["launch"] = "Waits for launches"
    return shown


def _sizes(plan: Plan, depth: int) -> dict[str, dict[str, int]]:
    """Part → residence of its saved storages → their bytes. An offloaded storage counts even if only a
    recomputation reads it."""
    sizes: dict[str, dict[str, int]] = {}
    offloaded = plan.offloaded
    saved = [plan.graph.storages[i] for i in plan.graph.saved]
    for storage in dict.fromkeys([*saved, *offloaded]):
        residence = exact_residence(plan.residences.get(storage.name))
        freed_by = "offloaded" if isinstance(residence, Offload) else "recomputed"
        fate = freed_by if isinstance(residence, Offload | Recompute) else "kept"
        of_part = sizes.setdefault(_part(storage.layer, depth), defaultdict(int))
        of_part[fate] += storage.nbytes
    return sizes


def _part(layer: str, depth: int) -> str:
    return ".".join(layer.split(".")[:depth]) or "(top level)"


def _depth(layers: set[str]) -> int:
    """The finest cut of the module paths into at most `MOST_PARTS` parts, at least their first names."""
    deepest = max((layer.count(".") + 1 for layer in layers), default=1)
    fits = [d for d in range(1, deepest + 1) if len({_part(layer, d) for layer in layers}) <= MOST_PARTS]
    return max(fits, default=1)
