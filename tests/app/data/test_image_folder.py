"""Folders of images: splits, classes, and every way they can be wrong."""

from __future__ import annotations

import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

import shoal.app.data
from shoal.app.data.image_folder import DECODERS, Files
from shoal.errors import InputError
from tests.engine.compile.wrong_values import is_readable
from tests.raising import raising


def fill(folder: Path, counts: dict[str, int], size: tuple[int, int] = (20, 12)) -> Path:
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("held", ["test", "val"])
def test_two_splits(tmp_path: Path, held: str) -> None:
    fill(tmp_path / "train", {"cat": 3, "dog": 2})
    fill(tmp_path / held, {"cat": 1, "dog": 1})
    data = shoal.app.data.open("image_folder", root=tmp_path, batch=4, image=16)
    assert data.classes == ("cat", "dog") and data.num_classes == 2
    images, _ = next(iter(data.train))
    assert images.shape == (4, 3, 16, 16) and images.dtype == torch.float32
    assert len(data.train.examples) == 5
    assert torch.cat([labels for _, labels in data.test]).tolist() == [0, 1]


def test_one_split_holds_out_a_seeded_share_of_every_class(tmp_path: Path) -> None:
    fill(tmp_path, {"cat": 10, "dog": 5, "owl": 2})

    def held(seed: int) -> tuple[Path, ...]:
        data = shoal.app.data.open("image_folder", root=tmp_path, batch=4, image=8, seed=seed)
        train, test = data.train.examples.samples, data.test.examples.samples
        assert not set(train.paths) & set(test.paths)
        assert len(train.paths) + len(test.paths) == 17
        assert np.bincount(test.labels).tolist() == [2, 1, 1]
        return test.paths

    assert held(0) == held(0)
    assert held(0) != held(1)


def test_images_are_decoded_in_workers_too(tmp_path: Path) -> None:
    fill(tmp_path, {"cat": 4, "dog": 4})
    alone, helped = (
        list(shoal.app.data.open("image_folder", root=tmp_path, batch=3, image=8, workers=workers).train)
        for workers in (0, 2)
    )
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(alone, helped, strict=True))


def test_other_files_are_no_images(tmp_path: Path) -> None:
    fill(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "cat" / "notes.txt").write_text("mouse")
    (tmp_path / ".thumbnails").mkdir()
    data = shoal.app.data.open("image_folder", root=tmp_path, batch=3, image=8)
    assert data.classes == ("cat", "dog") and len(data.train.examples) == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["truncated", "text"])
def test_an_image_that_cannot_be_decoded_is_named_in_one_line(tmp_path: Path, workers: int, damage: str) -> None:
    fill(tmp_path, {"cat": 4, "dog": 4})
    bad = tmp_path / "dog" / "1.png"
    bad.write_bytes(bad.read_bytes()[:100] if damage == "truncated" else b"not an image")
    data = shoal.app.data.open("image_folder", root=tmp_path, batch=2, image=8, workers=workers)
    with raising(InputError, "dog/1.png") as caught:
        list(data.train)
        list(data.test)
    assert str(caught.value).startswith("cannot decode")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("suffix", sorted(DECODERS))
def test_no_program_is_started_to_decode_a_file(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *given, **named: started.append(given))
    path = tmp_path / f"image{suffix}"
    path.write_bytes(POSTSCRIPT)
    with pytest.raises(InputError):
        Files((path,), (0,), 8).read(0)
    assert not started


@pytest.mark.parametrize("decoder", ["PCX", "TGA", "ICO", "SGI", "EPS"])
def test_only_the_decoders_of_the_listed_suffixes_are_used(tmp_path: Path, decoder: str) -> None:
    path = tmp_path / "image.png"
    Image.new("RGB", (16, 16)).save(path, decoder)
    with pytest.raises(InputError):
        Files((path,), (0,), 8).read(0)


@pytest.mark.parametrize("suffix", sorted(DECODERS))
def test_every_listed_suffix_is_decoded(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"image{suffix.upper()}"
    Image.new("RGB", (16, 16), (200, 200, 200)).save(path, DECODERS[suffix])
    pixels, _ = Files((path,), (0,), 8).read(0)
    assert pixels.shape == (3, 8, 8) and (pixels > 190).all()


def test_a_png_named_jpeg_is_read_as_imagenet_has_one(tmp_path: Path) -> None:
    path = tmp_path / "n02105855_2933.JPEG"
    Image.new("RGB", (16, 16), (200, 200, 200)).save(path, "PNG")
    assert (Files((path,), (0,), 8).read(0)[0] == 200).all()


def broken(tmp_path: Path, fault: str) -> dict[str, object]:
    root = tmp_path / "set"
    if fault in ("no root", "no such folder"):
        return {} if fault == "no root" else {"root": root}
    if fault in ("unknown class", "missing class", "empty class in test"):
        fill(root / "train", {"cat": 2, "dog": 2})
        fill(root / "test", {"cat": 1} if fault == "missing class" else {"cat": 1, "dog": fault == "unknown class"})
        if fault == "unknown class":
            fill(root / "test", {"wolf": 1})
    elif fault == "no test split":
        fill(root / "train", {"cat": 2})
    elif fault == "no classes":
        root.mkdir()
    elif fault == "one image":
        fill(root, {"cat": 2, "dog": 1})
    else:
        fill(root, {"cat": 2, "dog": 0 if fault == "empty class" else 2})
    return {"root": root} | ({"holdout": 1.5} if fault == "holdout" else {})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no root", ""),
        ("no such folder", ""),
        ("no classes", ""),
        ("no test split", "'train'"),
        ("unknown class", "'wolf'"),
        ("missing class", "'dog'"),
        ("empty class", ""),
        ("empty class in test", "test/dog"),
        ("one image", ""),
        ("holdout", "holdout=1.5"),
    ],
)
def test_a_folder_that_is_not_as_expected(tmp_path: Path, fault: str, message: str) -> None:
    with raising(InputError, message):
        shoal.app.data.open("image_folder", batch=2, image=8, **broken(tmp_path, fault))


def one_file(folder: Path, content: bytes) -> Files:
    path = folder / "image.png"
    path.write_bytes(content)
    return Files((path,), (0,), 8)


def png(image: Image.Image, **options: object) -> bytes:
    whole = BytesIO()
    image.save(whole, "PNG", **options)
    return whole.getvalue()


@pytest.mark.parametrize("size", [(12_000, 12_000), (20_000, 20_000), (1, 200_000_000)])
def test_a_small_file_of_too_many_pixels_is_refused_by_name_in_one_line(tmp_path: Path, size: tuple[int, int]) -> None:
    content = bytearray(png(Image.new("1", (8, 8))))
    content[16:24] = struct.pack(">II", *size)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with raising(InputError, "image.png", "89,478,485"):
            one_file(tmp_path, bytes(content)).read(0)


def test_a_long_thin_file_is_read_in_little_memory(tmp_path: Path) -> None:
    content = png(Image.new("L", (65_000, 1), 200))
    assert len(content) < 400
    pixels, _ = one_file(tmp_path, content).read(0)
    assert pixels.shape == (3, 8, 8) and (pixels == 200).all()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of damaged tags
def test_a_damaged_image_is_one_that_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    drawn = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8))
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        whole = BytesIO()
        drawn.save(whole, kind)
        content = whole.getvalue()
        refused = 0
        for turn in range(60):
            damaged = bytearray(content[: len(content) * turn // 40] if turn < 40 else content)
            for _ in range(2 * (turn >= 40)):
                damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
            try:
                pixels, _ = one_file(tmp_path, bytes(damaged)).read(0)
                assert pixels.shape == (3, 8, 8)
            except InputError as error:
                assert "image.png" in str(error) and is_readable(error)
                refused += 1
        assert refused >= 20
