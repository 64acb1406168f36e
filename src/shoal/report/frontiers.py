"""A frontier as rows of text, as a table for a terminal, as one self-contained HTML file and as an SVG image."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from shoal.core.added_time import added_text, milliseconds
from shoal.core.columns import grid
from shoal.core.frontier import FrontierData, FrontierPoint, Storages
from shoal.core.sizes import format_bytes
from shoal.report.page import page
from shoal.report.svg import BOTTOM, HEIGHT, LEFT, NARROWEST, RIGHT, TOP, WIDTH, Axis, Chart, kind_of
from shoal.report.words import Tile, format_percent, format_seconds

COLUMNS = (
    "budget", "of plain %", "predicted peak", "step ms", "added", "bound ms", "kept", "recomputed", "offloaded",
    "encoded", "computed",
)  # fmt: skip
_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
_TIMES = (("\u00b5s", 1e-6), ("ms", 1e-3), ("s", 1.0))
_BEYOND = 1.15  # the chart ends there, as a multiple of plain PyTorch's peak: a budget further on is only named
_TALLEST = 3.0  # the axis of time ends there, as a multiple of plain PyTorch's step: slower points stand at its end


def rows(frontier: FrontierData) -> list[tuple[str, ...]]:
    """A row for each point, by increasing budget; `COLUMNS` heads them."""
    return [row(frontier, point) for point in frontier.points]


def table(frontier: FrontierData) -> Table:
    """The points, for `rich.print`; the fastest inside the user's budget is bold."""
    inside = frontier.inside_budget
    marked = None if inside is None else row(frontier, inside)
    return grid(title(frontier), COLUMNS, rows(frontier), left=COLUMNS[-1:], marked=marked)


def title(frontier: FrontierData) -> str:
    """What is shown, in one line."""
    plain = f"{milliseconds(frontier.plain_seconds)} ms in {format_bytes(frontier.plain_peak_bytes)}"
    return f"{frontier.model}, times for {frontier.hardware}; plain PyTorch: {plain}"


def row(frontier: FrontierData, point: FrontierPoint) -> tuple[str, ...]:
    """A point under `COLUMNS`."""
    return (
        format_bytes(point.budget_bytes),
        f"{100 * point.budget_bytes / frontier.plain_peak_bytes:.1f}",
        format_bytes(point.predicted_peak_bytes),
        milliseconds(point.seconds),
        added_text(point.seconds, frontier.plain_seconds),
        milliseconds(point.bound_seconds),
        *(_described(s) for s in (point.kept, point.recomputed, point.offloaded, point.encoded)),
        str(point.variant),
    )


def _described(storages: Storages) -> str:
    return f"{storages.count}: {format_bytes(storages.nbytes)}" if storages.count else "-"


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


def render_svg(frontier: FrontierData) -> str:
    """The image as text. Points are drawn where they are; between two, the plan of the smaller budget still fits."""
    plain_bytes, plain_seconds = frontier.plain_peak_bytes, frontier.plain_seconds
    points, floor = frontier.points, HEIGHT - BOTTOM
    budget_bytes = frontier.budget_bytes
    drawn_bytes = None if budget_bytes is None or budget_bytes > _BEYOND * plain_bytes else budget_bytes
    most_bytes = max(plain_bytes, points[-1].budget_bytes, drawn_bytes or 0)
    x = Axis(min(points[0].budget_bytes, drawn_bytes or most_bytes), most_bytes, LEFT, WIDTH - RIGHT, _UNITS)
    tallest = _TALLEST * plain_seconds
    slowest = min(tallest, max(plain_seconds, *(point.seconds for point in points)))
    fastest = min(NARROWEST * slowest, *(point.bound_seconds for point in points))
    y = Axis(fastest, slowest, floor, TOP, _TIMES)

    words = title(frontier)
    chart = Chart(f"{frontier.model}: step time inside each budget", words.partition(", ")[2], described=words)
    chart.variants(point.variant for point in points)
    chart.key("bound", "lower bound")
    if budget_bytes is not None and drawn_bytes is None:
        chart.key("budget-name", f"your budget, {format_bytes(budget_bytes)}, is further right")
    chart.axes(x, y, f"budget, {x.unit}", y.unit)
    bound = [(point.budget_bytes, min(point.bound_seconds, slowest)) for point in points]
    chart.area(bound, floor)
    chart.line("bound", bound)
    chart.line("steps", [(point.budget_bytes, min(point.seconds, slowest)) for point in points], stairs=True)
    if drawn_bytes is not None:
        chart.budget(drawn_bytes, f"your budget, {format_bytes(drawn_bytes)}")
    for point in points:
        about = (
            f"{format_bytes(point.budget_bytes)}, {added_text(point.seconds, frontier.plain_seconds)}, {point.variant}"
        )
        chart.point(kind_of(point.variant), point.budget_bytes, min(point.seconds, slowest), about)
    chart.point("plain", plain_bytes, plain_seconds, "plain PyTorch")
    least = points[0]
    share = f"{100 * least.budget_bytes / plain_bytes:.0f} % of the bytes"
    beyond = " (further up)" if least.seconds > tallest else ""
    chart.text(
        x(least.budget_bytes) + 10,
        y(min(least.seconds, slowest)) - 9,
        f"{share}, {added_text(least.seconds, frontier.plain_seconds)} time{beyond}",
        kind="least",
    )
    return chart.svg()
