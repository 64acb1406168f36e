"""Images per second against batch: rows of text, a table for a terminal, one self-contained HTML file, an SVG image."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from shoal.core.added_time import milliseconds
from shoal.core.columns import grid
from shoal.core.frontier import BatchFrontierData, BatchPoint
from shoal.core.sizes import format_bytes
from shoal.report.page import page
from shoal.report.svg import BOTTOM, HEIGHT, LEFT, NARROWEST, RIGHT, TOP, WIDTH, Axis, Chart, kind_of
from shoal.report.words import Tile, format_percent, format_seconds

COLUMNS = (
    "batch", "images/s", "of best %", "step ms", "bound images/s", "plain images/s", "predicted peak", "kept %",
    "recomputed %", "offloaded %", "encoded %", "computed",
)  # fmt: skip


def rows(frontier: BatchFrontierData) -> list[tuple[str, ...]]:
    """A row for each batch, also for those that have no plan; `COLUMNS` heads them."""
    planned = [(point.batch, row(frontier, point)) for point in frontier.points]
    unfit = [(batch, (str(batch), *"-" * (len(COLUMNS) - 2), reason)) for batch, reason in shown_unfit(frontier)]
    return [cells for _, cells in sorted(planned + unfit)]


def shown_unfit(frontier: BatchFrontierData) -> list[tuple[int, str]]:
    """Batches without a plan, and why: those between others, and above all of those the smallest."""
    end = frontier.largest.batch if frontier.too_many is None else frontier.too_many
    return [(batch, reason) for batch, reason in frontier.unfit if batch <= end]


def table(frontier: BatchFrontierData) -> Table:
    """The batches, for `rich.print`; the best is bold."""
    best = row(frontier, frontier.best)
    return grid(title(frontier), COLUMNS, rows(frontier), left=COLUMNS[-1:], marked=best)


def title(frontier: BatchFrontierData) -> str:
    """What is shown, in one line."""
    best, largest = frontier.best, frontier.largest
    return (
        f"{frontier.model}, times for {frontier.hardware}, inside {format_bytes(frontier.budget_bytes)}; "
        f"best: {described(best)}; largest: {largest.batch}"
    )


def described(point: BatchPoint) -> str:
    """A batch and its rate, in words."""
    return f"{point.batch} images, {rate(point.images_per_second)} images/s"


def rate(images_per_second: float) -> str:
    """A rate with at least three digits.

    >>> rate(12.345), rate(1234.5), rate(0.5)
    ('12.3', '1234', '0.500')
    """
    digits = 0 if images_per_second >= 1000 else 1 if images_per_second >= 10 else 3
    return f"{images_per_second:.{digits}f}"


def row(frontier: BatchFrontierData, point: BatchPoint) -> tuple[str, ...]:
    """A batch under `COLUMNS`."""
    plain = point.plain_images_per_second
    shares = (point.share(storages) for storages in (point.kept, point.recomputed, point.offloaded, point.encoded))
    return (
        str(point.batch),
        rate(point.images_per_second),
        f"{100 * point.images_per_second / frontier.best.images_per_second:.1f}",
        milliseconds(point.seconds),
        rate(point.bound_images_per_second),
        "-" if plain is None else rate(plain),
        format_bytes(point.predicted_peak_bytes),
        *(f"{100 * share:.1f}" if share else "-" for share in shares),
        str(point.variant),
    )


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


def render_svg(frontier: BatchFrontierData) -> str:
    """The image as text. Points are drawn where they are, with straight lines in between."""
    points, best = frontier.points, frontier.best
    most = frontier.too_many or points[-1].batch
    x = Axis(min(1, points[0].batch), most, LEFT, WIDTH - RIGHT, (("images", 1),))
    fastest = max(point.bound_images_per_second for point in points)
    slowest = min(NARROWEST * fastest, *(p.plain_images_per_second or p.images_per_second for p in points))
    slowest = min(slowest, *(point.images_per_second for point in points))
    y = Axis(slowest, fastest, HEIGHT - BOTTOM, TOP, (("images/s", 1.0),))

    chart = Chart(
        f"{frontier.model}: images per second inside {format_bytes(frontier.budget_bytes)}",
        f"times for {frontier.hardware}; best: {described(best)}",
        described=title(frontier),
    )
    chart.variants(point.variant for point in points)
    chart.key("bound", "upper bound")
    chart.axes(x, y, "images in a step", "images/s")
    bound = [(point.batch, point.bound_images_per_second) for point in points]
    plain = [(point.batch, rate) for point in points if (rate := point.plain_images_per_second) is not None]
    chart.area(bound, TOP)
    chart.line("bound", bound)
    chart.line("bound", plain)
    chart.line("steps", [(point.batch, point.images_per_second) for point in points])
    if frontier.too_many is not None:
        chart.budget(frontier.too_many, f"{frontier.too_many} images do not fit")
    if plain:
        chart.point("plain", *plain[-1], f"plain PyTorch: {plain[-1][0]} images fit")
    for point in points:
        radius = 7.5 if point == best else 5
        about = f"{described(point)}, {point.variant}"
        chart.point(kind_of(point.variant), point.batch, point.images_per_second, about, radius=radius)
    return chart.svg()
