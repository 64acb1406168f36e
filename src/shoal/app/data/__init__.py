"""Data sets by name, as seeded loaders.

What a sample looks like follows only from (seed, epoch, index): not from the number of worker processes, nor from
PyTorch's generator, which stays where it was. torchvision's data sets and transforms do not replace these: it cannot be
imported with every supported torch, such as the CPU build.

Imports `core`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.app.data.digits import open_digits
from shoal.app.data.image_folder import open_image_folder
from shoal.app.data.loaders import Data, load
from shoal.app.data.source import Source
from shoal.core.named import function_named
from shoal.errors import InputError

__all__ = ["Data", "find", "open"]

_SOURCES: dict[str, Callable[..., Source]] = {
    "digits": open_digits,
    "image_folder": open_image_folder,
}


def open(
    name: str,
    *,
    batch: int,
    root: str | Path | None = None,
    image: int | None = None,
    seed: int = 0,
    workers: int = 0,
    augment: bool = True,
    rank: int = 0,
    ranks: int = 1,
    **options: Any,
) -> Data:
    """Open a data set. Replaces a `torchvision.datasets` class, its transforms and two `DataLoader`s.

    Args:
        name: "digits" (embedded), "image_folder", or MODULE:FUNCTION or FILE.py:FUNCTION, which returns a
            `shoal.app.data.source.Source`.
        batch: samples in a batch, over all ranks; the last of an epoch may be short.
        root: where the data lies.
        image: pixels along each side; by default 32, for "image_folder" 224.
        seed: of order, augmentation and held-out samples.
        workers: processes that prepare batches; 0 prepares them in this one.
        augment: random crops and mirroring (image_folder) of the training split.
        rank, ranks: load that rank's share of every batch. Together the ranks have what one would have; only a last
            batch that leaves some rank fewer than two training samples is left out.
        options: of the data set: "image_folder" takes `holdout`, a function of yours its own parameters.

    Raises:
        InputError: an unknown name or option, or data that is missing, damaged or mislabelled. A file that only fails
            to decode is named when its batch comes.

    >>> data = open("digits", batch=128)
    >>> images, labels = next(iter(data.train))
    >>> images.shape, labels.shape, data.num_classes
    (torch.Size([128, 3, 32, 32]), torch.Size([128]), 10)
    """
    opener = find(name)
    known = inspect.signature(opener).parameters
    for option in options.keys() - known.keys():
        own = sorted(known.keys() - {"root", "image", "seed"})
        raise InputError(f"data {name!r} has no option {option!r}: it takes {', '.join(own) or 'none of its own'}")
    if root is not None and "root" not in known:
        raise InputError(f"data {name!r} got root={str(root)!r}, but reads no files; leave root out")
    if image is not None:
        options["image"] = image
    options |= {key: value for key, value in (("root", root), ("seed", seed)) if key in known}
    return load(opener(**options), batch=batch, seed=seed, workers=workers, augmented=augment, rank=rank, ranks=ranks)


def find(name: str) -> Callable[..., Source]:
    """The function that opens the data set of that name; see `open`.

    Raises:
        InputError: there is none.
    """
    if ":" in name:
        return function_named(name)
    if name not in _SOURCES:
        close = difflib.get_close_matches(str(name).lower(), _SOURCES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"unknown data {name!r}: {hint}known are {', '.join(_SOURCES)}, and MODULE:FUNCTION")
    return _SOURCES[name]
