"""The drawing of a split network's patches over its input, in units of the input's elements."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from shoal.transforms.split.patch_map import PatchMap, Span

if TYPE_CHECKING:
    from shoal.report.data import Report

_STRIP_SHARE = 0.2  # height of the drawing of a one-dimensional input, relative to its length


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
