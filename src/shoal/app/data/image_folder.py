"""A folder of images, one folder a class: `train/cat/1.jpg`, `test/cat/9.jpg`, or only `cat/1.jpg`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shoal.app.data.pixels import channels_first, resize_and_crop
from shoal.app.data.source import Source
from shoal.errors import InputError

# Each suffix and Pillow's decoder of it. A file may have the content of another one of these, as one of ImageNet's
# has, a PNG named .JPEG. Pillow's own choice, by content, is among forty decoders, and PostScript's runs the file as a
# program.
DECODERS = {
    ".bmp": "BMP",
    ".gif": "GIF",
    ".jpeg": "JPEG",
    ".jpg": "JPEG",
    ".png": "PNG",
    ".ppm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".webp": "WEBP",
}
# ImageNet's, in 0 to 255: what torchvision's checkpoints expect.
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class Files:
    """Images on disk, decoded each time they are read.

    Attributes:
        paths, labels: of each sample.
        side: pixels along each side of what `read` gives.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    side: int

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> tuple[NDArray[np.uint8], int]:
        """uint8 of shape (3, side, side), and the class.

        Raises:
            InputError: the file cannot be decoded, or has too many pixels.
        """
        path = self.paths[index]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)  # a small file may hold gigabytes
                with Image.open(path, formats=[*DECODERS.values()]) as image:
                    pixels = resize_and_crop(image, self.side)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            most = Image.MAX_IMAGE_PIXELS or 0
            raise InputError(f"the image {path} has more than {most:,} pixels; make it smaller or remove it") from error
        except Exception as error:  # a damaged image may raise anything
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise InputError(f"cannot decode the image {path}: {reason}; replace or remove it") from error
        return channels_first(pixels, 3), self.labels[index]


def open_image_folder(
    *, root: str | Path | None = None, image: int = 224, seed: int = 0, holdout: float = 0.2
) -> Source:
    """The images under `root`.

    Args:
        root: holds `train` and `test` (or `val`), each with a folder a class; or the class folders themselves.
        image: the shorter side is scaled to that many pixels, and the middle square cut out.
        seed: draws the samples held out.
        holdout: the share of each class that becomes the test split where `root` has only one.

    Raises:
        InputError: a folder is missing, a class is empty or in one split only, or `holdout` is not in (0, 1).
    """
    if root is None:
        raise InputError("data 'image_folder' got no root; expected a folder with one folder a class, give root=...")
    root = Path(root)
    if not root.is_dir():
        raise InputError(f"data 'image_folder' got root={root}: no such folder; give one with a folder a class")
    if (root / "train").is_dir():
        held = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
        if held is None:
            raise InputError(f"{root} has 'train' but neither 'test' nor 'val'; add one, or give root={root / 'train'}")
        classes, train = _list(root / "train", image)
        _, test = _list(held, image, classes)
    else:
        classes, every = _list(root, image)
        train, test = _hold_out(every, holdout, seed)
    return Source(
        name="image_folder",
        train=train,
        test=test,
        classes=classes,
        spatial=(image, image),
        mean=MEAN,
        deviation=DEVIATION,
        padding=image // 8,
        flip=True,
    )


def _list(folder: Path, side: int, expected: tuple[str, ...] | None = None) -> tuple[tuple[str, ...], Files]:
    found = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    names = tuple(entry.name for entry in found)
    if not names:
        raise InputError(f"{folder} has no class folders; expected one folder a class with images in it")
    if expected is not None and names != expected:
        odd = sorted(set(names) ^ set(expected))[0]
        fault = "is unknown to" if odd in names else "is missing although it is in"
        raise InputError(f"{folder}: class folder {odd!r} {fault} the training split; both need the same classes")
    paths: list[Path] = []
    labels: list[int] = []
    for label, entry in enumerate(found):
        images = sorted(path for path in entry.rglob("*") if path.suffix.lower() in DECODERS and path.is_file())
        if not images:
            raise InputError(f"class folder {entry} has no images ({', '.join(sorted(DECODERS))}); fill or remove it")
        paths += images
        labels += [label] * len(images)
    return names, Files(tuple(paths), tuple(labels), side)


def _hold_out(every: Files, share: float, seed: int) -> tuple[Files, Files]:
    if not 0 < share < 1:
        raise InputError(f"holdout={share!r}: expected a share between 0 and 1, such as 0.2")
    rng = np.random.default_rng(seed)
    labels = np.array(every.labels)
    held = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < 2:
            raise InputError(
                f"class folder {every.paths[members[0]].parent} has one image, expected at least two to hold one out"
            )
        held[members[: min(len(members) - 1, max(1, round(share * len(members))))]] = True

    def part(chosen: NDArray[np.bool_]) -> Files:
        picked = np.flatnonzero(chosen)
        return Files(tuple(every.paths[i] for i in picked), tuple(every.labels[i] for i in picked), every.side)

    return part(~held), part(held)
