"""Images per second against batch as one self-contained HTML file."""

from __future__ import annotations

from typing import Any

from shoal.core.frontier import BatchFrontierData, BatchPoint
from shoal.core.sizes import format_bytes
from shoal.report.batch_table import COLUMNS, described, rate, row, rows
from shoal.report.page import page
from shoal.report.svg import NARROWEST, kind_of
from shoal.report.words import Tile, format_percent, format_seconds


def render(frontier: BatchFrontierData) -> str:
    """The page as text, with everything that it needs."""
    return page(
        "batches.html",
        name=f"{frontier.model}, times for {frontier.hardware}",
        headline=f"{described(frontier.best)} inside {format_bytes(frontier.budget_bytes)}",
        lede=_lede(frontier),
        tiles=_tiles(frontier),
        columns=COLUMNS,
        rows=rows(frontier),
        marked=row(frontier, frontier.best),
        means=", ".join(frontier.means) or "none",
        planning=format_seconds(frontier.planning_seconds),
        charts=_charts(frontier),
    )


def _lede(frontier: BatchFrontierData) -> str:
    best, largest, plain = frontier.best, frontier.largest, frontier.plain_best
    text = f"Predicted images per second of training steps inside {format_bytes(frontier.budget_bytes)}."
    if best != largest:
        text += f" {largest.batch} images fit, at {rate(largest.images_per_second)} images/s."
    if plain is None:
        return f"{text} Plain PyTorch fits with none of these batches."
    most = max(point.batch for point in frontier.points if point.plain_images_per_second is not None)
    return f"{text} Of these batches plain PyTorch fits with up to {most} images."


def _tiles(frontier: BatchFrontierData) -> list[Tile]:
    best, largest, plain = frontier.best, frontier.largest, frontier.plain_best
    too_many = frontier.too_many
    tiles = [
        Tile("Best batch", f"{best.batch} images", f"{rate(best.images_per_second)} images/s"),
        Tile(
            "Largest batch",
            f"{largest.batch} images",
            f"{too_many} do not fit" if too_many is not None else "no more were tried",
        ),
        Tile("Images/s in the largest", rate(largest.images_per_second), _of(largest, best)),
    ]
    if plain is not None and plain.plain_images_per_second is not None:
        note = f"with {plain.batch} images, its best of these"
        tiles.append(Tile("Images/s in plain PyTorch", rate(plain.plain_images_per_second), note))
    else:
        tiles.append(Tile("Plain PyTorch", "fits with none", "of these batches", "bad"))
    return [*tiles, Tile("Budget", format_bytes(frontier.budget_bytes))]


def _of(point: BatchPoint, best: BatchPoint) -> str:
    return f"{format_percent(point.images_per_second / best.images_per_second)} of the best"


def _charts(frontier: BatchFrontierData) -> dict[str, Any]:
    points = frontier.points
    residences = ("kept", "recomputed", "offloaded", "encoded")
    return {
        "batch": [point.batch for point in points],
        "rate": [point.images_per_second for point in points],
        "bound": [point.bound_images_per_second for point in points],
        "plain": [point.plain_images_per_second for point in points],
        "peak": [format_bytes(point.predicted_peak_bytes) for point in points],
        "step": [format_seconds(point.seconds) for point in points],
        "variant": [str(point.variant) for point in points],
        "kind": [kind_of(point.variant) for point in points],
        "uses": {name: [100 * point.share(getattr(point, name)) for point in points] for name in residences},
        "best": points.index(frontier.best),
        "edge": frontier.too_many,
        "narrowest": NARROWEST,
    }
