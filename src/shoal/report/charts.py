"""What the page draws: its charts as plain JSON columns, which `templates/report.js` draws with plotly.js, and the
patches of a split network over its input, in units of the input's elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from shoal.core.sizes import format_bytes
from shoal.core.timeline import WAITS, Timeline
from shoal.report.link_use import WAYS, link_use
from shoal.report.words import categories, category_bytes, format_percent
from shoal.transforms.split.patch_map import PatchMap, Span

if TYPE_CHECKING:
    from shoal.report.data import Report

MOST_POINTS = 2000  # of the loss curve: more than a screen is wide
_STRIP_SHARE = 0.2  # height of the drawing of a one-dimensional input, relative to its length


def chart_data(report: Report) -> dict[str, Any]:
    """Every chart's data. Bytes are ints, times are seconds, a loss that is not finite is None."""
    return {
        "memory": _memory(report.timeline),
        "plain": _plain(report),
        "link": _link(report.timeline),
        "losses": _losses(report.losses),
        "accuracies": [_finite(accuracy) for accuracy in report.accuracies],
    }


def _memory(timeline: Timeline) -> dict[str, Any]:
    """The step by columns, one entry a moment; texts are places in `texts`, so that each is written once."""
    places: dict[str, int] = {}

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    moments = timeline.moments
    parts = [category_bytes(moment) for moment in moments]
    columns = {
        "op": [place(moment.op) for moment in moments],
        "target": [place(moment.target) for moment in moments],
        "layer": [place(moment.layer) for moment in moments],
        "phase": [place(moment.phase) for moment in moments],
    }
    return {
        "texts": list(places),
        **columns,
        "start": [round(moment.start_seconds, 9) for moment in moments],
        "seconds": [round(moment.seconds, 9) for moment in moments],
        "bytes": {category: [part[category] for part in parts] for category in categories(timeline)},
        "end": round(timeline.seconds, 9),
        "peak": moments.index(timeline.peak),
        "budget": timeline.budget_bytes,
    }


def _plain(report: Report) -> dict[str, Any] | None:
    """The curve with everything kept, plain PyTorch's where the step is computed as it is written; `at` is where its
    first, second, ... op stands among the moments of the timeline.

    The plan may run the same ops in another order.
    """
    if report.plan is None:
        return None
    moments = [moment for moment in report.plan.plain_timeline.moments if moment.phase not in WAITS]
    at = [i for i, moment in enumerate(report.timeline.moments) if moment.phase not in WAITS | {"recompute"}]
    if sorted(report.timeline.moments[i].op for i in at) != sorted(moment.op for moment in moments):
        return None  # the timeline is of another step than the plan
    as_written = report.plan.plain_peak_bytes == report.plan.plain_timeline.peak_bytes
    return {
        "name": "plain PyTorch" if as_written else "everything kept",
        "start": [round(moment.start_seconds, 9) for moment in moments],
        "end": round(report.plan.plain_timeline.seconds, 9),
        "bytes": [moment.total_bytes for moment in moments],
        "at": at,
    }


def _link(timeline: Timeline) -> list[dict[str, Any]] | None:
    """Each direction of the link by columns, one entry a transfer, with a summary."""
    if not timeline.transfers:
        return None
    lanes = []
    for way in WAYS:
        use = link_use(timeline, way)
        transfers = sorted((t for t in timeline.transfers if t.way == way), key=lambda t: t.start_seconds)
        lanes.append(
            {
                "way": way,
                "summary": f"{format_bytes(use.nbytes)}, busy {format_percent(use.busy_share)} of the step",
                "storage": [transfer.storage for transfer in transfers],
                "layer": [transfer.layer for transfer in transfers],
                "bytes": [transfer.nbytes for transfer in transfers],
                "start": [round(transfer.start_seconds, 9) for transfer in transfers],
                "seconds": [round(transfer.seconds, 9) for transfer in transfers],
            }
        )
    return lanes


def _losses(losses: tuple[float, ...]) -> dict[str, Any]:
    """The loss by training step, counted from 1; long curves as means of equally many steps."""
    size = math.ceil(len(losses) / MOST_POINTS) or 1
    groups = [losses[i : i + size] for i in range(0, len(losses), size)]
    return {
        "step": [i * size + len(group) for i, group in enumerate(groups)],
        "loss": [_finite(sum(group) / len(group)) for group in groups],
        "steps_per_point": size,
    }


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


@dataclass(frozen=True)
class Box:
    """A rectangle and its tooltip."""

    x: float
    y: float
    width: float
    height: float
    tooltip: str = ""


@dataclass(frozen=True)
class PatchDrawing:
    """A drawing of `width` x `height` elements of the input.

    Attributes:
        patches: the cores, which tile the input.
        halos: the regions that patches read, if larger than their cores.
        bands: the ranges of random cuts.
        image: URL of a picture for the background; empty for none.
        caption: a description.
    """

    width: float
    height: float
    patches: tuple[Box, ...]
    halos: tuple[Box, ...]
    bands: tuple[Box, ...]
    image: str
    caption: str


def patch_drawing(report: Report) -> PatchDrawing | None:
    """The drawing; None if nothing is split. Of three dimensions the last two are drawn."""
    patches = report.patches
    if patches is None:
        return None
    width = float(patches.sizes[-1])
    height = float(patches.sizes[-2]) if len(patches.sizes) > 1 else _STRIP_SHARE * width
    bands = []
    if patches.drawn:
        bands += [Box(begin, 0, end - begin, height) for begin, end in patches.drawn[-1]]
        if len(patches.sizes) > 1:
            bands += [Box(0, begin, width, end - begin) for begin, end in patches.drawn[-2]]
    overlaps = patches.overlap_share > 0
    return PatchDrawing(
        width,
        height,
        _boxes(patches.cores, height, "patch"),
        _boxes(patches.reads, height, "reads") if overlaps else (),
        tuple(bands),
        report.image,
        _caption(patches),
    )


def _boxes(spans: tuple[tuple[Span, ...], ...], height: float, name: str) -> tuple[Box, ...]:
    rows: tuple[tuple[float, float], ...] = spans[-2] if len(spans) > 1 else ((0, height),)
    found = []
    for number, ((top, bottom), (left, right)) in enumerate(product(rows, spans[-1]), 1):
        places = f"rows {top} to {bottom}, columns {left} to {right}" if len(spans) > 1 else f"{left} to {right}"
        found.append(Box(left, top, right - left, bottom - top, f"{name} {number}: {places}"))
    return tuple(found)


def _caption(patches: PatchMap) -> str:
    times = " × ".join(str(len(spans)) for spans in patches.cores)
    sizes, joined = (" × ".join(map(str, some)) for some in (patches.sizes, patches.joined_sizes))
    text = f"{times} patches of an input of {sizes}, joined after {patches.joined_behind} at {joined}."
    if len(patches.sizes) == 3:
        cuts = ", ".join(str(end) for _, end in patches.cores[0][:-1]) or "nowhere"
        text += f" The last two dimensions are drawn; the first is cut at {cuts}."
    if patches.drawn:
        text += " Cuts are random in every step, within the bands; the lines are the even cuts."
    if patches.overlap_share > 0:
        read = f"{1 + patches.overlap_share:.2f} times the input"
        text += f" Patches overlap, as the dashed boxes show: together they read {read}."
    return text
