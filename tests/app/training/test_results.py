"""One run at a time writes to a folder, and a run that was killed leaves nothing that keeps the next one out."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.app.training import results as module
from shoal.app.training.results import run_folder
from shoal.core import files
from shoal.errors import InputError
from tests.raising import raising

FORK = multiprocessing.get_context("fork")


def in_a_process(call: Callable[[], object]) -> int | None:
    process = FORK.Process(target=call)
    process.start()
    process.join()
    return process.exitcode


def test_a_second_run_is_refused_in_one_line_that_names_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "net"

    def second() -> None:
        with (
            raising(InputError, folder),
            run_folder(folder),
        ):
            pytest.fail("two runs in one folder")

    with run_folder(folder):
        second()
        assert in_a_process(second) == 0
        with run_folder(tmp_path / "runs" / "other"):
            pass
    with run_folder(folder):
        pass
    assert list(folder.iterdir()) == []


def test_a_killed_run_leaves_no_lock_and_its_half_written_file_is_removed(tmp_path: Path) -> None:
    def killed() -> None:
        with run_folder(tmp_path):
            files.write_atomically(tmp_path / "checkpoint.pt", lambda file: os.kill(os.getpid(), signal.SIGKILL))

    assert in_a_process(killed) == -signal.SIGKILL
    assert [entry.suffix for entry in tmp_path.iterdir()] == [".partial"]
    with run_folder(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_worker_that_outlives_its_run_does_not_keep_the_folder(tmp_path: Path) -> None:
    read, write = os.pipe()
    with run_folder(tmp_path):
        worker = os.fork()
        if worker == 0:
            os.write(write, b"x")
            signal.pause()
        os.read(read, 1)
    # What the worker had inherited would hold the lock on.
    with run_folder(tmp_path):
        pass
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)


def test_where_there_are_no_locks_the_run_is_reported_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module, "try_lock", refuse)
    with run_folder(tmp_path):
        pass
    assert "cannot be locked (No locks available)" in caplog.text
