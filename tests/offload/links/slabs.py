"""Slabs that wait, fail or count on demand, and the link that uses them."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from shoal.offload.links.copy_thread import Pace, ThreadLink
from shoal.offload.links.host import HostSlab

_PATIENCE_SECONDS = 60


class RehearsedHost:
    """What the slabs of one link have in common.

    Attributes:
        gate: closed, bytes wait in front of it, in both directions.
        at_gate: set while a copy waits there.
        full: writing fails as on a full disk.
        made: how many slabs were made.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.full = False
        self.made = 0

    def link(self, budget_bytes: int | None = None) -> ThreadLink:
        return ThreadLink(self.slab, "host memory", budget_bytes, Pace(), Pace())

    def slab(self, nbytes: int) -> HostSlab:
        self.made += 1
        return _Slab(nbytes, self)

    def pass_gate(self) -> None:
        if not self.gate.is_set():
            self.at_gate.set()
            if not self.gate.wait(_PATIENCE_SECONDS):  # the test failed before it opened the gate
                raise OSError(errno.ETIMEDOUT, "the gate stayed closed")


class _Slab(HostSlab):
    def __init__(self, nbytes: int, host: RehearsedHost) -> None:
        super().__init__(nbytes)
        self.host = host

    def write(self, offset: int, address: int, nbytes: int) -> None:
        self.host.pass_gate()
        if self.host.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(offset, address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        self.host.pass_gate()
        super().read(offset, address, nbytes)


_earlier: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def forget_threads() -> None:
    """Those that live now are an earlier test's, whose link is garbage that is yet to be collected."""
    _earlier.update(threading.enumerate())


def our_threads() -> list[str]:
    """Names of the copy threads that live in this process, without those forgotten."""
    ours = [thread for thread in threading.enumerate() if thread not in _earlier]
    return [thread.name for thread in ours if thread.name.startswith("shoal-")]


def open_files(folder: Path) -> int:
    """How many files in `folder`, with a name or without, this process holds open."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed the others
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith(f"{folder}/") for name in names)
