"""How fast a folder's disk is: what is written, what is left over, and what is told of a bad folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.cost import measure_disk as module
from shoal.cost.measure_disk import FILE_BYTES, file_rates
from shoal.errors import InputError
from tests.raising import raising


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_SECONDS", 0.0)


@pytest.mark.parametrize("direct", [True, False])
def test_the_rates_are_possible_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    before = set(os.listdir("/proc/self/fd"))
    rates = file_rates(tmp_path)
    assert 1e5 < rates.write_bytes_per_second < 1e13
    assert 1e5 < rates.read_bytes_per_second < 1e13
    assert 0 < rates.write_seconds < 10
    assert 0 < rates.read_seconds < 10
    assert 0 < rates.allocation_seconds < 100
    assert direct or not rates.direct
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_all_of_the_file_is_written_and_read_in_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    pwritev, preadv = os.pwritev, os.preadv

    def write(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        written.append((offset, len(pieces[0])))
        return pwritev(descriptor, pieces, offset)

    def fill(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        read.append((offset, len(pieces[0])))
        return preadv(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "preadv", fill)
    file_rates(tmp_path)
    for log in (written, read):
        assert all(offset % 4096 == 0 and nbytes % 4096 == 0 for offset, nbytes in log)
        large = [(offset, nbytes) for offset, nbytes in log if nbytes > 4096]
        assert sum(nbytes for _, nbytes in large) == 2 * FILE_BYTES  # a run that warms up, and one
        assert sum(nbytes for _, nbytes in dict(large).items()) == FILE_BYTES


def test_a_file_system_without_direct_io_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def refuses(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", refuses)
    assert not file_rates(tmp_path).direct


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raising(InputError, "64 MiB"):
        file_rates(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with raising(InputError, "folder='", "nowhere'"):
        file_rates(tmp_path / "nowhere")
