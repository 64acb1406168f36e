"""`open_link`: the link between a device and host memory or a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from shoal.core import arguments
from shoal.errors import InputError, brief
from shoal.offload.links.copy_thread import Pace, ThreadLink
from shoal.offload.links.cuda_link import CudaLink
from shoal.offload.links.file import FileSlab, SpillFile
from shoal.offload.links.host import HostSlab
from shoal.offload.links.slab import Copy, Slab, SlabPool


class OpenLink(Protocol):
    """A link that copies bytes; made by `open_link`, shared by any number of steps.

    Attributes:
        device: the device of its storages.
        pool: the host bytes.
    """

    device: torch.device
    pool: SlabPool

    def begin_step(self) -> None:
        """Call it after a slab is leased, before the first `offload` to it."""

    def offload(self, storage: torch.UntypedStorage, slab: Slab, offset: int) -> Copy:
        """Start to copy a whole storage to the slab, after all computation submitted so far.

        Raises:
            TransferError: the link is closed.
        """

    def fetch(self, storage: torch.UntypedStorage, slab: Slab, offset: int, after: Copy | None = None) -> Copy:
        """Start to copy from the slab to a whole storage, after `after`, the copy that wrote the slab.

        Raises:
            TransferError: the link is closed.
        """

    def close(self) -> None:
        """Stop all copies, end the threads, free the host bytes. Closing twice has no effect."""


def open_link(
    device: torch.device | str,
    where: str | Path = "host",
    host_budget_bytes: int | None = None,
    to_host_bytes_per_second: float | None = None,
    to_device_bytes_per_second: float | None = None,
    latency_seconds: float = 0.0,
) -> OpenLink:
    """Open a link between `device` and the host.

    On a CUDA device: two side streams and pinned memory. On the CPU, whose device bytes are those of torch's allocator:
    two threads, and host memory outside of torch's allocator or a file.

    Args:
        device: "cpu" or a CUDA device.
        where: "host" for host memory; a folder on a local disk for an unlinked file there, deleted when the process
            ends.
        host_budget_bytes: most bytes of memory or disk; None for no limit.
        to_host_bytes_per_second, to_device_bytes_per_second, latency_seconds: slow the CPU's link down to another
            machine's; None and 0 for full speed.

    Raises:
        InputError: there is no such link.
        TransferError: the folder does not exist or cannot be written.

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
        if speed is not None and not (arguments.is_number(speed) and speed > 0):
            raise InputError(f"{name}={brief(speed)}: expected a positive number, or None for full speed")
    if not (arguments.is_number(latency_seconds) and latency_seconds >= 0):
        raise InputError(f"latency_seconds={brief(latency_seconds)}: expected 0 or a positive number")
    if device.type == "cuda":
        if str(where) != "host":
            raise InputError(f"where={str(where)!r}: a CUDA device offloads to pinned host memory, expected 'host'")
        if latency_seconds or any(speed is not None for speed in speeds.values()):
            raise InputError("a CUDA link cannot be slowed down; rehearse another one on the CPU")
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        return CudaLink(torch.device("cuda", index), host_budget_bytes)
    if device.type != "cpu":
        raise InputError(f"there is no link for {device}: expected 'cpu' or a CUDA device")
    paces = Pace(to_host_bytes_per_second, latency_seconds), Pace(to_device_bytes_per_second, latency_seconds)
    if str(where) == "host":
        return ThreadLink(HostSlab, "host memory", host_budget_bytes, *paces)
    return ThreadLink(partial(FileSlab, SpillFile(where)), f"a file in {where}", host_budget_bytes, *paces)
