"""Slabs in one unlinked file on a local disk, which the operating system deletes when the process ends.

Disk space is allocated when a slab is made, not when it is written. Where the file system supports it, direct I/O
bypasses the page cache; elsewhere pages are dropped from the cache, so that more than the host's
memory can be offloaded.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path

from shoal.core.sizes import HOST_PAGE_BYTES, format_bytes, in_pages
from shoal.errors import TransferError
from shoal.offload.links.slab import Slab

_BOUNCE_BYTES = 4 << 20
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
_DIRECT = getattr(os, "O_DIRECT", 0)


class SpillFile:
    """An unlinked file in `folder`; slabs are ranges of it.

    One thread may write while another reads: each direction has a buffer of its own, aligned for direct I/O.

    Attributes:
        direct: whether it uses direct I/O.

    Raises:
        TransferError: the folder does not exist or cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.direct = bool(_DIRECT)
        self._fd = self._opened(_DIRECT)
        self._pid = os.getpid()
        self._end = 0
        self._growing = threading.Lock()
        self._out = _Bounce()
        self._back = _Bounce()
        weakref.finalize(self, os.close, self._fd)
        if self.direct and not self._takes_direct():
            self.direct = False
            plain = self._opened(0)
            os.dup2(plain, self._fd, inheritable=False)
            os.close(plain)

    def allocate(self, nbytes: int) -> int:
        """Allocate `nbytes` on the disk; returns their position in the file.

        Raises:
            TransferError: the disk is full.
        """
        with self._growing:
            position = self._end
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._fd, position, nbytes)
                else:
                    os.ftruncate(self._fd, position + nbytes)
            except OSError as error:
                self.discard(position, nbytes)
                raise TransferError(
                    f"{self.folder} has no room for {format_bytes(nbytes)}: {os.strerror(error.errno or 0)}; "
                    "free disk space, offload less or give a folder on another disk"
                ) from error
            self._end += nbytes
            return position

    def discard(self, position: int, nbytes: int) -> None:
        """Give these bytes back to the disk, where the file system can do that for a part of a file."""
        punch = getattr(ctypes.CDLL(None), "fallocate", None)
        if punch is not None and os.getpid() == self._pid:  # a forked child shares the file
            offsets = (ctypes.c_int64(position), ctypes.c_int64(nbytes))
            punch(ctypes.c_int(self._fd), ctypes.c_int(_KEEP_SIZE_AND_PUNCH_HOLE), *offsets)

    def write(self, position: int, address: int, nbytes: int) -> None:
        """Write from memory. `position` is aligned; a last page is written whole."""
        for done in range(0, nbytes, _BOUNCE_BYTES):
            part = min(_BOUNCE_BYTES, nbytes - done)
            ctypes.memmove(self._out.address, address + done, part)
            view, at = self._out.view[: in_pages(part)], position + done
            while view:
                count = os.pwritev(self._fd, [view], at)
                view, at = view[count:], at + count
            self._uncache(position + done, part)

    def read(self, position: int, address: int, nbytes: int) -> None:
        """Read into memory what `write` wrote."""
        for done in range(0, nbytes, _BOUNCE_BYTES):
            part = min(_BOUNCE_BYTES, nbytes - done)
            view, at = self._back.view[: in_pages(part)], position + done
            while view:
                count = os.preadv(self._fd, [view], at)
                if count == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written to it")
                view, at = view[count:], at + count
            ctypes.memmove(address + done, self._back.address, part)
            self._uncache(position + done, part)

    def flush(self) -> None:
        """Return when what was written is on the disk."""
        if not self.direct:
            os.fsync(self._fd)

    def _uncache(self, position: int, nbytes: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            # For a dirty page this only starts writeback; it is called again when the page is read.
            os.posix_fadvise(self._fd, position, nbytes, os.POSIX_FADV_DONTNEED)

    def _opened(self, flags: int) -> int:
        try:
            if hasattr(os, "O_TMPFILE"):
                try:
                    return os.open(self.folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                        raise
            return self._opened_and_unlinked(flags)
        except OSError as error:
            raise TransferError(
                f"no file for offloaded bytes can be made in {self.folder}: {os.strerror(error.errno or 0)}; give a "
                "folder on a local disk that exists and can be written"
            ) from error

    def _opened_and_unlinked(self, flags: int) -> int:
        """For file systems without O_TMPFILE."""
        fd, name = tempfile.mkstemp(prefix=".shoal-offload-", dir=self.folder)
        try:
            if not flags:
                return fd
            try:
                direct = os.open(name, os.O_RDWR | flags)
            except OSError:
                self.direct = False
                return fd
            os.close(fd)
            return direct
        finally:
            os.unlink(name)

    def _takes_direct(self) -> bool:
        """Some file systems accept O_DIRECT when a file is opened and refuse it on reads and writes."""
        page = self._out.view[:HOST_PAGE_BYTES]
        try:
            return os.pwritev(self._fd, [page], 0) == HOST_PAGE_BYTES and os.preadv(self._fd, [page], 0) > 0
        except OSError:
            return False


class _Bounce:
    """A page-aligned buffer."""

    def __init__(self) -> None:
        self.view = memoryview(mmap.mmap(-1, _BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


class FileSlab(Slab):
    """A range of a `SpillFile`, freed on the disk when the slab is freed.

    Raises:
        TransferError: the disk is full.
    """

    def __init__(self, file: SpillFile, nbytes: int) -> None:
        super().__init__(nbytes)
        self._file = file
        self._position = file.allocate(nbytes)
        weakref.finalize(self, file.discard, self._position, nbytes)

    def write(self, offset: int, address: int, nbytes: int) -> None:
        self._file.write(self._position + offset, address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        self._file.read(self._position + offset, address, nbytes)
