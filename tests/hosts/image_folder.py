"""Folders of small images, one for each class, as trainers read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from tests.hosts.laws import BATCH, BATCHES, CLASSES, images


def write_images(folder: Path, splits: Iterable[str], side: int = 64) -> None:
    """Write the images of `laws.images` as folder/split/class/number.png."""
    pixels = images(BATCHES * BATCH, side)[0].mul(64).add(128).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    for split in splits:
        for number, image in enumerate(pixels):
            place = folder / split / f"class{number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number}.png")


def write_boxes(folder: Path, splits: Iterable[str], side: int = 64) -> None:
    """Write the same images with one box each, in the form of ultralytics, and folder/data.yaml."""
    pixels = images(BATCHES * BATCH, side)[0].mul(64).add(128).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    for split in splits:
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(pixels):
            Image.fromarray(image).save(folder / "images" / split / f"{number}.png")
            (folder / "labels" / split / f"{number}.txt").write_text(f"{number % CLASSES} 0.5 0.5 0.4 0.4\n")
    names = "".join(f"  {number}: class{number}\n" for number in range(CLASSES))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")
