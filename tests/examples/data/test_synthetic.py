"""Images from a seed, of any shape."""

from __future__ import annotations

import pytest
import torch

import shoal.app.data
from shoal.errors import InputError
from tests.raising import raising

SYNTHETIC = "examples.data.synthetic:open_synthetic"


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dense", [False, True])
def test_any_number_of_dimensions_with_labels_per_image_or_per_pixel(dims: int, dense: bool) -> None:
    data = shoal.app.data.open(
        SYNTHETIC, batch=3, image=8, dims=dims, dense=dense, in_channels=2, num_classes=4, train_samples=7
    )
    images, labels = next(iter(data.train))
    assert images.shape == (3, 2, *(8,) * dims)
    assert labels.shape == ((3, *(8,) * dims) if dense else (3,))
    assert labels.dtype == torch.int64 and labels.min() >= 0 and labels.max() < 4
    assert (data.num_classes, data.in_channels, data.image) == (4, 2, 8)
    assert len(data.train.examples) == 7


def test_sides_of_different_length() -> None:
    data = shoal.app.data.open(SYNTHETIC, batch=1, spatial=(4, 6, 8))
    assert next(iter(data.test))[0].shape == (1, 3, 4, 6, 8)
    assert (data.spatial, data.image) == ((4, 6, 8), 8)


def test_images_follow_from_the_seed_and_splits_differ() -> None:
    def images(seed: int, split: str) -> torch.Tensor:
        data = shoal.app.data.open(SYNTHETIC, batch=4, image=8, seed=seed, train_samples=4, test_samples=4)
        return getattr(data, split).examples[0][0]

    assert torch.equal(images(0, "train"), images(0, "train"))
    assert not torch.equal(images(0, "train"), images(1, "train"))
    assert not torch.equal(images(0, "train"), images(0, "test"))


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_shuffle_but_do_not_change_the_images(workers: int) -> None:
    data = shoal.app.data.open(SYNTHETIC, batch=64, image=8, train_samples=64, workers=workers)
    data.set_epoch(0)
    ((first, _),) = list(data.train)
    data.set_epoch(1)
    ((second, _),) = list(data.train)
    assert not torch.equal(first, second)
    assert {image.numpy().tobytes() for image in first} == {image.numpy().tobytes() for image in second}


def test_the_class_can_be_told_from_the_image() -> None:
    """Power spectra forget the random phase, so the nearest class mean of them finds the class."""
    data = shoal.app.data.open(SYNTHETIC, batch=1000, image=16, num_classes=4, train_samples=200, test_samples=100)
    ((images, labels),) = list(data.train)
    ((held, truth),) = list(data.test)
    spectra, held_spectra = (torch.fft.fft2(x).abs().mean(1).flatten(1) for x in (images, held))
    means = torch.stack([spectra[labels == label].mean(0) for label in range(4)])
    assert (torch.cdist(held_spectra, means).argmin(1) == truth).double().mean() > 0.8


def test_the_pixels_class_can_be_told_from_its_brightness() -> None:
    data = shoal.app.data.open(SYNTHETIC, batch=16, image=32, dense=True)
    images, labels = next(iter(data.train))
    guess = (images.mean(1) > 0).long()
    assert (guess == labels).double().mean() > 0.9
    assert 0.02 < labels.double().mean() < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "num_classes=1"),
        ({"in_channels": 0}, "in_channels=0"),
        ({"train_samples": 0}, "train_samples=0"),
        ({"dims": 4}, ""),
        ({"spatial": ()}, ""),
        ({"spatial": (4, 0)}, "spatial=0"),
    ],
)
def test_a_number_out_of_range(options: dict[str, object], message: str) -> None:
    with raising(InputError, message):
        shoal.app.data.open(SYNTHETIC, batch=1, **options)
