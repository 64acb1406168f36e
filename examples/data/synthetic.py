"""Images drawn from a seed, with classes that can be learnt: any shape, any number of classes, labels per pixel.

`shoal train --data examples/data/synthetic.py:open_synthetic` gets them in the shape that its network takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.app.data.source import Source
from shoal.errors import InputError


@dataclass(frozen=True)
class _Drawn:
    """Samples that are drawn when they are read, a sample each time the same; `split`: those of training or of test."""

    samples: int
    shape: tuple[int, ...]
    num_classes: int
    seed: int
    split: int

    def __len__(self) -> int:
        return self.samples


@dataclass(frozen=True)
class Waves(_Drawn):
    """Each class is a plane wave of its own direction and length, at a random phase, under noise.

    Sample `i` is of class `i % num_classes`.
    """

    def read(self, index: int) -> tuple[NDArray[np.float32], int]:
        """float32 of `shape`, and the class."""
        label = index % self.num_classes
        of_class = np.random.default_rng((self.seed, label))
        of_sample = np.random.default_rng((self.seed, self.split, index))
        cycles = of_class.uniform(-4, 4, size=len(self.shape) - 1)
        weights = of_class.uniform(0.5, 1.5, size=self.shape[0])
        turns = sum(
            cycle * at / side
            for cycle, at, side in zip(cycles, np.indices(self.shape[1:]), self.shape[1:], strict=True)
        )
        wave = np.sin(2 * np.pi * (turns + of_sample.random()))
        noise = of_sample.standard_normal(self.shape, dtype=np.float32)
        image = np.multiply.outer(weights, wave) + 0.5 * noise
        return image.astype(np.float32), label


@dataclass(frozen=True)
class Balls(_Drawn):
    """A ball of every class but 0, the background: brighter with its class, somewhere in the image, under noise."""

    def read(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """float32 of `shape`, and the class of every pixel."""
        rng = np.random.default_rng((self.seed, self.split, index))
        spatial = self.shape[1:]
        labels = np.zeros(spatial, np.int64)
        grid = np.indices(spatial)
        for label in range(1, self.num_classes):
            centre = rng.uniform(0.2, 0.8, size=len(spatial)) * spatial
            radius = rng.uniform(0.15, 0.3) * min(spatial)
            distance = sum((at - middle) ** 2 for at, middle in zip(grid, centre, strict=True))
            labels[distance <= radius**2] = label
        noise = rng.standard_normal(self.shape, dtype=np.float32)
        return (2 * labels / (self.num_classes - 1) - 1 + 0.5 * noise).astype(np.float32), labels


def open_synthetic(
    *,
    image: int = 32,
    seed: int = 0,
    num_classes: int | None = None,
    in_channels: int = 3,
    dims: int = 2,
    spatial: Sequence[int] | None = None,
    dense: bool = False,
    train_samples: int = 512,
    test_samples: int = 128,
) -> Source:
    """Waves to classify or, with `dense`, balls to segment.

    Args:
        image: pixels along each side.
        seed: of the images.
        num_classes: by default 10, or 2 with `dense`.
        in_channels: channels of an image.
        dims: spatial dimensions, 1 to 3.
        spatial: sides of different length, in place of `image` and `dims`.
        dense: a class for every pixel.
        train_samples, test_samples: size of the splits.

    Raises:
        InputError: a number is out of range.
    """
    num_classes = num_classes if num_classes is not None else 2 if dense else 10
    sides = tuple(spatial) if spatial is not None else (image,) * dims
    if not 1 <= len(sides) <= 3:
        raise InputError(f"data 'synthetic' got {len(sides)} spatial dimensions; expected 1, 2 or 3")
    least: dict[str, tuple[Any, int]] = {
        "spatial": (min(sides), 1),
        "in_channels": (in_channels, 1),
        "num_classes": (num_classes, 2),
        "train_samples": (train_samples, 1),
        "test_samples": (test_samples, 1),
    }
    for what, (number, lowest) in least.items():
        if not isinstance(number, int) or number < lowest:
            raise InputError(f"data 'synthetic' got {what}={number!r}; expected an int from {lowest}")
    kind = Balls if dense else Waves
    shape = (in_channels, *sides)
    return Source(
        name="synthetic",
        train=kind(train_samples, shape, num_classes, seed, 0),
        test=kind(test_samples, shape, num_classes, seed, 1),
        classes=tuple(str(label) for label in range(num_classes)),
        spatial=sides,
        mean=(0.0,) * in_channels,
        deviation=(1.0,) * in_channels,
    )
