"""Batches: a source's samples in a seeded order, augmented, normalised, as torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from shoal.app.data.pixels import augment, normalise
from shoal.app.data.source import Samples, Source
from shoal.errors import InputError


def share(images: int, rank: int, ranks: int) -> slice:
    """Which of `images` in a row are this rank's: as many as any other's, or one more.

    >>> [share(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    each, more = divmod(images, ranks)
    first = rank * each + min(rank, more)
    return slice(first, first + each + (rank < more))


@dataclass(eq=False)
class Order(Sampler[list[int]]):
    """The batches of one epoch, in a permutation drawn from (seed, epoch) or as they come, and of each a rank's share.

    Attributes:
        samples: how many there are.
        batch: samples in a batch, over all ranks; the last may be short.
        seed, shuffle: of the permutation; without `shuffle` samples stay in order.
        rank, ranks: whose share, of how many; it may be empty.
        drop_last: leave out a short last batch that gives some rank fewer than two samples where a whole one would not.
        epoch, first: which is next, and with which of its batches it begins.
    """

    samples: int
    batch: int
    seed: int
    shuffle: bool
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False
    epoch: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        self.min_images = self.ranks * min(2, self.batch // self.ranks) if self.drop_last else 0

    def __len__(self) -> int:
        return sum(self.whole(place) >= self.min_images for place in range(self.first, -(-self.samples // self.batch)))

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.samples) if self.shuffle else np.arange(self.samples)
        for place in range(self.first, self.first + len(self)):
            whole = order[place * self.batch : (place + 1) * self.batch]
            yield whole[share(len(whole), self.rank, self.ranks)].tolist()

    def whole(self, place: int) -> int:
        """Samples in the batch at that place of an epoch, over all ranks."""
        return max(0, min(self.batch, self.samples - place * self.batch))


@dataclass(frozen=True)
class NoneLike:
    """No samples, where a rank has none of a batch: an image and a label show of which shape."""

    image: torch.Tensor
    label: torch.Tensor


class Examples(Dataset[Any]):
    """Samples as a network's inputs. Its random augmentation follows only from (seed, epoch, index)."""

    def __init__(self, samples: Samples, source: Source, seed: int, augmented: bool) -> None:
        self.samples = samples
        self.seed = seed
        self.epoch = 0  # crops and mirrorings follow from it; worker processes must start after it is set
        self.padding = source.padding if augmented else 0
        self.flip = source.flip and augmented
        per_channel = (-1, *(1,) * len(source.spatial))
        self.mean = np.asarray(source.mean, np.float32).reshape(per_channel)
        self.deviation = np.asarray(source.deviation, np.float32).reshape(per_channel)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.samples.read(index)
        if self.padding or self.flip:
            rng = np.random.default_rng((self.seed, self.epoch, index))
            image = augment(image, self.padding, self.flip, rng)
        normal = normalise(image, self.mean, self.deviation)
        return torch.from_numpy(normal), torch.as_tensor(label, dtype=torch.int64)

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]] | NoneLike | InputError:
        """What a DataLoader asks for: the samples of a batch, or what is wrong with one of them.

        An exception would leave a worker process as the text of its traceback, and hold the others up as they end.
        """
        try:
            return [self[index] for index in indices] if indices else NoneLike(*self[0])
        except InputError as error:
            return error


class Loader(DataLoader[Any]):
    """A DataLoader of (images, labels) that knows its epochs and raises a bad sample's own one-line InputError.

    Args:
        examples: what it loads.
        order: of the batches.
        workers: processes that prepare batches.
    """

    def __init__(self, examples: Examples, order: Order, workers: int) -> None:
        self.examples = examples
        self.order = order
        self.batches = -(-order.samples // order.batch)
        # A generator of its own: without one, workers are seeded from PyTorch's, and dropout would not repeat itself.
        generator = torch.Generator().manual_seed(examples.seed)
        super().__init__(examples, batch_sampler=order, num_workers=workers, collate_fn=_collate, generator=generator)

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Set the next epoch, and with which batch it begins; without it every epoch is the same.

        Raises:
            InputError: a number is negative, or the epoch has fewer batches.
        """
        if epoch < 0 or not 0 <= first_batch <= self.batches:
            raise InputError(
                f"epoch={epoch}, first_batch={first_batch}: "
                f"expected an epoch from 0 and a first batch from 0 to {self.batches}"
            )
        self.examples.epoch = epoch
        self.order.epoch = epoch
        self.order.first = first_batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, InputError):
                raise batch
            handed_over = [batch]
            del batch
            yield handed_over.pop()  # no one here holds the batch while its reader works, or while the next is loaded


def _collate(examples: list[tuple[torch.Tensor, torch.Tensor]] | NoneLike | InputError) -> Any:
    if isinstance(examples, NoneLike):
        return [
            examples.image.new_empty((0, *examples.image.shape)),
            examples.label.new_empty((0, *examples.label.shape)),
        ]
    # default_collate stacks into new tensors of torch's own: a memory limit counts the batch.
    return examples if isinstance(examples, InputError) else default_collate(examples)


@dataclass(frozen=True)
class Data:
    """An open data set.

    Attributes:
        name: as given to `shoal.app.data.open`.
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
        """Set the epoch that `train` gives next; without it every epoch is the same.

        Order and augmentation follow only from (seed, epoch), so a resumed run sees what the first would have seen.

        Args:
            epoch: from 0.
            first_batch: skip that many batches, to resume in the middle of an epoch.

        Raises:
            InputError: a number is negative, or the epoch has fewer batches.
        """
        self.train.set_epoch(epoch, first_batch)


def load(
    source: Source, *, batch: int, seed: int, workers: int, augmented: bool, rank: int = 0, ranks: int = 1
) -> Data:
    """Loaders over both splits of a source; the test split in order and never augmented."""

    def loader(samples: Samples, training: bool) -> Loader:
        order = Order(len(samples), batch, seed, training, rank, ranks, drop_last=training and ranks > 1)
        return Loader(Examples(samples, source, seed, training and augmented), order, workers)

    return Data(
        name=source.name,
        train=loader(source.train, training=True),
        test=loader(source.test, training=False),
        num_classes=len(source.classes),
        in_channels=len(source.mean),
        image=source.spatial[-1],
        spatial=source.spatial,
        classes=source.classes,
    )
