"""The page, the image and the table of images per second by batch: complete, safe against hostile names, in place."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from shoal.errors import InputError
from shoal.report.batches import render, render_svg
from tests.report.made_up_frontier import made_up_batches
from tests.report.test_frontier_drawings import SVG, circles
from tests.report.test_page import HOSTILE, _Page


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_image_has_every_batch_in_its_place_and_form() -> None:
    svg = render_svg(made_up_batches())
    kinds, across, down = zip(*circles(svg), strict=True)
    assert kinds == ("whole", "whole", "whole", "fused", "patches")
    assert (across[2] - across[1]) / (across[4] - across[1]) == pytest.approx(16 / 48, abs=0.01)
    rates = [2 / 0.02, 16 / 0.09, 32 / 0.17, 48 / 0.24, 64 / 0.4]
    place = [(rate - rates[0]) / (rates[3] - rates[0]) for rate in rates]
    assert [(y - down[0]) / (down[3] - down[0]) for y in down] == pytest.approx(place, abs=0.01)
    assert all(0 < x < 800 for x in across) and all(0 < y < 440 for y in down)
    radii = [c.get("r") for c in ElementTree.fromstring(svg).iter(f"{SVG}circle") if len(c)]
    assert radii.index("7.5") == 3 and radii.count("7.5") == 1
    assert "times for p100-nvlink; best: 48 images, 200.0 images/s" in texts(svg) and "65 images do not fit" in texts(
        svg
    )


def test_plain_pytorch_ends_where_it_no_longer_fits() -> None:
    svg = render_svg(made_up_batches())
    titles = [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert "plain PyTorch: 32 images fit" in titles
    frontier = made_up_batches()
    nowhere = replace(frontier, points=tuple(replace(p, plain_peak_bytes=2000) for p in frontier.points))
    assert "images fit" not in render_svg(nowhere)
    assert "Plain PyTorch fits with none of these batches." in _Page(render(nowhere)).words


def test_one_batch_is_an_image_and_a_page_too() -> None:
    frontier = replace(made_up_batches(), points=made_up_batches().points[1:2], unfit=())
    svg = render_svg(frontier)
    assert len(circles(svg)) == 1 and "nan" not in svg and "inf" not in svg
    assert "no more were tried" in _Page(render(frontier)).words


def test_hostile_names_are_text() -> None:
    assert {element.tag for element in ElementTree.fromstring(render_svg(made_up_batches(HOSTILE))).iter()} == {
        f"{SVG}{tag}" for tag in ("svg", "style", "rect", "text", "circle", "title", "path")
    }
    page = _Page(render(made_up_batches(HOSTILE)))
    assert "img" not in page.tags and "49" not in page.words.split()
    assert HOSTILE in made_up_batches(HOSTILE).table().title.replace("\\[", "[")  # type: ignore[union-attr]


def test_the_page_loads_nothing_and_says_every_batch() -> None:
    page = _Page(render(made_up_batches()))
    assert page.addresses == ["data:,"]
    assert "48 images, 200.0 images/s inside 1000 B" in page.words
    assert "64 images fit, at 160.0 images/s. Of these batches plain PyTorch fits with up to 32 images." in page.words
    for words in ("188.2", "batch norm fused (bnff)", "too <few>", "needs 1.000 KiB", "fuse, recompute", "25.0"):
        assert words in page.words
    assert "needs 2.000 KiB" not in page.words  # what is larger still says nothing more
    data = json.loads(next(body for body in page.bodies["script"] if body.startswith("{")))
    assert data["batch"] == [2, 16, 32, 48, 64] and data["best"] == 3 and data["edge"] == 65
    assert data["uses"]["recomputed"] == [0, 0, 0, 25, 25] and data["plain"][3:] == [None, None]


def test_the_table_marks_the_best() -> None:
    console = Console(width=240, force_terminal=True, color_system="standard")
    with console.capture() as shown:
        console.print(made_up_batches().table())
    bold = [line for line in shown.get().splitlines() if re.search(r"\x1b\[1m[^\x1b]*200\.0", line)]
    assert len(bold) == 1


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    frontier = made_up_batches()
    assert frontier.save_html(tmp_path / "a.html").read_text() == render(frontier)
    assert frontier.save_svg(tmp_path / "a.svg").read_text() == render_svg(frontier)
    read = json.loads(frontier.save(tmp_path / "a.json").read_text())
    assert (read["best_batch"], read["largest_batch"], read["too_many"]) == (48, 64, 65)
    assert read["points"][3]["images_per_second"] == pytest.approx(200)
    with pytest.raises(InputError):
        frontier.save_svg(tmp_path / "missing" / "a.svg")
