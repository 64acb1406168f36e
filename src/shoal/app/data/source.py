"""What a data set is before it becomes batches: plain data, no torch.

Raw samples stay numpy arrays or files, so that a memory limit counts the training and not the data set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.app.data.pixels import channels_first, resize


class Samples(Protocol):
    """One split. `read` gives the same for the same index, whatever was read before."""

    def __len__(self) -> int:
        """How many samples."""
        ...

    def read(self, index: int) -> tuple[NDArray[Any], int | NDArray[np.int64]]:
        """An image of shape (channels, *spatial), and its class or a class for every pixel."""
        ...


@dataclass(frozen=True)
class Source:
    """Two splits and how to turn their raw images into a network's input.

    Attributes:
        name: as given to `shoal.app.data.open`.
        train, test: the splits.
        classes: names of the classes; a label is a place in it.
        spatial: the sides of an image after `read`.
        mean, deviation: per channel, in the units of the raw images; as many as an image has channels.
        padding: zeros put around a training image before a random crop to its own size; 0 for no crop.
        flip: whether half the training images are mirrored left to right.
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    spatial: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    padding: int = 0
    flip: bool = False


@dataclass(frozen=True)
class Images:
    """Images in memory, resized as they are read.

    Attributes:
        pixels: uint8, (samples, height, width) or (samples, height, width, 3).
        labels: int64, (samples,).
        side: pixels along each side of what `read` gives.
        channels: a grey image is repeated to that many.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    side: int
    channels: int = 3

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[NDArray[np.uint8], int]:
        """uint8 of shape (channels, side, side), and the class."""
        image = channels_first(resize(self.pixels[index], self.side), self.channels)
        return image, int(self.labels[index])
