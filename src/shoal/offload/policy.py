"""What may leave the device while a model trains, as plain data: where to, how much, and at which pace."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from shoal.core.hardware import Hardware, Link
from shoal.core.sizes import parse_bytes
from shoal.errors import InputError

AUTO = "auto"
HOST = "host"
_SHARE_OF_HOST = 0.5  # of what is there, unless a budget says otherwise


@dataclass(frozen=True)
class Offloading:
    """Where saved storages may wait.

    Attributes:
        where: "host" for host memory, else a folder on a local disk.
        host_bytes: most bytes there.
        pace: rates that copies are held to, to rehearse another machine's link; None for as fast as they go.
    """

    where: str
    host_bytes: int
    pace: Link | None = None

    @property
    def folder(self) -> str | None:
        """Where the file lies; None for host memory."""
        return None if self.where == HOST else self.where


def offloading(
    offload_to: str | Path | None,
    host_budget: int | str | None,
    *,
    device_type: str,
    pace: Link | None = None,
) -> Offloading | None:
    """Read what a caller asks for.

    Args:
        offload_to: "auto" for host memory where the device has its own and nothing on the CPU, whose memory is the
            host's; "host"; a folder; None for nothing.
        host_budget: most bytes there; None for half of what is available now.
        device_type: "cpu" or "cuda".
        pace: as of `Offloading`.

    Raises:
        InputError: the folder is not there, or the budget is no size.
    """
    if offload_to == AUTO:
        offload_to = HOST if device_type == "cuda" or pace is not None else None
    if offload_to is None:
        if host_budget is not None:
            raise InputError("host_budget is given, but nothing is offloaded; give offload_to='host' or a folder too")
        return None
    where = str(offload_to)
    if where != HOST and not Path(where).is_dir():
        raise InputError(f"offload_to={where!r} is no folder; give 'host', an existing folder on a local disk, or None")
    if host_budget is not None:
        return Offloading(where, parse_bytes(host_budget, "host_budget"), pace)
    there_bytes = _available_bytes() if where == HOST else shutil.disk_usage(where).free
    return Offloading(where, int(_SHARE_OF_HOST * there_bytes), pace)


def rehearsed(target: Hardware, here: Hardware) -> Link:
    """The target's link, slowed down as much as this machine computes slower than the target.

    Bytes per second over FLOP/s are then the target's, so that what overlaps there overlaps here.
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
    """What the operating system could give this process now."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
