"""Transforms of one image: functions of arrays, and of a generator where they are random."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps


def resize(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """(height, width[, 3]) → (side, side[, 3]), bilinear; an image of that size already is returned as it is."""
    if pixels.shape[:2] == (side, side):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR))


def resize_and_crop(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """Cut the middle square out and scale it to `side`, bilinear: uint8 (side, side, 3)."""
    return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR))


def channels_first(pixels: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """(H, W) → (channels, H, W) by repetition, (H, W, channels) → (channels, H, W); a view, not a copy."""
    if pixels.ndim == 2:
        return np.broadcast_to(pixels, (channels, *pixels.shape))
    return pixels.transpose(2, 0, 1)


def augment(image: NDArray[Any], padding: int, flip: bool, rng: np.random.Generator) -> NDArray[Any]:
    """Mirror half the images, then crop at random to their own size out of a border of `padding` zeros.

    Args:
        image: (channels, *spatial).
        padding: zeros on each side of each spatial dimension; 0 for no crop.
        flip: whether to mirror along the last dimension.
        rng: chance; equal generators give equal images.
    """
    if flip and rng.random() < 0.5:
        image = image[..., ::-1]
    if padding:
        offsets = rng.integers(0, 2 * padding, size=image.ndim - 1, endpoint=True)
        padded = np.pad(image, [(0, 0)] + [(padding, padding)] * (image.ndim - 1))
        window = [slice(at, at + side) for at, side in zip(offsets, image.shape[1:], strict=True)]
        image = padded[(slice(None), *window)]
    return image


def normalise(image: NDArray[Any], mean: NDArray[np.float32], deviation: NDArray[np.float32]) -> NDArray[np.float32]:
    """(image - mean) / deviation as contiguous float32; mean and deviation broadcast against (channels, *spatial)."""
    return np.ascontiguousarray((image.astype(np.float32) - mean) / deviation)


def picture(image: NDArray[Any]) -> str:
    """An image of any range as a PNG in an address that begins with "data:", for a page.

    Args:
        image: (1 or 3 channels, height, width); the least value becomes black and the largest white.
    """
    least, most = float(image.min()), float(image.max())
    scaled = (255 * (image - least) / (most - least or 1.0)).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(scaled[0] if len(scaled) == 1 else scaled.transpose(1, 2, 0)).save(file, "PNG")
    return "data:image/png;base64," + b64encode(file.getvalue()).decode("ascii")
