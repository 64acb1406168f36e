"""A file appears whole or not at all, and what was there before stays until it does."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.files import write_atomically, write_json, write_text


@pytest.mark.parametrize("before", [None, b"old"])
def test_an_error_while_writing_leaves_what_was_there_and_nothing_else(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)

    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        file.flush()
        assert (path.read_bytes() if path.exists() else None) == before
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if before is None else ["file"])
    assert (path.read_bytes() if path.exists() else None) == before


def test_the_name_appears_with_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(file: IO[bytes]) -> None:
        file.write(b"first")
        assert not path.exists()
        file.write(b"last")

    assert write_atomically(str(path), write) == path
    assert path.read_bytes() == b"firstlast"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(file: IO[bytes]) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="cannot write .*file: No space left on device; give a writable folder"):
        write_atomically(tmp_path / "file", fill)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["missing/file", "file/below a file", "."])
def test_a_place_that_no_file_can_have_is_said_in_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(InputError, match="cannot write"):
        write_text(tmp_path / place, "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_who_may_read_it_is_for_the_umask_to_say(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "text")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_json_reads_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = write_json(tmp_path_factory.getbasetemp() / "value.json", value)
    assert json.loads(path.read_text()) == value
    assert path.read_text().endswith("\n")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_written_as_utf8_without_change(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write_text(tmp_path_factory.getbasetemp() / "text", text)
    assert path.read_bytes() == text.encode("utf-8")
