"""The right link for a device and a place."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from shoal.errors import InputError
from shoal.offload.links.copy_thread import Pace, ThreadLink
from shoal.offload.links.cuda_link import CudaLink
from shoal.offload.links.file import FileSlab, SpillFile
from shoal.offload.links.host import HostSlab
from shoal.offload.links.slab import Copy, Slab, SlabPool


class OpenLink(Protocol):
    """A link that moves bytes; made by `open_link`, shared by any number of steps.

    Attributes:
        device: whose storages it moves.
        pool: the host bytes.
    """

    device: torch.device
    pool: SlabPool

    def begin_step(self) -> None:
        """Call it when a slab was leased, before anything is written there."""

    def offload(self, storage: torch.UntypedStorage, slab: Slab, offset: int) -> Copy:
        """Start to copy a whole storage to the slab, from what it holds when all computation asked for so far is done.

        Raises:
            TransferError: the link is closed.
        """

    def fetch(self, storage: torch.UntypedStorage, slab: Slab, offset: int, after: Copy | None = None) -> Copy:
        """Start to fill a whole storage from the slab, once `after`, the copy that wrote there, is over.

        Raises:
            TransferError: the link is closed.
        """

    def close(self) -> None:
        """Stop what still moves, end the threads, give the host bytes back. Twice is once."""


def open_link(
    device: torch.device | str,
    where: str | Path = "host",
    host_budget_bytes: int | None = None,
    to_host_bytes_per_second: float | None = None,
    to_device_bytes_per_second: float | None = None,
    latency_seconds: float = 0.0,
) -> OpenLink:
    """Open the way between `device` and the host.

    On a CUDA device: two side streams and pinned memory. On the CPU, whose device bytes are those that torch's
    allocator hands out: two threads, to host memory that is not torch's, or to a file.

    Args:
        device: "cpu" or a CUDA device.
        where: "host" for host memory; a folder on a local disk for a file there, which nobody sees and which is gone
            when the process is.
        host_budget_bytes: most bytes there, of memory or of disk; None for no limit.
        to_host_bytes_per_second, to_device_bytes_per_second, latency_seconds: how slow the link pretends to be, to
            rehearse another machine's on the CPU; None and 0 for as fast as it goes.

    Raises:
        InputError: there is no such link.
        TransferError: the folder is not there or cannot be written.

    >>> link = open_link("cpu", host_budget_bytes=2**20)
    >>> link.pool.held_bytes
    0
    >>> link.close()

    Limits: a CUDA device reaches pinned memory, not files. The CPU's link does not survive a fork.
    """
    device = torch.device(device)
    speeds = {
        "to_host_bytes_per_second": to_host_bytes_per_second,
        "to_device_bytes_per_second": to_device_bytes_per_second,
    }
    for name, speed in speeds.items():
        if speed is not None and not 0 < speed < float("inf"):
            raise InputError(f"{name}={speed!r}: expected a positive number, or None for as fast as it goes")
    if not 0 <= latency_seconds < float("inf"):
        raise InputError(f"latency_seconds={latency_seconds!r}: expected 0 or a positive number")
    if device.type == "cuda":
        if str(where) != "host":
            raise InputError(f"where={str(where)!r}: a CUDA device offloads to pinned host memory, expected 'host'")
        if latency_seconds or any(speed is not None for speed in speeds.values()):
            raise InputError("a CUDA link has the speed it has; rehearse another one on the CPU")
        index = torch.cuda.current_device() if device.index is None else device.index
        return CudaLink(torch.device("cuda", index), host_budget_bytes)
    if device.type != "cpu":
        raise InputError(f"there is no link for {device}: expected 'cpu' or a CUDA device")
    paces = Pace(to_host_bytes_per_second, latency_seconds), Pace(to_device_bytes_per_second, latency_seconds)
    if str(where) == "host":
        return ThreadLink(HostSlab, "host memory", host_budget_bytes, *paces)
    return ThreadLink(partial(FileSlab, SpillFile(where)), f"a file in {where}", host_budget_bytes, *paces)
