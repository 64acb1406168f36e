"""CIFAR-10: 60,000 images of 32 pixels in ten classes, from either of two forms.

- `cifar10-jpeg.tar.xz`: `train/airplane/0000.jpg` and so on, in one archive. Decoded once, then kept in the cache.
- `cifar-10-batches-py`: torchvision's folder of Python pickles, read by an unpickler that allows only arrays.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import logging
import lzma
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from examples.data import VARIABLE, data_dir
from shoal.app.data.source import Images, Source
from shoal.core.files import cache_dir, write_atomically
from shoal.errors import InputError

ARCHIVE = "cifar10-jpeg.tar.xz"
BATCHES = "cifar-10-batches-py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SAMPLES: Mapping[str, int] = {"train": 50_000, "test": 10_000}
# Of the training split, in 0 to 255.
MEAN = (125.31, 122.95, 113.87)
DEVIATION = (62.99, 62.09, 66.70)

_MAX_ARCHIVE_BYTES = 2**30  # the archive itself holds a fifth of that

Arrays = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
_log = logging.getLogger(__name__)


def open_cifar10(*, root: str | Path | None = None, image: int = 32) -> Source:
    """CIFAR-10 from `root`, else from the folder that SHOAL_DATA names, else from the shared data folder.

    Args:
        root: the archive, the folder of pickles, or the folder that holds either.
        image: pixels along each side; other than 32, images are resized.

    Raises:
        InputError: neither form is there, or what is there is truncated, damaged or mislabelled.
    """
    arrays = _find(Path(root) if root is not None else data_dir())
    return Source(
        name="cifar10",
        train=Images(*arrays["train"], image),
        test=Images(*arrays["test"], image),
        classes=CLASSES,
        spatial=(image, image),
        mean=MEAN,
        deviation=DEVIATION,
        padding=image // 8,
        flip=True,
    )


def check_labels(labels: NDArray[Any], classes: int, where: str) -> NDArray[np.int64]:
    """The labels as int64.

    Raises:
        InputError: one is not in `range(classes)`, or a class has no sample.
    """
    labels = np.asarray(labels, np.int64)
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        raise InputError(
            f"{where}: sample {outside[0]} has label {labels[outside[0]]}, expected 0 to {classes - 1}; "
            "correct or remove it"
        )
    empty = np.flatnonzero(np.bincount(labels, minlength=classes) == 0)
    if len(empty):
        raise InputError(f"{where}: class {empty[0]} has no sample, expected all of {classes}; complete the data set")
    return labels


def _find(place: Path) -> Arrays:
    if place.is_file():
        return read_cached(place)
    if place.name == BATCHES and place.is_dir():
        return read_batches(place)
    if (place / ARCHIVE).is_file():
        return read_cached(place / ARCHIVE)
    if (place / BATCHES).is_dir():
        return read_batches(place / BATCHES)
    raise InputError(
        f"no CIFAR-10 in {place.resolve()}: expected {ARCHIVE} or the folder {BATCHES}; "
        f"set {VARIABLE} (or give root) to the folder that holds one"
    )


def read_cached(archive: Path) -> Arrays:
    """`read_archive`, decoded once for each content and then read from the cache."""
    packed = _read_bytes(archive)
    kept = cache_dir() / f"cifar10-{hashlib.sha256(packed).hexdigest()[:16]}.npz"
    try:
        if kept.exists() and not kept.is_file():
            raise IsADirectoryError(kept)
        with kept.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {split: (file[f"{split}_pixels"], file[f"{split}_labels"]) for split in SAMPLES}
    except FileNotFoundError:
        _log.info("decoding %s once; kept as %s", archive, kept)
    except Exception:  # a damaged file may raise anything
        _log.warning("%s is damaged; decoding %s again", kept, archive)
    else:
        if all(_is_whole(*arrays[split], count) for split, count in SAMPLES.items()):
            return arrays
        _log.warning("%s is incomplete; decoding %s again", kept, archive)
    arrays = read_archive(archive, packed)
    columns: dict[str, NDArray[Any]] = {}
    for split, (pixels, labels) in arrays.items():
        columns |= {f"{split}_pixels": pixels, f"{split}_labels": labels}
    try:
        write_atomically(kept, lambda file: np.savez(file, **columns))  # type: ignore[arg-type]  # its stub has allow_pickle first
    except InputError as error:  # of no cache: the next run decodes it again
        _log.warning("%s", error)
    return arrays


def _is_whole(pixels: NDArray[Any], labels: NDArray[Any], count: int) -> bool:
    known = pixels.dtype == np.uint8 and pixels.shape == (count, 32, 32, 3) and labels.shape == (count,)
    return known and labels.dtype == np.int64 and labels.min() >= 0 and labels.max() < len(CLASSES)


def read_archive(archive: Path, packed: bytes) -> Arrays:
    """Decode the archive `packed`, in its own order.

    Args:
        archive: its name, for errors.
        packed: its bytes.

    Raises:
        InputError: it is truncated or damaged, an image cannot be decoded, or a folder is not a split or class.
    """
    pixels: dict[str, list[NDArray[np.uint8]]] = {split: [] for split in SAMPLES}
    labels: dict[str, list[int]] = {split: [] for split in SAMPLES}
    try:
        # tarfile's own decompression takes some truncated archives for short ones.
        with tarfile.open(fileobj=io.BytesIO(_unpacked(packed)), mode="r:") as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is None:
                    continue
                split, _, folder = member.name.removeprefix("./").rpartition("/")[0].partition("/")
                if split not in SAMPLES or folder not in CLASSES:
                    raise InputError(
                        f"{archive}: {member.name} is in no known class folder; "
                        f"expected train or test, then one of {', '.join(CLASSES)}"
                    )
                pixels[split].append(_decode(file.read(), f"{archive}: {member.name}"))
                labels[split].append(CLASSES.index(folder))
    except InputError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise InputError(f"{archive} is truncated or damaged ({_reason(error)}); copy it again") from error
    for split, count in SAMPLES.items():
        if len(labels[split]) != count:
            raise InputError(
                f"{archive}: split {split!r} has {len(labels[split])} images, expected {count}; copy it again"
            )
    return {
        split: (np.stack(pixels[split]), check_labels(np.array(labels[split]), len(CLASSES), f"{archive}: {split}"))
        for split in SAMPLES
    }


def read_batches(folder: Path) -> Arrays:
    """Read torchvision's folder: `data_batch_1` to `data_batch_5`, and `test_batch`.

    Raises:
        InputError: a file is missing, truncated, no such pickle, or has a label or a size out of range.
    """
    parts = {
        "train": [_read_batch(folder / f"data_batch_{part}") for part in range(1, 6)],
        "test": [_read_batch(folder / "test_batch")],
    }
    arrays: Arrays = {}
    for split, found in parts.items():
        pixels = np.concatenate([pixels for pixels, _ in found])
        labels = check_labels(np.concatenate([labels for _, labels in found]), len(CLASSES), f"{folder}: {split}")
        if len(labels) != SAMPLES[split]:
            raise InputError(
                f"{folder}: split {split!r} has {len(labels)} images, expected {SAMPLES[split]}; copy it again"
            )
        arrays[split] = pixels, labels
    return arrays


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _read_bytes(path)
    try:
        batch = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels, labels = np.asarray(batch["data"]), np.asarray(batch["labels"], np.int64)
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(f"{path} is truncated or not a CIFAR-10 batch ({_reason(error)}); copy it again") from error
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
        raise InputError(
            f"{path}: data is {pixels.dtype} {pixels.shape}, expected uint8 ({len(labels)}, 3072); copy it again"
        )
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels


class _ArrayUnpickler(pickle._Unpickler):
    """Builds numpy arrays and Python's own containers; refuses every other name, so a pickle cannot run code.

    It is the one in Python: the one in C gives a damaged place in its memory as many bytes as it asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        allowed = {("numpy", "ndarray"): np.ndarray, ("numpy", "dtype"): np.dtype, ("_codecs", "encode"): codecs.encode}
        if (module, name) in allowed:
            return allowed[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpacked(packed: bytes) -> bytes:
    """The archive without its compression, which could make gigabytes of a few bytes.

    Raises:
        EOFError: it is cut, or more than `_MAX_ARCHIVE_BYTES`.
    """
    unpacker = lzma.LZMADecompressor()
    unpacked = unpacker.decompress(packed, _MAX_ARCHIVE_BYTES)
    if not unpacker.eof:
        raise EOFError(f"it has no end within {_MAX_ARCHIVE_BYTES} bytes")
    return unpacked


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; complete the data set") from error


def _decode(content: bytes, where: str) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            width, height = image.size
            pixels = np.asarray(image.convert("RGB")) if width == height == 32 else None
    except Exception as error:  # a damaged image may raise anything
        raise InputError(f"{where} cannot be decoded; copy the archive again") from error
    if pixels is None:
        raise InputError(f"{where} has shape {(height, width, 3)}, expected (32, 32, 3); copy the archive again")
    return pixels
