"""Where activations may be offloaded to, how many bytes, and how fast, as plain data."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.core.hardware import Hardware, Link
from shoal.core.sizes import parse_bytes
from shoal.errors import InputError, brief

AUTO = "auto"
HOST = "host"
OFFERED = "give 'host', an existing folder on a local disk, or None"
_SHARE_OF_HOST = 0.5  # of the available bytes, without a host budget


@dataclass(frozen=True)
class Offloading:
    """Where saved storages may be offloaded to.

    Attributes:
        where: "host" for host memory, else a folder on a local disk.
        host_bytes: most bytes there.
        pace: the rates of another machine's link, to which copies are slowed down; None for full speed.
    """

    where: str
    host_bytes: int
    pace: Link | None = None

    @property
    def folder(self) -> str | None:
        """The folder of the file; None for host memory."""
        return None if self.where == HOST else self.where


def offloading(
    offload_to: str | Path | None, host_budget: int | str | None, *, device_type: str, pace: Link | None = None
) -> Offloading | None:
    """Validate the arguments of `shoal.compile`.

    Args:
        offload_to: "auto" for host memory on CUDA or with a `pace`, else no offloading; "host"; a folder; None for no
            offloading.
        host_budget: most bytes there; None for half of what is available now.
        device_type: "cpu" or "cuda".
        pace: as of `Offloading`.

    Raises:
        InputError: the folder does not exist, or the budget is not a size.
    """
    if offload_to == AUTO:
        offload_to = HOST if device_type == "cuda" or pace is not None else None
    if offload_to is None:
        if host_budget is not None:
            raise InputError("host_budget is given, but nothing is offloaded; give offload_to='host' or a folder too")
        return None
    where = str(offload_to)
    if where != HOST and not os.path.isdir(where):  # "" and too long a name are no folder either
        raise InputError(f"offload_to={brief(where)} is not a folder; {OFFERED}")
    if host_budget is not None:
        return Offloading(where, parse_bytes(host_budget, "host_budget"), pace)
    there_bytes = _available_bytes() if where == HOST else shutil.disk_usage(where).free
    return Offloading(where, int(_SHARE_OF_HOST * there_bytes), pace)


def rehearsed(target: Hardware, here: Hardware) -> Link:
    """The target's link, slowed down by the ratio of the two machines' FLOP/s.

    Bytes per second over FLOP/s are then the target's, so the same copies overlap the same computation.
    """
    slower = target.device.flops_per_second / here.device.flops_per_second
    return Link(
        f"{target.link.name}, {slower:.3g} times slower",
        target.link.to_host_bytes_per_second / slower,
        target.link.to_device_bytes_per_second / slower,
        target.link.latency_seconds * slower,
        target.link.host_bytes,
        target.link.overlaps,
    )


def _available_bytes() -> int:
    """Host memory that can be allocated without swapping."""
    return int(psutil.virtual_memory().available)
