"""How fast bytes go from memory to a file and back: what an offload to a local disk can count on."""

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
_PIECE_BYTES = 8 * 2**20
_BLOCK_BYTES = 4096  # direct I/O takes whole blocks from whole pages
_LEAST_SECONDS = 0.5  # of runs of one measurement


@dataclass(frozen=True)
class FileRates:
    """A file in one folder.

    Attributes:
        direct: by direct I/O; else through the page cache, flushed after each write and dropped before each read
            where the operating system can.
        write_bytes_per_second, read_bytes_per_second: over all runs, for a disk with a cache of its own is fast at
            first.
        write_seconds, read_seconds: of one block of 4 KiB.
        allocation_seconds: of `FILE_BYTES` of the file, before anything is written to them.
    """

    direct: bool
    write_bytes_per_second: float
    read_bytes_per_second: float
    write_seconds: float
    read_seconds: float
    allocation_seconds: float


def file_rates(folder: str | Path) -> FileRates:
    """Write a file of 64 MiB without a name in `folder`, read it back, again and again for a second.

    The file is gone when this returns, and also when the process is killed.

    Raises:
        InputError: the folder is not there, not writable, or full.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _rates(_File(file.fileno(), _pages(_PIECE_BYTES)))
    except OSError as error:
        raise InputError(
            f"folder={str(folder)!r} cannot hold a file of {FILE_BYTES >> 20} MiB: {error.strerror or error}; give a "
            "writable folder of a local disk with free space"
        ) from error


class _File:
    """An open file and the memory that it is written from and read into."""

    def __init__(self, descriptor: int, pages: memoryview) -> None:
        self._descriptor = descriptor
        self._pages = pages
        self.direct = _made_direct(descriptor, pages[:_BLOCK_BYTES])

    def allocate(self) -> None:
        """Give the file all its blocks."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, FILE_BYTES)
        else:
            os.truncate(self._descriptor, FILE_BYTES)

    def write(self, nbytes: int) -> None:
        """Memory to disk."""
        for offset in range(0, nbytes, _PIECE_BYTES):
            piece = self._pages[: nbytes - offset]
            if os.pwritev(self._descriptor, [piece], offset) != len(piece):
                raise OSError("it took only part of a write")
        if not self.direct:
            os.fsync(self._descriptor)

    def read(self, nbytes: int) -> None:
        """Disk to memory."""
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, nbytes, _PIECE_BYTES):
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
    run()  # the first write of a block that was only allocated also marks it as written
    start = time.perf_counter()
    runs, seconds = 0, 0.0
    while seconds < _LEAST_SECONDS or runs == 0:
        run()
        runs += 1
        seconds = time.perf_counter() - start
    return seconds / runs


def _pages(nbytes: int) -> memoryview:
    """Whole pages that are really there, and not of zeros: some disks do not store zeros."""
    memory = mmap.mmap(-1, nbytes)
    memory.write(os.urandom(nbytes))
    return memoryview(memory)


def _made_direct(descriptor: int, block: memoryview) -> bool:
    """Turn direct I/O on; False, and off, where the system or the file system has none."""
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
