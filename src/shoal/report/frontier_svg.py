"""A frontier as an SVG image."""

from __future__ import annotations

from shoal.core.added_time import added_text
from shoal.core.frontier import FrontierData
from shoal.core.sizes import format_bytes
from shoal.report.frontier_table import title
from shoal.report.svg import BOTTOM, HEIGHT, LEFT, NARROWEST, RIGHT, TOP, WIDTH, Axis, Chart, kind_of

_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
_TIMES = (("\u00b5s", 1e-6), ("ms", 1e-3), ("s", 1.0))
_BEYOND = 1.15  # the chart ends there, as a multiple of plain PyTorch's peak: a budget further on is only named
_TALLEST = 3.0  # the axis of time ends there, as a multiple of plain PyTorch's step: slower points stand at its end


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
    chart.forms(point.variant for point in points)
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
