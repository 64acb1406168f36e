"""A frontier as an SVG image, written by hand: it needs no browser, no script and no fonts of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from html import escape

from shoal.core.frontier import FrontierData
from shoal.core.sizes import format_bytes
from shoal.core.variant import Variant
from shoal.report.frontier_table import described_added, title

WIDTH, HEIGHT = 800, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 28, 96, 56
_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))
_TIMES = (("\u00b5s", 1e-6), ("ms", 1e-3), ("s", 1.0))
_BEYOND = 1.15  # the chart ends there, as a multiple of plain PyTorch's peak: a budget further on is only named
_TALLEST = 3.0  # the axis of time ends there, as a multiple of plain PyTorch's step: slower points stand at its end
NARROWEST = 0.8  # the axis of time begins there at the latest, as a share of its end: small differences stay small
STYLE = """
:root { --card: #ffffff; --text: #16202b; --soft: #566472; --rule: #dfe5ea; --kept: #2b82bd; --fused: #00735c;
  --patches: #c98200; --budget: #c24a00; --bound: #8a96a3;
  --peer: #8456b0; }
@media (prefers-color-scheme: dark) { :root { --card: #172029; --text: #e7edf2; --soft: #9cabb9; --rule: #2a3641;
  --kept: #3d95d2; --fused: #3fcfa6; --patches: #eba31a; --budget: #ff8a3d; --bound: #6d7985;
  --peer: #b794e6; } }
text { font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--soft); }
.least { fill: var(--text); }
.title { font-size: 16px; font-weight: 600; fill: var(--text); }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.steps { fill: none; stroke: var(--text); stroke-width: 1.6; }
.bound { fill: none; stroke: var(--bound); stroke-width: 1.4; stroke-dasharray: 2 3; }
.below { fill: var(--bound); fill-opacity: 0.14; }
.budget { stroke: var(--budget); stroke-width: 1.6; stroke-dasharray: 6 4; } .budget-name { fill: var(--budget); }
.whole { fill: var(--kept); } .fused { fill: var(--fused); } .patches { fill: var(--patches); }
.peer { fill: var(--peer); }
circle { stroke: var(--card); stroke-width: 1.5; } .plain { fill: var(--text); stroke: var(--card); }
""".strip()
_KINDS = {"whole": "as it is", "fused": "batch norm fused", "patches": "on patches or slices"}


def kind_of(variant: Variant) -> str:
    """The class that a form has in drawings."""
    return "fused" if variant.fuse else "patches" if variant.depth else "whole"


def render_svg(frontier: FrontierData) -> str:
    """The image as text. Points are drawn where they are; between two, the plan of the smaller budget still fits."""
    plain_bytes, plain_seconds = frontier.plain_peak_bytes, frontier.plain_seconds
    points = frontier.points
    told_bytes = frontier.budget_bytes if _is_drawn(frontier) else None
    most_bytes = max(plain_bytes, points[-1].budget_bytes, told_bytes or 0)
    least_bytes = min(points[0].budget_bytes, told_bytes or most_bytes)
    x = Axis(least_bytes, most_bytes, LEFT, WIDTH - RIGHT, _UNITS)
    tallest = _TALLEST * plain_seconds
    slowest = min(tallest, max(plain_seconds, *(point.seconds for point in points)))
    fastest = min(NARROWEST * slowest, *(point.bound_seconds for point in points))
    within = Axis(fastest, slowest, HEIGHT - BOTTOM, TOP, _TIMES)

    def y(seconds: float) -> float:
        return within(min(seconds, slowest))

    floor = HEIGHT - BOTTOM

    bound = " ".join(f"{x(point.budget_bytes):.1f},{y(point.bound_seconds):.1f}" for point in points)
    ends = x(points[-1].budget_bytes), x(points[0].budget_bytes)
    steps = f"M{x(points[0].budget_bytes):.1f},{y(points[0].seconds):.1f}"
    for point in points[1:]:
        steps += f"H{x(point.budget_bytes):.1f}V{y(point.seconds):.1f}"
    parts = [
        f'<text class="title" x="{LEFT}" y="30">{escape(frontier.model)}: step time inside each budget</text>',
        f'<text x="{LEFT}" y="50">{escape(title(frontier).partition(", ")[2])}</text>',
        *_legend(frontier),
        *(f'<path class="grid" d="M{x(v):.1f},{TOP}V{floor}"/>' for v in x.ticks),
        *(f'<path class="grid" d="M{LEFT},{y(v):.1f}H{WIDTH - RIGHT}"/>' for v in within.ticks),
        f'<polygon class="below" points="{bound} {ends[0]:.1f},{floor} {ends[1]:.1f},{floor}"/>',
        f'<polyline class="bound" points="{bound}"/>',
        f'<path class="steps" d="{steps}"/>',
        f'<path class="axis" d="M{LEFT},{floor}H{WIDTH - RIGHT}"/>',
        *(f'<text x="{x(v):.1f}" y="{floor + 18}" text-anchor="middle">{x.label(v)}</text>' for v in x.ticks),
        *(f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{within.label(v)}</text>' for v in within.ticks),
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 14}" text-anchor="end">budget, {x.unit}</text>',
        f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="end">{within.unit}</text>',
    ]
    if told_bytes is not None:
        at = x(told_bytes)
        side, anchor = (-6, "end") if at > WIDTH / 2 else (6, "start")
        parts += [
            f'<path class="budget" d="M{at:.1f},{TOP}V{floor}"/>',
            f'<text class="budget-name" x="{at + side:.1f}" y="{floor - 10}" text-anchor="{anchor}">'
            f"your budget, {format_bytes(told_bytes)}</text>",
        ]
    for point in points:
        about = f"{format_bytes(point.budget_bytes)}, {described_added(frontier.added_share(point))}, {point.variant}"
        parts.append(
            f'<circle class="{kind_of(point.variant)}" cx="{x(point.budget_bytes):.1f}" cy="{y(point.seconds):.1f}" '
            f'r="5.5"><title>{escape(about)}</title></circle>'
        )
    parts.append(diamond(x(plain_bytes), y(plain_seconds), "plain PyTorch"))
    least = points[0]
    share = (
        f"{100 * least.budget_bytes / plain_bytes:.0f} % of the bytes, {described_added(frontier.added_share(least))}"
    )
    beyond = " (further up)" if least.seconds > tallest else ""
    parts.append(
        f'<text class="least" x="{x(least.budget_bytes) + 10:.1f}" y="{y(least.seconds) - 9:.1f}">'
        f"{share} time{beyond}</text>"
    )
    return image(title(frontier), parts)


def image(words: str, parts: Iterable[str], height: int = HEIGHT) -> str:
    """An image, `WIDTH` pixels wide, as text; `words` are for who does not see it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(words)}">'
    )
    card = f'<rect width="{WIDTH}" height="{height}" rx="12" style="fill: var(--card)"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", card, *parts, "</svg>"]) + "\n"


def _is_drawn(frontier: FrontierData) -> bool:
    return frontier.budget_bytes is not None and frontier.budget_bytes <= _BEYOND * frontier.plain_peak_bytes


def _legend(frontier: FrontierData) -> list[str]:
    parts, at = form_legend({kind_of(point.variant) for point in frontier.points})
    parts.append(f'<path class="bound" d="M{at:.0f},70h22"/>')
    parts.append(f'<text x="{at + 29:.0f}" y="74">lower bound</text>')
    if frontier.budget_bytes is not None and not _is_drawn(frontier):
        at += 44 + 6.6 * len("lower bound")
        words = f"your budget, {format_bytes(frontier.budget_bytes)}, is further right"
        parts.append(f'<text class="budget-name" x="{at:.0f}" y="74">{words}</text>')
    return parts


def form_legend(kinds: Collection[str]) -> tuple[list[str], float]:
    """Keys to the forms of a step that are drawn and to plain PyTorch, and where the next key has its place."""
    parts: list[str] = []
    at = float(LEFT)
    for kind, words in _KINDS.items():
        if kind in kinds:
            parts.append(f'<circle class="{kind}" cx="{at + 6:.0f}" cy="70" r="5.5"/>')
            parts.append(f'<text x="{at + 17:.0f}" y="74">{words}</text>')
            at += 32 + 6.6 * len(words)
    parts.append(diamond(at + 6, 70, "plain PyTorch"))
    parts.append(f'<text x="{at + 17:.0f}" y="74">plain PyTorch</text>')
    return parts, at + 32 + 6.6 * len("plain PyTorch")


def diamond(x: float, y: float, words: str) -> str:
    return f'<path class="plain" d="M{x:.1f},{y - 7:.1f}l6,7l-6,7l-6,-7z"><title>{words}</title></path>'


class Axis:
    """From values to pixels, with ticks at round numbers of a fitting unit."""

    def __init__(
        self, least: float, most: float, start: float, end: float, units: tuple[tuple[str, float], ...]
    ) -> None:
        self.unit, size = next((unit for unit in reversed(units) if most >= unit[1]), units[0])
        room = (most - least) or most or 1.0
        low, high = max(0.0, least - 0.08 * room), most + 0.06 * room
        step = _round_step((high - low) / size / 6)
        first = math.ceil(low / size / step)
        n_ticks = math.floor(high / size / step) - first + 1
        self.ticks = [(first + n) * step * size for n in range(n_ticks)]
        digits = max(0, (step * 10 ** -math.floor(math.log10(step)) % 1 > 0.1) - math.floor(math.log10(step) + 1e-9))
        self.label: Callable[[float], str] = lambda value: f"{value / size:.{digits}f}"
        self._place: Callable[[float], float] = lambda value: start + (value - low) / (high - low) * (end - start)

    def __call__(self, value: float) -> float:
        return self._place(value)


def _round_step(step: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `step`.

    >>> _round_step(0.3), _round_step(21), _round_step(7)
    (0.5, 25.0, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))
