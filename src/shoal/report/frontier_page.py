"""A frontier as one self-contained HTML file."""

from __future__ import annotations

from typing import Any

from shoal.core.added_time import added_text
from shoal.core.frontier import FrontierData, FrontierPoint
from shoal.core.sizes import format_bytes
from shoal.report.frontier_table import COLUMNS, row, rows
from shoal.report.page import page
from shoal.report.svg import NARROWEST, kind_of
from shoal.report.words import Tile, format_percent, format_seconds


def render(frontier: FrontierData) -> str:
    """The page as text, with everything that it needs."""
    return page(
        "frontier.html",
        name=f"{frontier.model}, times for {frontier.hardware}",
        headline=_headline(frontier),
        lede=_lede(frontier),
        tiles=_tiles(frontier),
        columns=COLUMNS,
        rows=rows(frontier),
        marked=None if frontier.inside_budget is None else row(frontier, frontier.inside_budget),
        left_out=frontier.left_out,
        means=", ".join(frontier.means) or "none",
        planning=format_seconds(frontier.planning_seconds),
        charts=_charts(frontier),
    )


def _headline(frontier: FrontierData) -> str:
    least = frontier.usable or frontier.points[0]
    share = format_percent(least.predicted_peak_bytes / frontier.plain_peak_bytes)
    return f"From {share} of plain PyTorch's memory at {added_text(least.seconds, frontier.plain_seconds)} time"


def _lede(frontier: FrontierData) -> str:
    text = "The predicted time of a training step inside each budget, and its lower bound."
    point = frontier.inside_budget
    if frontier.budget_bytes is None:
        return text
    if point is None:
        least = format_bytes(frontier.points[0].budget_bytes)
        return f"{text} Your budget of {format_bytes(frontier.budget_bytes)} is too small: {least} is the least."
    return (
        f"{text} Inside your budget of {format_bytes(frontier.budget_bytes)} a step takes "
        f"{format_seconds(point.seconds)}, {added_text(point.seconds, frontier.plain_seconds)} of plain PyTorch's."
    )


def _tiles(frontier: FrontierData) -> list[Tile]:
    def tile(label: str, point: FrontierPoint) -> Tile:
        added = added_text(point.seconds, frontier.plain_seconds)
        return Tile(label, format_seconds(point.seconds), f"{added}, {format_bytes(point.predicted_peak_bytes)}")

    plain = Tile("Plain PyTorch", format_seconds(frontier.plain_seconds), format_bytes(frontier.plain_peak_bytes))
    least, usable = frontier.points[0], frontier.usable
    share = format_percent(least.budget_bytes / frontier.plain_peak_bytes)
    tiles = [
        plain,
        Tile("Minimum feasible budget", format_bytes(least.budget_bytes), f"{share} of plain PyTorch's peak"),
        tile("In that budget", least),
        *([tile("In at most twice the time", usable)] if usable not in (None, least) else []),
        tile("Fastest", min(frontier.points, key=lambda point: (point.seconds, point.budget_bytes))),
    ]
    if frontier.budget_bytes is not None:
        point = frontier.inside_budget
        no_plan = Tile("Your budget", format_bytes(frontier.budget_bytes), "no plan fits", "bad")
        tiles.append(no_plan if point is None else tile("In your budget", point))
    return tiles


def _charts(frontier: FrontierData) -> dict[str, Any]:
    points = frontier.points
    residences = ("kept", "recomputed", "offloaded", "encoded")
    return {
        "budget": [point.budget_bytes for point in points],
        "size": [format_bytes(point.budget_bytes) for point in points],
        "peak": [format_bytes(point.predicted_peak_bytes) for point in points],
        "seconds": [point.seconds for point in points],
        "bound": [point.bound_seconds for point in points],
        "added": [added_text(point.seconds, frontier.plain_seconds) for point in points],
        "variant": [str(point.variant) for point in points],
        "kind": [kind_of(point.variant) for point in points],
        "uses": {name: [getattr(point, name).nbytes for point in points] for name in residences},
        "plain": {"bytes": frontier.plain_peak_bytes, "seconds": frontier.plain_seconds},
        "narrowest": NARROWEST,
        "edge": frontier.budget_bytes,
    }
