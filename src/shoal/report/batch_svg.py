"""Images per second against batch as an SVG image, in the style of a frontier's."""

from __future__ import annotations

from html import escape

from shoal.core.frontier import BatchFrontierData
from shoal.core.sizes import format_bytes
from shoal.report.batch_table import described, title
from shoal.report.frontier_svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    NARROWEST,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    diamond,
    form_legend,
    image,
    kind_of,
)

_FLOOR, _END = HEIGHT - BOTTOM, WIDTH - RIGHT


def render_svg(frontier: BatchFrontierData) -> str:
    """The image as text. Points are drawn where they are, with straight lines in between."""
    points, best = frontier.points, frontier.best
    x = Axis(min(1, points[0].batch), frontier.too_many or points[-1].batch, LEFT, _END, (("images", 1),))
    fastest = max(point.bound_images_per_second for point in points)
    slowest = min(NARROWEST * fastest, *(p.plain_images_per_second or p.images_per_second for p in points))
    slowest = min(slowest, *(point.images_per_second for point in points))
    y = Axis(slowest, fastest, _FLOOR, TOP, (("images/s", 1.0),))

    def line(rates: list[tuple[int, float]]) -> str:
        return " ".join(f"{x(batch):.1f},{y(rate):.1f}" for batch, rate in rates)

    bound = line([(point.batch, point.bound_images_per_second) for point in points])
    ends = x(points[-1].batch), x(points[0].batch)
    plain = [(p.batch, rate) for p in points if (rate := p.plain_images_per_second) is not None]
    legend, at = form_legend({kind_of(point.variant) for point in points})
    parts = [
        f'<text class="title" x="{LEFT}" y="30">{escape(frontier.model)}: images per second inside '
        f"{format_bytes(frontier.budget_bytes)}</text>",
        f'<text x="{LEFT}" y="50">{escape(f"times for {frontier.hardware}; best: {described(best)}")}</text>',
        *legend,
        f'<path class="bound" d="M{at:.0f},70h22"/>',
        f'<text x="{at + 29:.0f}" y="74">upper bound</text>',
        *(f'<path class="grid" d="M{x(v):.1f},{TOP}V{_FLOOR}"/>' for v in x.ticks),
        *(f'<path class="grid" d="M{LEFT},{y(v):.1f}H{_END}"/>' for v in y.ticks),
        f'<polygon class="below" points="{bound} {ends[0]:.1f},{TOP} {ends[1]:.1f},{TOP}"/>',
        f'<polyline class="bound" points="{bound}"/>',
        f'<polyline class="bound plain-line" points="{line(plain)}"/>' if len(plain) > 1 else "",
        f'<polyline class="steps" points="{line([(p.batch, p.images_per_second) for p in points])}"/>',
        f'<path class="axis" d="M{LEFT},{_FLOOR}H{_END}"/>',
        *(f'<text x="{x(v):.1f}" y="{_FLOOR + 18}" text-anchor="middle">{x.label(v)}</text>' for v in x.ticks),
        *(f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{y.label(v)}</text>' for v in y.ticks),
        f'<text x="{_END}" y="{HEIGHT - 14}" text-anchor="end">images in a step</text>',
        f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">images/s</text>',
    ]
    if frontier.too_many is not None:
        edge = x(frontier.too_many)
        parts += [
            f'<path class="budget" d="M{edge:.1f},{TOP}V{_FLOOR}"/>',
            f'<text class="budget-name" x="{edge - 6:.1f}" y="{_FLOOR - 10}" text-anchor="end">'
            f"{frontier.too_many} images do not fit</text>",
        ]
    if plain:
        batch, rate = plain[-1]
        parts.append(diamond(x(batch), y(rate), f"plain PyTorch: {batch} images fit"))
    for point in points:
        about = f"{described(point)}, {point.variant}"
        parts.append(
            f'<circle class="{kind_of(point.variant)}" cx="{x(point.batch):.1f}" '
            f'cy="{y(point.images_per_second):.1f}" r="{7.5 if point == best else 5}">'
            f"<title>{escape(about)}</title></circle>"
        )
    return image(title(frontier), filter(None, parts))
