"""C++ is compiled once and kept; what is in the way is told in one line."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import InputError
from shoal.lowlevel import extension
from shoal.lowlevel.extension import compiled, loaded
from tests.raising import raising

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="an extension needs a C++ compiler"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }')
    return path


@needs_compiler
def test_a_library_is_built_once_and_again_when_its_source_changes(source: Path) -> None:
    built = compiled(source, "an answer")
    assert ctypes.CDLL(str(built)).answer() == 42
    made = built.stat().st_mtime_ns
    assert compiled(source, "an answer") == built
    assert built.stat().st_mtime_ns == made
    source.write_text('extern "C" int answer() { return 43; }')
    assert ctypes.CDLL(str(compiled(source, "an answer"))).answer() == 43


def cut(path: Path, nbytes: int) -> None:
    os.truncate(path, nbytes)


def in_its_place(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: cut(path, 0),
    "cut within": lambda path: cut(path, 6_000),
    "cut at the end": lambda path: cut(path, path.stat().st_size - 1),
    "a bit": lambda path: path.write_bytes(path.read_bytes()[:5_000] + b"?" + path.read_bytes()[5_001:]),
    "garbage": lambda path: path.write_bytes(bytes(9_000)),
    "folder": lambda path: in_its_place(path, lambda place: (place / "inner").mkdir(parents=True)),
    "FIFO": lambda path: in_its_place(path, os.mkfifo),
    "link that leads nowhere": lambda path: in_its_place(path, lambda place: place.symlink_to("nowhere")),
}


@needs_compiler
@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again(source: Path, damage: str) -> None:
    built = compiled(source, "an answer")
    whole = built.read_bytes()
    DAMAGES[damage](built)
    assert loaded(source, "an answer").answer() == 42
    assert len(built.read_bytes()) == len(whole) and not list(built.parent.glob(".*"))


@needs_compiler
def test_one_that_does_not_load_is_said_in_one_line(source: Path) -> None:
    source.write_text('extern "C" int missing_function(); extern "C" int answer() { return missing_function(); }')
    compiled(source, "an answer")
    with raising(InputError, "missing_function"):
        loaded(source, "an answer").answer()


def test_no_compiler_is_said_in_one_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError):
        compiled(source, "an answer")


@needs_compiler
def test_an_error_of_the_compiler_is_said_in_one_line(source: Path) -> None:
    source.write_text("int answer( {")
    with pytest.raises(InputError):
        compiled(source, "an answer")


@needs_compiler
def test_a_cache_that_cannot_be_written_is_said_in_one_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "cache_dir", lambda: source)
    with pytest.raises(InputError):
        compiled(source, "an answer")
