"""Both forms of CIFAR-10, whole and damaged: small copies, and the real archive where it lies."""

from __future__ import annotations

import io
import itertools
import lzma
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import shoal.app.data
from examples.data import cifar10, data_dir
from examples.data.cifar10 import ARCHIVE, BATCHES, CLASSES
from shoal.errors import InputError
from tests.raising import raising

CIFAR10 = "examples.data.cifar10:open_cifar10"
SMALL = {"train": 20, "test": 10}


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cifar10, "SAMPLES", SMALL)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def jpeg(level: int, side: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), (level, 255 - level, 7)).save(file, "JPEG")
    return file.getvalue()


def members() -> dict[str, bytes]:
    return {
        f"{split}/{name}/{number:04}.jpg": jpeg(20 * CLASSES.index(name) + number)
        for split, count in SMALL.items()
        for name in CLASSES
        for number in range(count // 10)
    }


def archive(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    with tarfile.open(folder / ARCHIVE, "w:xz", preset=0) as tar:
        for name, content in (members() if files is None else files).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return folder / ARCHIVE


def batches(folder: Path, labels: list[int] | None = None) -> Path:
    """torchvision's layout, five training files of four images and a test file of ten."""
    root = folder / BATCHES
    root.mkdir()
    rng = np.random.default_rng(0)
    order = labels if labels is not None else list(range(10)) * 3
    for name, start, count in [(f"data_batch_{i + 1}", 4 * i, 4) for i in range(5)] + [("test_batch", 20, 10)]:
        batch = {
            "batch_label": name,
            "labels": order[start : start + count],
            "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
        }
        (root / name).write_bytes(pickle.dumps(batch, protocol=2))
    return root


@pytest.mark.usefixtures("_small")
def test_the_archive_gives_every_image_with_its_folders_class(tmp_path: Path) -> None:
    archive(tmp_path)
    data = shoal.app.data.open(CIFAR10, root=tmp_path, batch=10, augment=False)
    ((images, labels),) = list(data.test)
    assert labels.tolist() == list(range(10)) and data.classes == CLASSES
    red = images[:, 0].mean((1, 2)) * cifar10.DEVIATION[0] + cifar10.MEAN[0]
    torch.testing.assert_close(red, 20.0 * torch.arange(10), rtol=0, atol=3)
    assert [len(data.train.examples), len(data.test.examples)] == [20, 10]
    assert (data.num_classes, data.in_channels, data.image) == (10, 3, 32)


@pytest.mark.usefixtures("_small")
def test_the_archive_is_decoded_once_and_again_if_the_copy_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    read = cifar10.read_archive

    def counted(*arguments: object) -> cifar10.Arrays:
        decoded.append(1)
        return read(*arguments)

    monkeypatch.setattr(cifar10, "read_archive", counted)
    archive(tmp_path)

    def pixels() -> np.ndarray:
        return shoal.app.data.open(CIFAR10, root=tmp_path, batch=4).train.examples.samples.pixels

    first = pixels()
    assert np.array_equal(pixels(), first) and len(decoded) == 1
    (kept,) = (tmp_path / "cache").glob("*.npz")
    for damage in (kept.read_bytes()[:1000], b"", b"PK" * 50):
        kept.write_bytes(damage)
        decoded.clear()
        assert np.array_equal(pixels(), first) and len(decoded) == 1
    for make in (Path.mkdir, os.mkfifo):
        kept.rmdir() if kept.is_dir() else kept.unlink()
        make(kept)
        assert np.array_equal(pixels(), first)
    archive(tmp_path, members() | {"train/cat/0000.jpg": jpeg(250)})
    assert not np.array_equal(pixels(), first)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("where", ["root", "folder itself", "variable"])
def test_torchvisions_folder_gives_its_images(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = batches(tmp_path)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    arguments = {"root": tmp_path, "folder itself": root, "variable": None}
    data = shoal.app.data.open(CIFAR10, root=arguments[where], batch=10)
    (_, labels), *_ = list(data.test)
    assert labels.tolist() == list(range(10))
    raw = pickle.loads((root / "test_batch").read_bytes())["data"]
    assert np.array_equal(data.test.examples.samples.pixels[3, 5, 6], raw[3, [5 * 32 + 6, 1189 + 1, 2048 + 166]])


@pytest.mark.usefixtures("_small")
def test_other_sizes_are_resized(tmp_path: Path) -> None:
    archive(tmp_path)
    images, _ = next(iter(shoal.app.data.open(CIFAR10, root=tmp_path, batch=2, image=48).train))
    assert images.shape == (2, 3, 48, 48)


def test_where_it_looked_and_how_to_point_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    with raising(InputError, "CIFAR-10", tmp_path, ARCHIVE, "SHOAL_DATA"):
        shoal.app.data.open(CIFAR10, batch=4)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_a_truncated_archive(tmp_path: Path, share: float) -> None:
    path = archive(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with raising(InputError, ARCHIVE):
        shoal.app.data.open(CIFAR10, root=tmp_path, batch=4)
    assert not list((tmp_path / "cache").glob("*.npz"))


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train/wolf/0000.jpg": jpeg(1)}, "train/wolf/0000.jpg"),
        ({"dev/cat/0000.jpg": jpeg(1)}, "dev/cat/0000.jpg"),
        ({"train/cat/0001.jpg": b"not an image"}, "train/cat/0001.jpg"),
        ({"train/cat/0001.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n"}, "0001.jpg"),
        ({"train/cat/0001.jpg": jpeg(1)[:300]}, "train/cat/0001.jpg"),
        ({"train/cat/0001.jpg": jpeg(1, side=16)}, "(16, 16, 3)"),
        ({"test/cat/0001.jpg": jpeg(1)}, "'test'"),
    ],
)
def test_an_archive_with_a_bad_member(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    archive(tmp_path, members() | files)
    with raising(InputError, message):
        shoal.app.data.open(CIFAR10, root=tmp_path, batch=4)


@pytest.mark.usefixtures("_small")
def test_an_archive_whose_class_is_empty(tmp_path: Path) -> None:
    files = {name.replace("test/truck/", "test/ship/1"): content for name, content in members().items()}
    archive(tmp_path, files)
    with raising(InputError, "10"):
        shoal.app.data.open(CIFAR10, root=tmp_path, batch=4)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_out_of_range(tmp_path: Path, label: int) -> None:
    batches(tmp_path, [label, *list(range(10)) * 3][:30])
    with raising(InputError, label):
        shoal.app.data.open(CIFAR10, root=tmp_path, batch=4)


class Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3", None, "data_batch_3"),
        ("test_batch", b"", "test_batch"),
        ("test_batch", "half", "test_batch"),
        ("test_batch", pickle.dumps(Harm()), "UnpicklingError"),
        ("test_batch", pickle.dumps([1, 2]), "CIFAR-10"),
        ("test_batch", pickle.dumps({"labels": [1]}), "KeyError"),
        ("test_batch", pickle.dumps({"data": [[1, 2]], "labels": [1]}), "(1, 2)"),
    ],
)
def test_a_bad_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = batches(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:2000] if isinstance(content, str) else content)
    with raising(InputError, message):
        shoal.app.data.open(CIFAR10, root=tmp_path, batch=4)
    assert not (tmp_path / "harm").exists()


def test_numpys_old_and_new_pickles_are_both_read() -> None:
    for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        content = pickle.dumps({"data": np.arange(5, dtype=np.uint8)}, protocol=2)
        content = content.replace(b"numpy._core.multiarray", module).replace(b"numpy.core.multiarray", module)
        loaded = cifar10._ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
        assert loaded["data"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_the_real_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = data_dir() / ARCHIVE
    if not path.is_file():
        pytest.skip(f"{path} is not there; set SHOAL_DATA to the folder that holds it")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    decode, asked = cifar10._decode, itertools.count()

    def every_fiftieth(content: bytes, name: str) -> NDArray[np.uint8]:
        """Of 60,000 images; the others are black."""
        return np.zeros((32, 32, 3), np.uint8) if next(asked) % 50 else decode(content, name)

    monkeypatch.setattr(cifar10, "_decode", every_fiftieth)
    data = shoal.app.data.open(CIFAR10, batch=128)
    train, test = data.train.examples.samples, data.test.examples.samples
    assert np.bincount(train.labels).tolist() == [5000] * 10 and np.bincount(test.labels).tolist() == [1000] * 10
    measured = train.pixels[train.pixels.any((1, 2, 3))].reshape(-1, 3)
    assert len(measured) == 1000 * 32 * 32
    np.testing.assert_allclose(measured.mean(0), cifar10.MEAN, atol=4)  # red and blue are 11 apart
    np.testing.assert_allclose(measured.std(0), cifar10.DEVIATION, atol=4)


def test_an_archive_that_unpacks_to_gigabytes_is_refused_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "_MAX_ARCHIVE_BYTES", 2**20)
    packed = lzma.compress(bytes(2**22))
    assert len(packed) < 2000
    with raising(InputError, "bomb.tar.xz", "1048576"):
        cifar10.read_archive(tmp_path / "bomb.tar.xz", packed)


def test_a_batch_whose_pickle_asks_for_a_far_place_in_its_memory_gets_no_memory_for_it(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02}r\x00\x00\x00\x70.")  # puts an empty dictionary at place 0x70000000
    with raising(InputError, "CIFAR-10", "KeyError: 'data'"):
        cifar10._read_batch(path)
