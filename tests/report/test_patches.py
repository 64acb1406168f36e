"""Patches over the input: boxes where the patches are, bands where cuts are drawn, and words that say so."""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from torch import nn

from shoal.app.data.pixels import picture
from shoal.report import Report, render
from shoal.report.charts import patch_drawing
from shoal.transforms.split.split import split


def with_patches(report: Report, sizes: tuple[int, ...], grid: tuple[int, ...], **options: object) -> Report:
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(grid)]
    layers = [convolution(3, 4, 3, padding=1), convolution(4, 4, 3, padding=1)]
    divided = split(nn.Sequential(*layers), 1.0, grid, **options)  # type: ignore[arg-type]
    return replace(report, patches=divided.patch_map(sizes))


def test_boxes_tile_the_input(report: Report) -> None:
    drawing = patch_drawing(with_patches(report, (30, 40), (3, 2)))
    assert drawing is not None
    assert (drawing.width, drawing.height, len(drawing.patches)) == (40, 30, 6)
    assert sum(box.width * box.height for box in drawing.patches) == 30 * 40
    assert drawing.halos == drawing.bands == ()
    assert drawing.caption.startswith("3 × 2 patches of an input of 30 × 40, joined after 1 at 30 × 40.")
    assert drawing.patches[-1].tooltip == "patch 6: rows 20 to 30, columns 20 to 40"


def test_overlaps_are_drawn_where_there_are_any(report: Report) -> None:
    drawing = patch_drawing(with_patches(report, (20, 20), (2, 2), halo="exact"))
    assert drawing is not None
    assert [(box.x, box.width) for box in drawing.halos[:2]] == [(0, 12), (8, 12)]
    assert "together they read 1.44 times the input" in drawing.caption


def test_bands_lie_where_cuts_are_drawn(report: Report) -> None:
    drawing = patch_drawing(with_patches(report, (20, 20), (2, 2), stochastic=0.2))
    assert drawing is not None
    across, down = drawing.bands
    assert (across.x, across.width, down.y, down.height) == (8, 4, 8, 4)
    assert "Cuts are random in every step" in drawing.caption


@pytest.mark.parametrize(("sizes", "grid"), [((60,), (3,)), ((8, 20, 30), (2, 1, 2))])
def test_one_dimension_and_three_are_drawn_flat(report: Report, sizes: tuple[int, ...], grid: tuple[int, ...]) -> None:
    drawing = patch_drawing(with_patches(report, sizes, grid, stochastic=0.1))
    assert drawing is not None
    assert drawing.width == sizes[-1]
    assert ("the first is cut at 4" in drawing.caption) == (len(sizes) == 3)
    assert "<svg" in render(with_patches(report, sizes, grid))


def test_the_page_shows_patches_only_where_there_are_any(report: Report) -> None:
    assert "Patches of the input" not in render(report)
    html = render(replace(with_patches(report, (20, 20), (2, 2)), image=picture(np.zeros((3, 4, 4)))))
    assert "Patches of the input" in html
    assert html.count('<rect class="core"') == 4
    assert '<image href="data:image/png;base64,' in html
    assert "where the patches become one tensor again" in html


def test_a_network_that_is_not_split_has_no_map() -> None:
    assert split(nn.Conv2d(3, 4, 3), 0.0).patch_map((8, 8)) is None


def test_a_picture_holds_the_image_it_was_made_of() -> None:
    values = np.linspace(-1.0, 3.0, 3 * 5 * 7).reshape(3, 5, 7)
    address = picture(values)
    image = np.asarray(Image.open(BytesIO(b64decode(address.removeprefix("data:image/png;base64,")))))
    assert image.shape == (5, 7, 3)
    assert (image.min(), image.max()) == (0, 255)
    assert np.asarray(Image.open(BytesIO(b64decode(picture(values[:1])[22:])))).shape == (5, 7)
    assert picture(np.zeros((1, 2, 2))).startswith("data:")
