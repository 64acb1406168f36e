"""The bandwidth and latency of a file on a local disk, for offloading."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import InputError

FILE_BYTES = 64 * 2**20
_CHUNK_BYTES = 8 * 2**20
_BLOCK_BYTES = 4096  # direct I/O needs whole, page-aligned blocks
_MIN_SECONDS = 0.5  # of runs of one measurement


@dataclass(frozen=True)
class FileRates:
    """A file in one folder.

    Attributes:
        direct: measured with direct I/O; else through the page cache, flushed after each write and, if possible,
            dropped before each read.
        write_bytes_per_second, read_bytes_per_second: the mean over all runs, because the disk's own cache makes the
            first ones fast.
        write_seconds, read_seconds: of one block of 4 KiB.
        allocation_seconds: of allocating `FILE_BYTES` on the disk.
    """

    direct: bool
    write_bytes_per_second: float
    read_bytes_per_second: float
    write_seconds: float
    read_seconds: float
    allocation_seconds: float


def file_rates(folder: str | Path) -> FileRates:
    """Write and read an unlinked file of 64 MiB in `folder`, repeatedly for a second.

    The file is deleted when this returns, and also when the process is killed.

    Raises:
        InputError: the folder does not exist, is not writable, or is full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _rates(_File(file.fileno(), _pages(_CHUNK_BYTES)))
    except OSError as error:
        raise InputError(
            f"folder={str(folder)!r} cannot hold a file of {FILE_BYTES >> 20} MiB: {error.strerror or error}; give a "
            "writable folder of a local disk with free space"
        ) from error


class _File:
    """An open file and its buffer."""

    def __init__(self, descriptor: int, pages: memoryview) -> None:
        self._descriptor = descriptor
        self._pages = pages
        self.direct = _made_direct(descriptor, pages[:_BLOCK_BYTES])

    def allocate(self) -> None:
        """Allocate all blocks of the file."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, FILE_BYTES)
        else:
            os.truncate(self._descriptor, FILE_BYTES)

    def write(self, nbytes: int) -> None:
        """Copy memory to disk."""
        for offset in range(0, nbytes, _CHUNK_BYTES):
            piece = self._pages[: nbytes - offset]
            if os.pwritev(self._descriptor, [piece], offset) != len(piece):
                raise OSError("it took only part of a write")
        if not self.direct:
            os.fsync(self._descriptor)

    def read(self, nbytes: int) -> None:
        """Copy disk to memory."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, nbytes, _CHUNK_BYTES):
            piece = self._pages[: nbytes - offset]
            if os.preadv(self._descriptor, [piece], offset) != len(piece):
                raise OSError("it gave only part of a read")


def _rates(file: _File) -> FileRates:
    start = time.perf_counter()
    file.allocate()
    allocation_seconds = time.perf_counter() - start
    return FileRates(
        direct=file.direct,
        write_bytes_per_second=FILE_BYTES / _mean_seconds(lambda: file.write(FILE_BYTES)),
        read_bytes_per_second=FILE_BYTES / _mean_seconds(lambda: file.read(FILE_BYTES)),
        write_seconds=_mean_seconds(lambda: file.write(_BLOCK_BYTES)),
        read_seconds=_mean_seconds(lambda: file.read(_BLOCK_BYTES)),
        allocation_seconds=allocation_seconds,
    )


def _mean_seconds(run: Callable[[], None]) -> float:
    run()  # the first write to an allocated block also updates the metadata
    start = time.perf_counter()
    runs, seconds = 0, 0.0
    while seconds < _MIN_SECONDS or runs == 0:
        run()
        runs += 1
        seconds = time.perf_counter() - start
    return seconds / runs


def _pages(nbytes: int) -> memoryview:
    """Random bytes in whole pages: some disks do not store zeros."""
    memory = mmap.mmap(-1, nbytes)
    memory.write(os.urandom(nbytes))
    return memoryview(memory)


def _made_direct(descriptor: int, block: memoryview) -> bool:
    """Turn on direct I/O; False if the system or the file system does not support it."""
    try:
        import fcntl
    except ImportError:
        return False
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(descriptor, [block], 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True
