"""The page, the image and the table of a frontier: complete, safe against hostile names, and drawn where values are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from shoal.errors import InputError
from shoal.report.frontiers import render, render_svg
from tests.report.made_up_frontier import made_up_frontier
from tests.report.test_page import HOSTILE, _Page

SVG = "{http://www.w3.org/2000/svg}"


def circles(svg: str) -> list[tuple[str, float, float]]:
    """Class and place of what stands for a point; those of the legend have no title."""
    found = [c for c in ElementTree.fromstring(svg).iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    return [(c.get("class", ""), float(c.get("cx", "")), float(c.get("cy", ""))) for c in found]


def test_the_image_has_every_point_in_its_place_and_form() -> None:
    kinds, across, down = zip(*circles(render_svg(made_up_frontier())), strict=True)
    assert kinds == ("whole", "patches", "whole", "fused")
    gaps = [b - a for a, b in pairwise(across)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=0.2) and gaps[0] > 0  # evenly spaced budgets
    assert (down[1] - down[0]) / (down[3] - down[0]) == pytest.approx(2.5 / 6, abs=0.01)  # of 15, 12.5 and 9 ms
    assert all(0 < x < 800 for x in across) and all(0 < y < 440 for y in down)


@pytest.mark.parametrize(
    ("budget_bytes", "words", "lines"),
    [(700, "your budget, 700 B", 1), (100_000, "your budget, 97.66 KiB, is further right", 0), (None, "", 0)],
)
def test_the_budget_is_a_line_in_the_image_or_is_named(budget_bytes: int | None, words: str, lines: int) -> None:
    svg = render_svg(replace(made_up_frontier(), budget_bytes=budget_bytes))
    root = ElementTree.fromstring(svg)
    assert sum(path.get("class") == "budget" for path in root.iter(f"{SVG}path")) == lines
    assert [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "budget-name"] == [words][
        : bool(words)
    ]


def test_a_point_of_many_times_the_plain_step_does_not_flatten_the_others() -> None:
    frontier = made_up_frontier()
    slow = replace(frontier.points[0], seconds=35 * frontier.plain_seconds)
    svg = render_svg(replace(frontier, points=(slow, *frontier.points[1:])))
    down = [place[2] for place in circles(svg)]
    assert down[0] < down[1] < down[2] < down[3] and down[3] - down[1] > 30  # 12.5 and 9 ms of a plain step of 10
    assert "+3400.0 % time (further up)" in svg


def test_one_point_is_an_image_too() -> None:
    frontier = made_up_frontier()
    svg = render_svg(replace(frontier, points=frontier.points[-1:], budget_bytes=None))
    assert len(circles(svg)) == 1 and "nan" not in svg and "inf" not in svg


def test_hostile_names_are_text() -> None:
    svg = render_svg(made_up_frontier(HOSTILE))
    assert {element.tag for element in ElementTree.fromstring(svg).iter()} == {
        f"{SVG}{tag}" for tag in ("svg", "style", "rect", "text", "circle", "title", "path")
    }
    page = _Page(render(made_up_frontier(HOSTILE)))
    assert "img" not in page.tags and "49" not in page.words.split()
    assert HOSTILE in made_up_frontier(HOSTILE).table().title.replace("\\[", "[")  # type: ignore[union-attr]


def test_the_page_loads_nothing_and_says_every_point() -> None:
    page = _Page(render(made_up_frontier()))
    assert page.addresses == ["data:,"]
    assert "From 39 % of plain PyTorch's memory at +50.0 % time" in page.words
    assert "Inside your budget of 700 B a step takes 12.5 ms, +25.0 % of plain PyTorch's." in page.words
    for words in ("400 B", "batch norm fused (bnff)", "too <small>", "fuse, recompute", "Minimum feasible budget"):
        assert words in page.words
    data = json.loads(next(body for body in page.bodies["script"] if body.startswith("{")))
    assert data["budget"] == [400, 600, 800, 1000] and data["kind"] == ["whole", "patches", "whole", "fused"]
    assert data["uses"]["recomputed"] == [300, 150, 150, 0] and data["edge"] == 700


def test_a_budget_that_nothing_fits_is_told() -> None:
    page = _Page(render(replace(made_up_frontier(), budget_bytes=300)))
    assert "Your budget of 300 B is too small: 400 B is the least." in page.words and "no plan fits" in page.words


def test_the_table_marks_where_the_user_stands() -> None:
    console = Console(width=240, force_terminal=True, color_system="standard")
    with console.capture() as shown:
        console.print(made_up_frontier().table())
    bold = [line for line in shown.get().splitlines() if re.search(r"\x1b\[1m[^\x1b]*600 B", line)]
    assert len(bold) == 1


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    frontier = made_up_frontier()
    assert frontier.save_html(tmp_path / "a.html").read_text() == render(frontier)
    assert frontier.save_svg(tmp_path / "a.svg").read_text() == render_svg(frontier)
    with pytest.raises(InputError):
        frontier.save_svg(tmp_path / "missing" / "a.svg")
