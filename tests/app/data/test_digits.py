"""The embedded default data set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shoal.app.data
from shoal.app.data.digits import open_digits


def test_shapes_types_and_sizes() -> None:
    data = shoal.app.data.open("digits", batch=128)
    images, labels = next(iter(data.train))
    assert (images.shape, images.dtype) == ((128, 3, 32, 32), torch.float32)
    assert (labels.shape, labels.dtype) == ((128,), torch.int64)
    assert (data.name, data.num_classes, data.in_channels, data.image) == ("digits", 10, 3, 32)
    assert len(data.train.examples) + len(data.test.examples) == 1797


@pytest.mark.parametrize("image", [8, 16, 50])
def test_any_size_and_grey_in_all_channels(image: int) -> None:
    images, _ = next(iter(shoal.app.data.open("digits", batch=4, image=image).train))
    assert images.shape == (4, 3, image, image)
    assert torch.equal(images[:, 0], images[:, 1]) and torch.equal(images[:, 0], images[:, 2])


def test_the_split_is_fixed_stratified_and_disjoint() -> None:
    first, second = open_digits(image=8), open_digits(image=8)
    assert np.array_equal(first.test.pixels, second.test.pixels)
    whole = np.bincount(np.concatenate([first.train.labels, first.test.labels]))
    share = np.bincount(first.test.labels) / whole
    assert np.abs(share - len(first.test) / 1797).max() < 0.01
    train, test = ({image.tobytes() for image in split.pixels} for split in (first.train, first.test))
    assert len(train & test) == 0


@pytest.mark.parametrize("batch", [2, 4, 8, 16, 32, 50, 64, 100, 128, 200, 256, 512])
def test_no_usual_batch_size_leaves_one_sample_for_batch_norm(batch: int) -> None:
    assert len(open_digits().train) % batch != 1


def test_the_training_split_is_normalised() -> None:
    data = shoal.app.data.open("digits", batch=2000, augment=False)
    ((images, _),) = list(data.train)
    assert abs(images.mean()) < 0.05 and 0.7 < images.std() < 1.1


def test_a_linear_model_learns_it() -> None:
    data = shoal.app.data.open("digits", batch=2000, image=8, augment=False)
    ((images, labels),) = list(data.train)
    ((held, truth),) = list(data.test)
    weights = torch.linalg.lstsq(
        torch.nn.functional.pad(images[:, 0].flatten(1), (0, 1), value=1.0).double()
        + 1e-9 * torch.randn(len(images), 65, dtype=torch.float64),
        torch.nn.functional.one_hot(labels, 10).double(),
    ).solution
    scores = torch.nn.functional.pad(held[:, 0].flatten(1), (0, 1), value=1.0).double() @ weights
    assert (scores.argmax(1) == truth).double().mean() > 0.9
