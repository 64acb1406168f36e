"""Order, augmentation and normalisation follow from (seed, epoch, index), whatever else happens."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.app.data
from shoal.app.data.loaders import Data, load
from shoal.app.data.source import Images, Source
from shoal.errors import InputError
from tests.raising import raising

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def small(workers: int = 0, seed: int = 0, batch: int = 8, augmented: bool = True) -> Data:
    """Twenty training images whose class is their index, cropped and mirrored."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 256, size=(20, 8, 8, 3), dtype=np.uint8)
    images = Images(pixels, np.arange(20), side=8)
    names = tuple(map(str, range(20)))
    source = Source("small", images, images, names, (8, 8), (100.0,) * 3, (50.0,) * 3, padding=2, flip=True)
    return load(source, batch=batch, seed=seed, workers=workers, augmented=augmented)


def epoch(data: Data, number: int, first_batch: int = 0) -> Batches:
    data.set_epoch(number, first_batch)
    return list(data.train)


def same(left: Batches, right: Batches) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_change_nothing(workers: int) -> None:
    alone, helped = small(), small(workers)
    for number in (0, 5):
        assert same(epoch(alone, number), epoch(helped, number))
    assert same(list(alone.test), list(helped.test))


def test_epochs_differ_and_repeat() -> None:
    data = small()
    first, second = epoch(data, 0), epoch(data, 1)
    assert not same(first, second)
    assert same(epoch(data, 0), first)
    assert same(epoch(small(), 1), second)
    assert not same(epoch(small(seed=1), 0), first)


def test_an_image_is_augmented_anew_in_every_epoch() -> None:
    data = small(batch=20)
    seen = []
    for number in range(4):
        ((images, labels),) = epoch(data, number)
        seen.append(images[labels.argsort()])
    assert all(not torch.equal(seen[0], other) for other in seen[1:])


@given(start=st.integers(0, 3), number=st.integers(0, 100))
@settings(max_examples=20)
def test_a_run_resumed_within_an_epoch_sees_what_was_left(start: int, number: int) -> None:
    assert same(epoch(small(), number, first_batch=start), epoch(small(), number)[start:])


@given(number=st.integers(0, 1000), seed=st.integers(0, 1000), batch=st.integers(1, 25))
@settings(max_examples=30)
def test_every_epoch_has_every_sample_once_in_full_batches_and_a_short_last(number: int, seed: int, batch: int) -> None:
    batches = epoch(small(seed=seed, batch=batch), number)
    labels = torch.cat([labels for _, labels in batches])
    assert sorted(labels.tolist()) == list(range(20))
    assert all(len(labels) == batch for _, labels in batches[:-1])
    assert len(batches) == -(-20 // batch) == len(small(batch=batch).train)


def test_a_batch_can_go_before_the_next_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    data, alive, read = small(), [], Images.read
    batches = iter(data.train)
    images, _ = next(batches)
    held = weakref.ref(images)

    def watched(samples: Images, index: int) -> tuple[np.ndarray, int]:
        alive.append(held() is not None)
        return read(samples, index)

    monkeypatch.setattr(Images, "read", watched)
    del images, _
    next(batches)
    assert alive == [False] * 8


@pytest.mark.parametrize("workers", [0, 1])
def test_pytorchs_generator_stays_where_it_was(workers: int) -> None:
    state = torch.get_rng_state()
    epoch(small(workers), 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_test_split_is_in_order_unaugmented_and_normalised() -> None:
    data = small(batch=20)
    ((images, labels),) = list(data.test)
    assert labels.tolist() == list(range(20))
    assert isinstance(data.test.examples.samples, Images)
    pixels = torch.from_numpy(data.test.examples.samples.pixels).permute(0, 3, 1, 2).double()
    torch.testing.assert_close(images.double(), (pixels - 100) / 50, rtol=1e-6, atol=1e-6)


def test_without_augmentation_only_the_order_differs_from_the_raw_images() -> None:
    data = small(batch=20, augmented=False)
    ((images, labels),) = epoch(data, 3)
    ((plain, _),) = list(data.test)
    assert torch.equal(images, plain[labels])
    assert not torch.equal(labels, torch.arange(20))


@pytest.mark.parametrize("arguments", [(-1, 0), (0, -1), (0, 4)])
def test_an_epoch_or_a_batch_that_is_not_there(arguments: tuple[int, int]) -> None:
    with pytest.raises(InputError):
        small().set_epoch(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("digit", {}, "unknown data 'digit': did you mean 'digits'? known are digits, image_folder"),
        ("mnist-of-mars", {}, "unknown data 'mnist-of-mars': known are digits"),
        ("digits", {"root": "here"}, "got root='here', but reads no files"),
        ("digits", {"dense": True}, "no option 'dense': it takes none of its own"),
        ("examples.data.synthetic:open_synthetic", {"depth": 3}, "no option 'depth': it takes dense, dims"),
    ],
)
def test_open_explains_a_wrong_argument(name: str, arguments: dict[str, object], message: str) -> None:
    with raising(InputError, message):
        shoal.app.data.open(name, **({"batch": 4} | arguments))


@given(ranks=st.integers(1, 5), batch=st.integers(5, 25), number=st.integers(0, 50))
@settings(max_examples=30)
def test_ranks_share_each_batch_of_one_and_nothing_is_lost(ranks: int, batch: int, number: int) -> None:
    alone = epoch(small(batch=batch), number)
    shares = [epoch(of_rank(rank, ranks, batch), number) for rank in range(ranks)]
    for place, together in enumerate(zip(*shares, strict=True)):
        assert torch.equal(torch.cat([images for images, _ in together]), alone[place][0])
        assert torch.equal(torch.cat([labels for _, labels in together]), alone[place][1])
        sizes = [len(labels) for _, labels in together]
        assert max(sizes) - min(sizes) <= 1
        assert ranks == 1 or min(sizes) >= min(2, batch // ranks)
    left_out = alone[len(shares[0]) :]
    assert sum(len(labels) for _, labels in left_out) < 2 * ranks  # which would leave a rank fewer than two


def test_every_rank_tests_in_as_many_batches_though_some_are_empty() -> None:
    shares = [list(of_rank(rank, 3, 6).test) for rank in range(3)]
    assert [[len(labels) for _, labels in share] for share in shares] == [[2, 2, 2, 1], [2, 2, 2, 1], [2, 2, 2, 0]]
    assert shares[2][-1][0].shape == (0, 3, 8, 8)
    assert torch.equal(
        torch.cat([labels for share in zip(*shares, strict=True) for _, labels in share]), torch.arange(20)
    )


def of_rank(rank: int, ranks: int, batch: int) -> Data:
    source = small().train.examples
    whole = Source("small", source.samples, source.samples, (), (8, 8), (100.0,) * 3, (50.0,) * 3, padding=2, flip=True)
    return load(whole, batch=batch, seed=0, workers=0, augmented=True, rank=rank, ranks=ranks)
