"""A timeline as a trace in the Chrome trace event format, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.files import write_text
from shoal.report.words import category_bytes
from shoal.timeline import Timeline

_PROCESS = 1
_TRACKS = {"forward": 1, "loss": 2, "recompute": 3, "backward": 4}


def save_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write the step as a trace, whole or not at all.

    Ops are complete events ("X") on one track a phase, in microseconds; the bytes in use are counter events ("C").

    Args:
        timeline: the simulated step.
        path: of the file; an earlier file of that name is replaced.

    Returns:
        The path.

    Raises:
        InputError: the timeline has no moments, or the folder does not exist, is not writable, or the disk is full.

    >>> save_trace(plan.timeline, "step.json")  # doctest: +SKIP
    PosixPath('step.json')
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
    events = [_names("process_name", 0, f"{timeline.model or 'model'}: one training step")]
    for phase, track in _TRACKS.items():
        if any(moment.phase == phase for moment in moments):
            events.append(_names("thread_name", track, phase))
            events.append({**_names("thread_sort_index", track, ""), "args": {"sort_index": track}})
    # In whole nanoseconds, so that neighbours on a track touch and never overlap by a rounding.
    starts = [round(1e9 * moment.start_seconds) for moment in moments]
    ends = [min(round(1e9 * (m.start_seconds + m.seconds)), n) for m, n in zip(moments, starts[1:], strict=False)]
    ends.append(max(starts[-1], round(1e9 * timeline.seconds)))
    if timeline.budget_bytes:
        events.append(_counter("budget", starts[0], {"bytes": timeline.budget_bytes}))
    for moment, start, end in zip(moments, starts, ends, strict=True):
        parts = category_bytes(moment)
        events.append(
            {
                "ph": "X",
                "name": moment.op,
                "cat": moment.phase,
                "pid": _PROCESS,
                "tid": _TRACKS[moment.phase],
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "args": {
                    "op": moment.op,
                    "target": moment.target,
                    "layer": moment.layer,
                    "bytes": moment.total_bytes,
                    **{f"{category}_bytes": size for category, size in parts.items()},
                },
            }
        )
        events.append(_counter("bytes in use by category", start, parts))
        events.append(_counter("bytes in use", start, {"bytes": moment.total_bytes}))
    if timeline.budget_bytes:
        events.append(_counter("budget", ends[-1], {"bytes": timeline.budget_bytes}))
    return events


def _names(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "ts": 0, "args": {"name": name}}


def _counter(name: str, nanoseconds: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _PROCESS, "tid": 0, "ts": nanoseconds / 1000, "args": values}
