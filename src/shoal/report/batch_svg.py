"""Images per second against batch as an SVG image."""

from __future__ import annotations

from shoal.core.frontier import BatchFrontierData
from shoal.core.sizes import format_bytes
from shoal.report.batch_table import described, title
from shoal.report.svg import BOTTOM, HEIGHT, LEFT, NARROWEST, RIGHT, TOP, WIDTH, Axis, Chart, kind_of


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
    chart.forms(point.variant for point in points)
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
