"""A timeline as a trace in the Chrome trace event format, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.core.files import write_text
from shoal.core.timeline import Timeline
from shoal.errors import InputError
from shoal.report.link_use import WAYS
from shoal.report.words import categories, category_bytes

_PROCESS = 1
_NAMES = ("forward", "loss", "recompute", "backward", "to host", "to device", "stall", "launch")
_TRACKS = {name: track for track, name in enumerate(_NAMES, 1)}


def save_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write the step as a trace, whole or not at all.

    Ops are complete events ("X") on one track a phase, in microseconds; the bytes in use are counter events ("C"). Each
    direction of the link has a track, and the times in which the device waits for a copy are on a track "stall", those
    in which it waits for the host to launch an op on a track "launch".

    Args:
        timeline: the simulated step.
        path: of the file; an earlier file of that name is replaced.

    Returns:
        The path.

    Raises:
        InputError: the timeline has no moments, or the folder does not exist, is not writable, or the disk is full.

    >>> import shoal, torch
    >>> plan = shoal.plan(torch.nn.Conv2d(3, 8, 3), torch.empty(2, 3, 8, 8), hardware="p100-nvlink")
    >>> save_trace(plan.timeline, "step.json").name
    'step.json'
    """
    if not timeline.moments:
        raise InputError("the timeline has no moments, so there is nothing to trace; expected at least one op")
    trace = {
        "traceEvents": trace_events(timeline),
        "displayTimeUnit": "ms",
        "otherData": {
            "model": timeline.model,
            "peak_bytes": timeline.peak_bytes,
            "budget_bytes": timeline.budget_bytes,
        },
    }
    return write_text(path, json.dumps(trace, separators=(",", ":")) + "\n")


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events in the order of their time stamps, names of the tracks first."""
    moments = timeline.moments
    used = {moment.phase for moment in moments} | {transfer.way for transfer in timeline.transfers}
    shown = categories(timeline)
    events = [_names("process_name", 0, f"{timeline.model or 'model'}: one training step")]
    for name, track in _TRACKS.items():
        if name in used:
            events.append(_names("thread_name", track, name))
            events.append({**_names("thread_sort_index", track, ""), "args": {"sort_index": track}})
    spans = _spans([(moment.start_seconds, moment.seconds) for moment in moments])
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    if timeline.budget_bytes:
        events.append(_counter("budget", starts[0], {"bytes": timeline.budget_bytes}))
    for moment, start, end in zip(moments, starts, ends, strict=True):
        parts = {category: size for category, size in category_bytes(moment).items() if category in shown}
        known = {
            "op": moment.op,
            "target": moment.target,
            "layer": moment.layer,
            "bytes": moment.total_bytes,
            **{f"{category.replace('-', '_')}_bytes": size for category, size in parts.items()},
        }
        events.append(_complete(moment.op, moment.phase, start, end, known))
        events.append(_counter("bytes in use by category", start, parts))
        events.append(_counter("bytes in use", start, {"bytes": moment.total_bytes}))
    if timeline.budget_bytes:
        events.append(_counter("budget", ends[-1], {"bytes": timeline.budget_bytes}))
    events += _transfers(timeline)
    return sorted(events, key=lambda event: event["ts"])


def _transfers(timeline: Timeline) -> list[dict[str, Any]]:
    """The copies, one direction of the link after the other."""
    events = []
    for way in WAYS:
        transfers = sorted((t for t in timeline.transfers if t.way == way), key=lambda t: t.start_seconds)
        spans = _spans([(transfer.start_seconds, transfer.seconds) for transfer in transfers])
        for transfer, (start, end) in zip(transfers, spans, strict=True):
            known: dict[str, Any] = {"storage": transfer.storage, "layer": transfer.layer, "bytes": transfer.nbytes}
            if end > start:
                known["bytes_per_second"] = round(1e9 * transfer.nbytes / (end - start))
            events.append(_complete(transfer.storage, way, start, end, known))
    return events


def _spans(times: list[tuple[float, float]]) -> list[tuple[int, int]]:
    """Starts and ends in whole nanoseconds, so that neighbours on a track touch and never overlap by a rounding."""
    starts = [round(1e9 * start) for start, _ in times]
    ends = [max(start, round(1e9 * (begun + seconds))) for start, (begun, seconds) in zip(starts, times, strict=True)]
    following = [*starts[1:], *ends[-1:]]
    return [(start, min(end, then)) for start, end, then in zip(starts, ends, following, strict=True)]


def _complete(name: str, track: str, start: int, end: int, known: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": track,
        "pid": _PROCESS,
        "tid": _TRACKS[track],
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": known,
    }


def _names(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "ts": 0, "args": {"name": name}}


def _counter(name: str, nanoseconds: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": nanoseconds / 1000, "args": values}
