"""Laws of the image functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shoal.app.data.pixels import augment, channels_first, normalise, resize, resize_and_crop

seeds = st.integers(0, 2**32)


@given(seed=seeds, padding=st.integers(0, 4), flip=st.booleans(), dims=st.integers(1, 3))
def test_augment_keeps_the_shape_and_cuts_a_window_out_of_the_padded_image(
    seed: int, padding: int, flip: bool, dims: int
) -> None:
    image = np.arange(1, 1 + 2 * 5**dims).reshape(2, *(5,) * dims)
    got = augment(image, padding, flip, np.random.default_rng(seed))
    assert got.shape == image.shape
    border = [(0, 0)] + [(padding, padding)] * dims
    windows = []
    for mirrored in (image, image[..., ::-1]) if flip else (image,):
        padded = np.pad(mirrored, border)
        for offsets in np.ndindex(*(2 * padding + 1,) * dims):
            windows.append(padded[(slice(None), *(slice(at, at + 5) for at in offsets))])
            if np.array_equal(windows[-1], got):
                return
    raise AssertionError("no window of the padded image equals the result")


def test_augment_reaches_every_shift_and_both_mirrorings() -> None:
    image = np.arange(1, 10).reshape(1, 3, 3)
    rng = np.random.default_rng(0)
    seen = {augment(image, 1, True, rng).tobytes() for _ in range(1000)}
    assert len(seen) == 3 * 3 * 2


@given(seed=seeds)
def test_augment_repeats_itself_for_equal_generators(seed: int) -> None:
    image = np.arange(3 * 8 * 8).reshape(3, 8, 8)
    first, second = (augment(image, 4, True, np.random.default_rng(seed)) for _ in range(2))
    assert np.array_equal(first, second)


def test_resize_is_the_identity_at_the_same_size_and_keeps_constants() -> None:
    pixels = np.full((8, 8), 77, np.uint8)
    assert resize(pixels, 8) is pixels
    assert resize(pixels, 32).shape == (32, 32)
    assert (resize(pixels, 32) == 77).all()
    assert resize(np.zeros((8, 8, 3), np.uint8), 5).shape == (5, 5, 3)


@given(width=st.integers(1, 60), height=st.integers(1, 60), side=st.integers(1, 20))
def test_resize_and_crop_gives_a_square_from_any_image(width: int, height: int, side: int) -> None:
    assert resize_and_crop(Image.new("L", (width, height), 9), side).shape == (side, side, 3)


def test_resize_and_crop_cuts_the_middle_out() -> None:
    pixels = np.zeros((4, 12), np.uint8)
    pixels[:, 4:8] = 200
    assert (resize_and_crop(Image.fromarray(pixels), 4) == 200).all()


def test_channels_first_repeats_grey_and_moves_colour() -> None:
    grey = np.arange(4, dtype=np.uint8).reshape(2, 2)
    assert np.array_equal(channels_first(grey, 3), np.stack([grey] * 3))
    colour = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert np.array_equal(channels_first(colour, 3)[1], colour[..., 1])


def test_normalise_works_per_channel() -> None:
    image = np.full((2, 3, 3), 10, np.uint8)
    mean, deviation = (np.array(values, np.float32).reshape(2, 1, 1) for values in ([4, 10], [2, 5]))
    got = normalise(image, mean, deviation)
    assert got.dtype == np.float32 and got.flags.c_contiguous
    assert (got[0] == 3).all() and (got[1] == 0).all()


@given(short=st.integers(2, 40), times=st.floats(1, 60), tall=st.booleans(), side=st.integers(2, 40))
def test_resize_and_crop_looks_as_the_middle_of_the_image_scaled_as_a_whole(
    short: int, times: float, tall: bool, side: int
) -> None:
    long = int(short * times)
    ramp = np.linspace(0, 255, long) * np.ones((short, 1))
    pixels = np.round(ramp).astype(np.uint8)
    image = Image.fromarray(pixels.T.copy() if tall else pixels)
    scale = side / short
    width, height = (max(side, round(length * scale)) for length in image.size)
    scaled = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - side) // 2, (height - side) // 2
    whole = np.asarray(scaled.crop((left, top, left + side, top + side))).astype(int)
    # Cut by whole pixels of the result, the middle may be a pixel off: of either, and of its slope.
    pixel = 255 / long * (1 + short / side)
    assert np.abs(resize_and_crop(image, side).astype(int) - whole).max() <= np.ceil(pixel) + 1


@pytest.mark.parametrize("size", [(65_000, 1), (1, 65_000), (65_001, 2), (9_000_000, 1)])
def test_a_long_image_asks_for_no_more_memory_than_a_square(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    resize_as_always = Image.Image.resize

    def resized(image: Image.Image, size: tuple[int, int], *arguments: Any, **more: Any) -> Image.Image:
        asked.append(size[0] * size[1])
        return resize_as_always(image, size, *arguments, **more)

    monkeypatch.setattr(Image.Image, "resize", resized)
    image = Image.new("L", size, 9)
    assert (resize_and_crop(image, 224) == 9).all()
    assert max(asked) <= 9 * 224 * 224
