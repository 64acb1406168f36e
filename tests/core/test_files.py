"""A file appears whole or not at all, and what was there before stays until it does."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import files
from shoal.core.files import cache_dir, remove_partials, write_atomically, write_json, write_text
from shoal.errors import InputError
from tests.raising import raising

FORK = multiprocessing.get_context("fork")


def in_a_process(call: Callable[..., object], *arguments: object) -> int | None:
    """The exit code of a process that makes this call."""
    process = FORK.Process(target=call, args=arguments)
    process.start()
    process.join()
    return process.exitcode


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

    with pytest.raises(InputError):
        write_atomically(tmp_path / "file", fill)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["missing/file", "file/below a file", "."])
def test_a_place_that_no_file_can_have_is_said_in_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(InputError):
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
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(plain)
def test_json_reads_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = write_json(tmp_path_factory.getbasetemp() / "value.json", value)
    assert json.loads(path.read_text()) == value
    assert path.read_text().endswith("\n")


def test_a_number_that_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    value = {"nan": math.nan, "all": [1.5, (math.inf, -math.inf)], "text": "NaN"}
    path = write_json(tmp_path / "value.json", value)
    assert json.loads(path.read_text()) == {"nan": None, "all": [1.5, [None, None]], "text": "NaN"}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_written_as_utf8_without_change(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = write_text(tmp_path_factory.getbasetemp() / "text", text)
    assert path.read_bytes() == text.encode("utf-8")


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"

    def half(file: IO[bytes]) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_process(write_atomically, path, half) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".partial")

    def write(file: IO[bytes]) -> None:
        assert not left.exists()  # removed when the next save began
        (mine,) = tmp_path.iterdir()
        write_text(path, "another process saves meanwhile")
        remove_partials(tmp_path)
        assert mine.exists()
        file.write(b"whole")

    write_atomically(path, write)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"whole"


def test_partials_of_other_files_stay_until_the_folder_is_swept(tmp_path: Path) -> None:
    other = tmp_path / ".other.json.abc.partial"
    other.write_text("half")
    (tmp_path / ".hidden").write_text("mine")
    write_text(tmp_path / "file", "text")
    assert other.exists()
    remove_partials(tmp_path)
    assert not other.exists() and (tmp_path / ".hidden").exists()
    remove_partials(tmp_path / "missing")


@pytest.mark.timeout(60)
def test_what_only_has_the_name_of_a_partial_file_is_not_opened_and_stays(tmp_path: Path) -> None:
    odd = {name: tmp_path / f".it.{name}.partial" for name in ("fifo", "folder", "link")}
    os.mkfifo(odd["fifo"])  # who opens it waits for a writer
    odd["folder"].mkdir()
    odd["link"].symlink_to(odd["fifo"])
    remove_partials(tmp_path)
    write_text(tmp_path / "it", "written")
    assert (tmp_path / "it").read_text() == "written" and all(
        path.is_symlink() or path.exists() for path in odd.values()
    )


def test_where_there_are_no_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    left = tmp_path / ".file.abc.partial"
    left.write_text("half")
    assert write_text(tmp_path / "file", "text").read_text() == "text"
    assert left.exists()


def test_processes_that_save_at_the_same_time_do_not_remove_each_others_work(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def save() -> None:
        for turn in range(40):
            write_text(path, str(turn) * 1000)

    running = [FORK.Process(target=save) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join()
        assert process.exitcode == 0
    assert path.read_text() == "39" * 1000
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_variable_decides_and_the_folder_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "deep" / "cache"))
    assert cache_dir() == tmp_path / "deep" / "cache"
    assert cache_dir().is_dir() and not list(cache_dir().iterdir())


def test_else_it_lies_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "shoal"


def test_an_earlier_cache_is_found_whatever_the_platform_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_dir() == tmp_path / "elsewhere" / "shoal"
    (tmp_path / ".cache" / "shoal").mkdir(parents=True)
    assert cache_dir() == tmp_path / ".cache" / "shoal"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/shoal-cache"])
def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / place))
    with raising(InputError, "SHOAL_CACHE=", "SHOAL_CACHE"):
        cache_dir()
