"""Charts as SVG images, all by one template: they need no browser, no script and no fonts of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from shoal.core.variant import Variant
from shoal.report.page import text_of

WIDTH, HEIGHT = 800, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 28, 96, 56
NARROWEST = 0.8  # an axis begins there at the latest, as a share of its end: small differences stay small
KINDS = {"whole": "as it is", "fused": "batch norm fused", "patches": "on patches or slices"}
_LETTER = 6.6  # pixels of one in a legend, on average


def kind_of(variant: Variant) -> str:
    """The class that a variant has in drawings."""
    return "fused" if variant.fuse else "patches" if variant.depth else "whole"


class Chart:
    """Shapes in pixels; `x` and `y`, once `axes` has set them, are where values lie.

    Args:
        title, about: above it.
        described: for who does not see it; the title if empty.
        height, left: pixels of the image, and of what stands to the left of its shapes.
    """

    x: Axis
    y: Axis

    def __init__(self, title: str, about: str, *, described: str = "", height: int = HEIGHT, left: int = LEFT) -> None:
        self.height = height
        self._shown = {"title": title, "about": about, "described": described or title, "left": left}
        self._shapes: dict[str, list[tuple[object, ...]]] = {"bars": [], "paths": [], "texts": [], "points": []}
        self._legend_end = float(LEFT)

    def axes(self, x: Axis, y: Axis, x_name: str, y_name: str, *, crossing: float | None = None) -> None:
        """Grid, ticks and names; the axis of x lies at `crossing` of y, or at the bottom."""
        self.x, self.y = x, y
        floor, end = HEIGHT - BOTTOM, WIDTH - RIGHT
        for value in x.ticks:
            self.path("grid", f"M{x(value):.1f},{TOP}V{floor}")
            self.text(x(value), floor + 18, x.label(value), anchor="middle")
        for value in y.ticks:
            self.path("grid", f"M{LEFT},{y(value):.1f}H{end}")
            self.text(LEFT - 8, y(value) + 4, y.label(value), anchor="end")
        self.path("axis", f"M{LEFT},{floor if crossing is None else round(y(crossing), 1)}H{end}")
        self.text(end, HEIGHT - 14, x_name, anchor="end")
        self.text(LEFT - 8, TOP - 12, y_name, anchor="end")

    def path(self, kind: str, d: str) -> None:
        self._shapes["paths"].append((kind, d))

    def line(self, kind: str, values: Iterable[tuple[float, float]], *, stairs: bool = False) -> None:
        """Straight lines from value to value; with `stairs` each reaches as far as the next."""
        step = "H{:.1f}V{:.1f}" if stairs else "L{:.1f},{:.1f}"
        drawn = "".join(step.format(self.x(x), self.y(y)) for x, y in values)
        if drawn:
            self.path(kind, "M" + (drawn[1:].replace("V", ",", 1) if stairs else drawn[1:]))

    def area(self, values: Collection[tuple[float, float]], end: float) -> None:
        """What lies between values and a height of the image, in pixels."""
        edge = "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in values)
        ends = [self.x(x) for x, _ in values]
        self.path("below", f"M{edge}L{ends[-1]:.1f},{end}L{ends[0]:.1f},{end}z")

    def budget(self, value: float, words: str) -> None:
        """A line across, with its name at its foot."""
        at, floor = self.x(value), HEIGHT - BOTTOM
        self.path("budget", f"M{at:.1f},{TOP}V{floor}")
        side, anchor = (-6, "end") if at > WIDTH / 2 else (6, "start")
        self.text(at + side, floor - 10, words, kind="budget-name", anchor=anchor)

    def bar(self, kind: str, x: float, y: float, width: float) -> None:
        self._shapes["bars"].append((kind, round(x, 1), y, round(width, 1)))

    def text(self, x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> None:
        self._shapes["texts"].append((kind, round(x, 1), round(y, 1), anchor, words))

    def point(self, kind: str, x: float, y: float, words: str, *, radius: float = 5.5) -> None:
        """A point at two values, of a variant or of "plain" PyTorch, with words for a pointer that rests on it."""
        self._point(kind, self.x(x), self.y(y), words, radius)

    def _point(self, kind: str, x: float, y: float, words: str, radius: float = 5.5) -> None:
        self._shapes["points"].append((kind, round(x, 1), round(y, 1), radius, words))

    def key(self, kind: str, words: str) -> None:
        """The next one of the legend; a "bound" is a line, "budget-name" has only words."""
        at = self._legend_end
        if kind == "bound":
            self.path("bound", f"M{at:.0f},70h22")
        elif kind != "budget-name":
            self._point(kind, at + 6, 70, "")
        start = at + {"bound": 29, "budget-name": 0}.get(kind, 17)
        self.text(start, 74, words, kind=kind if kind == "budget-name" else "")
        self._legend_end = start + 15 + _LETTER * len(words)

    def variants(self, variants: Iterable[Variant]) -> None:
        """Keys to the variants of these variants, and to plain PyTorch."""
        drawn = {kind_of(variant) for variant in variants}
        for kind in KINDS:
            if kind in drawn:
                self.key(kind, KINDS[kind])
        self.key("plain", "plain PyTorch")

    def svg(self) -> str:
        """The image as text."""
        return text_of("chart.svg", width=WIDTH, height=self.height, **self._shown, **self._shapes) + "\n"


class Axis:
    """From values to pixels, with ticks at round numbers of a fitting unit.

    Args:
        least, most: values that it reaches.
        start, end: pixels.
        units: names and sizes, from the smallest.
        form: of the label of a tick; None: as many digits as the ticks need.
    """

    def __init__(
        self,
        least: float,
        most: float,
        start: float,
        end: float,
        units: tuple[tuple[str, float], ...],
        form: str | None = None,
    ) -> None:
        self.unit, size = next((unit for unit in reversed(units) if most >= unit[1]), units[0])
        room = (most - least) or most or 1.0
        low, high = least - 0.08 * room, most + 0.06 * room
        low = max(0.0, low) if least >= 0 else low
        step = _round_step((high - low) / size / 6)
        first = math.ceil(low / size / step)
        n_ticks = math.floor(high / size / step) - first + 1
        self.ticks = [(first + n) * step * size for n in range(n_ticks)]
        digits = max(0, (step * 10 ** -math.floor(math.log10(step)) % 1 > 0.1) - math.floor(math.log10(step) + 1e-9))
        form = form or f"{{:.{digits}f}}"
        self.label: Callable[[float], str] = lambda value: form.format(value / size)
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
