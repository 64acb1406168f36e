"""Bars stand beside their names, each as long as its number, and what has none is named."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from bench.bars_svg import Bar, bars_svg


def widths(svg: str) -> list[float]:
    return [float(found) for found in re.findall(r'<rect class="\w+"[^>]* width="([\d.]+)"', svg)]


def test_bars_are_as_long_as_their_numbers() -> None:
    svg = bars_svg("Times", "ms", [Bar("a<b", 2.0, "2 ms"), Bar("c", 4.0, "4 ms"), Bar("d", None, "refused")])
    ElementTree.fromstring(svg)
    first, second = widths(svg)
    assert abs(second - 2 * first) < 0.2
    assert "a&lt;b" in svg and "refused" in svg


def test_what_passes_the_mark_has_another_colour() -> None:
    svg = bars_svg("Peaks", "%", [Bar("in", 99.0, "99 %"), Bar("over", 101.0, "101 %")], 100.0, "the budget")
    assert svg.count('<rect class="whole"') == 1 and svg.count('<rect class="patches"') == 1 and "the budget" in svg


def test_numbers_below_zero_end_where_others_begin() -> None:
    svg = bars_svg("Added", "%", [Bar("less", -5.0, "-5 %"), Bar("more", 5.0, "+5 %")])
    (x1, w1), (x2, _) = re.findall(r'<rect class="whole" x="([\d.]+)"[^>]* width="([\d.]+)"', svg)
    assert abs(float(x1) + float(w1) - float(x2)) < 0.2
