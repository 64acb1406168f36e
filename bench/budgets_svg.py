"""Time added inside each budget, Shoal beside PyTorch's own means, as an SVG image of one network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from bench.peers import ACTIVATION_MEMORY_BUDGET
from bench.plain import heading
from shoal.report.frontier_svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, diamond, image

_CONTENDERS = {"shoal": ("whole", "Shoal, bitwise"), "exact": ("fused", "Shoal, exact")}
_CONTENDERS |= {
    "checkpoint": ("patches", "checkpointing"),
    "activation_memory_budget": ("peer", ACTIVATION_MEMORY_BUDGET),
}
_MOST = 100.0  # percent of added time that are drawn; what adds more stands at the end of the axis, with its number
_FLOOR = HEIGHT - BOTTOM


def budgets_svg(result: Mapping[str, Any]) -> str:
    """The image of what `bench.budgets` measured of one network."""
    rows = sorted(result["rows"], key=lambda row: -row["share"])
    contenders = [name for name in _CONTENDERS if any(name in row for row in rows)]
    added = [row[name]["added_percent"] for row in rows for name in contenders if name in row and row[name]["met"]]
    low, high = min(-5.0, *added) - 3, min(_MOST, max(15.0, *added)) + 3
    least, most = min(row["share"] for row in rows) - 3, 103.0

    def x(share: float) -> float:
        return LEFT + (share - least) / (most - least) * (WIDTH - RIGHT - LEFT)

    def y(percent: float) -> float:
        return _FLOOR - (min(percent, _MOST) - low) / (high - low) * (_FLOOR - TOP)

    title = f"{result['network']}: time added inside each budget"
    parts = [
        f'<text class="title" x="{LEFT}" y="30">{escape(title)}</text>',
        f'<text x="{LEFT}" y="50">{escape(heading(result).partition(": ")[2])}; measured, CPU</text>',
    ]
    step = next(step for step in (5, 10, 20, 25, 50) if (high - low) / step <= 6)
    for percent in range(int(low // step + 1) * step, int(high) + 1, step):
        parts.append(f'<path class="grid" d="M{LEFT},{y(percent):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent:+d} %</text>')
    for share in range(10 * int(least // 10 + 1), 101, 10):
        parts.append(f'<path class="grid" d="M{x(share):.1f},{TOP}V{_FLOOR}"/>')
        parts.append(f'<text x="{x(share):.1f}" y="{_FLOOR + 18}" text-anchor="middle">{share} %</text>')
    parts.append(f'<path class="axis" d="M{LEFT},{y(0):.1f}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 14}" text-anchor="end">budget, of plain PyTorch\'s peak</text>'
    )
    at, missed = float(LEFT), list[str]()
    for name in contenders:
        kind, words = _CONTENDERS[name]
        parts.append(f'<circle class="{kind}" cx="{at + 6:.0f}" cy="70" r="5.5"/>')
        parts.append(f'<text x="{at + 17:.0f}" y="74">{words}</text>')
        at += 34 + 6.9 * len(words)
        fits = [(row["share"], row[name]) for row in rows if name in row and row[name]["met"]]
        line = " ".join(f"{x(share):.1f},{y(found['added_percent']):.1f}" for share, found in fits)
        parts.append(f'<polyline class="bound" points="{line}"/>')
        for share, found in fits:
            about = f"{words}: {found['added_percent']:+.1f} % inside {share:g} %"
            parts.append(
                f'<circle class="{kind}" cx="{x(share):.1f}" cy="{y(found["added_percent"]):.1f}" r="5.5">'
                f"<title>{escape(about)}</title></circle>"
            )
            if found["added_percent"] > _MOST:
                parts.append(
                    f'<text x="{x(share):.1f}" y="{y(_MOST) - 10:.1f}" text-anchor="middle">'
                    f"{found['added_percent']:+.0f} %</text>"
                )
        lost = [f"{row['share']:g}" for row in rows if name in row and not row[name]["met"]]
        if lost:
            missed.append(f"{words}: none of its settings fits {' or '.join(lost)} %")
    parts.append(diamond(x(100), y(0), "plain PyTorch"))
    parts.append(diamond(at + 6, 70, "plain PyTorch"))
    parts.append(f'<text x="{at + 17:.0f}" y="74">plain PyTorch</text>')
    for line, words in enumerate(missed):
        parts.append(f'<text x="{LEFT}" y="{HEIGHT + 4 + 18 * line}">{escape(words)}</text>')
    return image(title, parts, HEIGHT + 18 * len(missed))
