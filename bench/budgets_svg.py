"""Time added inside each budget, Shoal beside PyTorch's own means, as an SVG image of one network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.peers import ACTIVATION_MEMORY_BUDGET
from bench.plain import heading
from shoal.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Chart

_CONTENDERS = {"shoal": ("whole", "Shoal, bitwise"), "exact": ("fused", "Shoal, exact")}
_CONTENDERS |= {
    "checkpoint": ("patches", "checkpointing"),
    "activation_memory_budget": ("peer", ACTIVATION_MEMORY_BUDGET),
}
_MOST = 100.0  # percent of added time that are drawn; what adds more stands at the end of the axis, with its number


def budgets_svg(result: Mapping[str, Any]) -> str:
    """The image of what `bench.budgets` measured of one network."""
    rows = sorted(result["rows"], key=lambda row: -row["share"])
    found = {
        name: [(row["share"], row[name]["added_percent"]) for row in rows if name in row and row[name]["met"]]
        for name in _CONTENDERS
    }
    missed = [
        f"{words}: none of its settings fits {' or '.join(lost)} %"
        for name, (_, words) in _CONTENDERS.items()
        if (lost := [f"{row['share']:g}" for row in rows if name in row and not row[name]["met"]])
    ]
    added = [percent for points in found.values() for _, percent in points]
    title = f"{result['network']}: time added inside each budget"
    about = f"{heading(result).partition(': ')[2]}; measured, CPU"
    chart = Chart(title, about, height=HEIGHT + 18 * len(missed))
    for name, (kind, words) in _CONTENDERS.items():
        if any(name in row for row in rows):
            chart.key(kind, words)
    chart.key("plain", "plain PyTorch")
    chart.axes(
        Axis(min(row["share"] for row in rows), 100.0, LEFT, WIDTH - RIGHT, (("%", 1.0),), "{:.0f} %"),
        Axis(min(-5.0, *added), min(_MOST, max(15.0, *added)), HEIGHT - BOTTOM, TOP, (("%", 1.0),), "{:+.0f} %"),
        "budget, of plain PyTorch's peak",
        "",
        crossing=0.0,
    )
    for name, (kind, words) in _CONTENDERS.items():
        chart.line("bound", [(share, min(percent, _MOST)) for share, percent in found[name]])
        for share, percent in found[name]:
            chart.point(kind, share, min(percent, _MOST), f"{words}: {percent:+.1f} % inside {share:g} %")
            if percent > _MOST:
                chart.text(chart.x(share), chart.y(_MOST) - 10, f"{percent:+.0f} %", anchor="middle")
    chart.point("plain", 100.0, 0.0, "plain PyTorch")
    for line, words in enumerate(missed):
        chart.text(LEFT, HEIGHT + 4 + 18 * line, words)
    return chart.svg()
