"""Batches: a source's samples in a seeded order, augmented, normalised, as torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from shoal.data.pixels import augment, normalise
from shoal.data.source import Samples, Source
from shoal.errors import InputError


class Order(Sampler[int]):
    """The order of one epoch: a permutation drawn from (seed, epoch), or as they come."""

    def __init__(self, samples: int, seed: int, shuffle: bool) -> None:
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.first = 0

    def __len__(self) -> int:
        return max(0, self.samples - self.first)

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.samples) if self.shuffle else np.arange(self.samples)
        return iter(order[self.first :].tolist())


class Examples(Dataset[Any]):
    """Samples as a network's inputs. What chance does to one follows from (seed, epoch, index) alone."""

    def __init__(self, samples: Samples, source: Source, seed: int, augmented: bool) -> None:
        self.samples = samples
        self.seed = seed
        self.epoch = 0
        self.padding = source.padding if augmented else 0
        self.flip = source.flip and augmented
        per_channel = (-1, *(1,) * len(source.spatial))
        self.mean = np.asarray(source.mean, np.float32).reshape(per_channel)
        self.deviation = np.asarray(source.deviation, np.float32).reshape(per_channel)

    def __len__(self) -> int:
        return len(self.samples)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch's crops and mirrorings come next. Worker processes must start after it."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.samples.read(index)
        if self.padding or self.flip:
            rng = np.random.default_rng((self.seed, self.epoch, index))
            image = augment(image, self.padding, self.flip, rng)
        normal = normalise(image, self.mean, self.deviation)
        return torch.from_numpy(normal), torch.as_tensor(label, dtype=torch.int64)

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]] | InputError:
        """What a DataLoader asks for: the samples of a batch, or what is wrong with one of them.

        An exception would leave a worker process as the text of its traceback, and hold the others up as they end.
        """
        try:
            return [self[index] for index in indices]
        except InputError as error:
            return error


class Loader(DataLoader[Any]):
    """A DataLoader of (images, labels) that knows its epochs and raises a bad sample's own one-line InputError.

    Args:
        examples: what it loads.
        batch: samples in a batch; the last may be short.
        shuffle: whether every epoch has an order of its own.
        workers: processes that prepare batches.
    """

    def __init__(self, examples: Examples, *, batch: int, shuffle: bool, workers: int) -> None:
        self.examples = examples
        self.order = Order(len(examples), examples.seed, shuffle)
        self.batches = -(-len(examples) // batch)
        # A generator of its own: without one, workers are seeded from PyTorch's, and dropout would not repeat itself.
        generator = torch.Generator().manual_seed(examples.seed)
        super().__init__(
            examples, batch, sampler=self.order, num_workers=workers, collate_fn=_collate, generator=generator
        )

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Say which epoch comes next, and with which batch; without it every epoch is the same.

        Raises:
            InputError: a number is negative, or the epoch has fewer batches.
        """
        if epoch < 0 or not 0 <= first_batch <= self.batches:
            raise InputError(
                f"epoch={epoch}, first_batch={first_batch}: "
                f"expected an epoch from 0 and a first batch from 0 to {self.batches}"
            )
        self.examples.set_epoch(epoch)
        self.order.epoch = epoch
        self.order.first = first_batch * (self.batch_size or 1)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, InputError):
                raise batch
            handed_over = [batch]
            del batch
            yield handed_over.pop()  # no one here holds the batch while its reader works, or while the next is loaded


def _collate(examples: list[tuple[torch.Tensor, torch.Tensor]] | InputError) -> Any:
    # default_collate stacks into new tensors of torch's own: a wall on its allocations counts the batch.
    return examples if isinstance(examples, InputError) else default_collate(examples)


@dataclass(frozen=True)
class Data:
    """An open data set.

    Attributes:
        name: as given to `shoal.data.open`.
        train, test: loaders of (images, labels): float32 (batch, in_channels, *spatial), and int64 (batch,) or, where
            every pixel has a label, (batch, *spatial). The last batch of an epoch may be short.
        num_classes, in_channels: what the network needs.
        image: pixels along the last side.
        spatial: all sides.
        classes: their names, in the order of the labels.
    """

    name: str
    train: Loader
    test: Loader
    num_classes: int
    in_channels: int
    image: int
    spatial: tuple[int, ...]
    classes: tuple[str, ...]

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Say which epoch `train` gives next; without it every epoch is the same.

        Order and augmentation follow from (seed, epoch) alone, so a resumed run sees what the first would have seen.

        Args:
            epoch: from 0.
            first_batch: skip that many batches, to resume in the middle of an epoch.

        Raises:
            InputError: a number is negative, or the epoch has fewer batches.
        """
        self.train.set_epoch(epoch, first_batch)


def load(source: Source, *, batch: int, seed: int, workers: int, augmented: bool) -> Data:
    """Loaders over both splits of a source; the test split in order and never augmented."""
    train = Examples(source.train, source, seed, augmented)
    test = Examples(source.test, source, seed, False)
    return Data(
        name=source.name,
        train=Loader(train, batch=batch, shuffle=True, workers=workers),
        test=Loader(test, batch=batch, shuffle=False, workers=workers),
        num_classes=len(source.classes),
        in_channels=len(source.mean),
        image=source.spatial[-1],
        spatial=source.spatial,
        classes=source.classes,
    )
