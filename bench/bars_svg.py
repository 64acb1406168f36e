"""Numbers as horizontal bars beside their names, as an SVG image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.report.svg import WIDTH, Chart

_ROW, _TOP, _BOTTOM = 22, 76, 18
_LETTER = 7.0  # pixels of one, on average
_MOST_NAME = 330


@dataclass(frozen=True)
class Bar:
    """A name, what is drawn beside it, and the words for that; None is drawn as words alone."""

    name: str
    value: float | None
    words: str


def bars_svg(title: str, about: str, bars: Sequence[Bar], mark: float | None = None, marked: str = "") -> str:
    """The image.

    Args:
        title, about: above it.
        bars: from the top to the bottom; values may be negative.
        mark: a value at which a line stands, such as the budget.
        marked: what the line is.
    """
    bars = [Bar(_cut(bar.name), bar.value, bar.words) for bar in bars]
    height = _TOP + _ROW * len(bars) + _BOTTOM
    left = 24 + min(_MOST_NAME, max((_LETTER * len(bar.name) for bar in bars), default=0))
    values = [bar.value for bar in bars if bar.value is not None] + ([] if mark is None else [mark])
    low, high = min([0.0, *values]), max([0.0, *values]) or 1.0
    aside = max(_LETTER * len(bar.words) + 12 for bar in bars) if bars else 0
    start = left + (aside if low < 0 else 0)
    room = WIDTH - aside - start

    def x(value: float) -> float:
        return start + (value - low) / (high - low) * room

    chart, floor = Chart(title, about, height=height, left=24), height - _BOTTOM + 4
    for place, bar in enumerate(bars):
        y = _TOP + _ROW * place
        chart.text(left - 8, y + 12, bar.name, kind="least", anchor="end")
        if bar.value is None:
            chart.text(x(0) + 6, y + 12, bar.words)
            continue
        begin, end = sorted((x(0), x(bar.value)))
        kind = "whole" if mark is None or bar.value <= mark else "patches"
        chart.bar(kind, begin, y, max(end - begin, 1))
        if mark is not None and end <= x(mark) < end + 56:  # the line would strike the words out
            end = x(mark)
        at, anchor = (end + 6, "start") if bar.value >= 0 else (begin - 6, "end")
        chart.text(at, y + 12, bar.words, anchor=anchor)
    chart.path("axis", f"M{x(0):.1f},{_TOP - 6}V{floor}")
    if mark is not None:
        chart.path("budget", f"M{x(mark):.1f},{_TOP - 6}V{floor}")
        chart.text(x(mark), _TOP - 10, marked, kind="budget-name", anchor="end")
    return chart.svg()


def _cut(name: str) -> str:
    """A name that has its place.

    >>> _cut("a" * 60) == "a" * 46 + "\u2026"
    True
    """
    most = int(_MOST_NAME / _LETTER)
    return name if len(name) <= most else name[: most - 1] + "\u2026"
