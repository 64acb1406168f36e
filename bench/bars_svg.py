"""Numbers as horizontal bars beside their names, as an SVG image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.report.frontier_svg import WIDTH, image

_ROW, _TOP, _BOTTOM = 22, 76, 18
_LETTER = 7.0  # pixels of one, on average
_MOST_NAME, _VALUE_ROOM = 330, 96


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
    room = WIDTH - _VALUE_ROOM - left - (_VALUE_ROOM if low < 0 else 0)
    start = left + (_VALUE_ROOM if low < 0 else 0)

    def x(value: float) -> float:
        return start + (value - low) / (high - low) * room

    parts = [
        f'<text class="title" x="24" y="30">{escape(title)}</text>',
        f'<text x="24" y="50">{escape(about)}</text>',
    ]
    floor = height - _BOTTOM + 4
    for place, bar in enumerate(bars):
        y = _TOP + _ROW * place
        parts.append(f'<text class="least" x="{left - 8:.0f}" y="{y + 12}" text-anchor="end">{escape(bar.name)}</text>')
        if bar.value is None:
            parts.append(f'<text x="{x(0) + 6:.1f}" y="{y + 12}">{escape(bar.words)}</text>')
            continue
        begin, end = sorted((x(0), x(bar.value)))
        kind = "whole" if mark is None or bar.value <= mark else "patches"
        parts.append(
            f'<rect class="{kind}" x="{begin:.1f}" y="{y}" width="{max(end - begin, 1):.1f}" height="15" rx="2"/>'
        )
        near = mark is not None and end <= x(mark) < end + 56  # the line would strike the words out
        end = x(mark) if near and mark is not None else end
        at, anchor = (end + 6, "start") if bar.value >= 0 else (begin - 6, "end")
        parts.append(f'<text x="{at:.1f}" y="{y + 12}" text-anchor="{anchor}">{escape(bar.words)}</text>')
    parts.append(f'<path class="axis" d="M{x(0):.1f},{_TOP - 6}V{floor}"/>')
    if mark is not None:
        parts.append(f'<path class="budget" d="M{x(mark):.1f},{_TOP - 6}V{floor}"/>')
        parts.append(
            f'<text class="budget-name" x="{x(mark):.1f}" y="{_TOP - 10}" text-anchor="end">{escape(marked)}</text>'
        )
    return image(title, parts, height)


def _cut(name: str) -> str:
    """A name that has its place.

    >>> _cut("a" * 60) == "a" * 46 + "\u2026"
    True
    """
    most = int(_MOST_NAME / _LETTER)
    return name if len(name) <= most else name[: most - 1] + "\u2026"
