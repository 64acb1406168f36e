"""The links between a device of this machine and its host, measured and cached on disk."""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from shoal.core.hardware import Link, MeasuredLink
from shoal.core.records import read_value
from shoal.core.sizes import HOST_PAGE_BYTES
from shoal.cost import measurement_cache
from shoal.cost.measure import fastest_seconds
from shoal.errors import InputError, TransferError
from shoal.lowlevel.cuda_calls import pin, unpin
from shoal.lowlevel.torch_internals import isolated
from shoal.offload.links.file import SpillFile
from shoal.offload.policy import Offloading

_MIB = 2**20
_ALLOCATIONS = 5
_ALLOCATION_MIB = 64
FILE_BYTES = 64 * 2**20
_MIN_SECONDS = 0.5  # of runs of one measurement


def measure_links(
    device: str | torch.device = "cpu", *, folder: str | Path | None = None, cache: bool = True
) -> tuple[MeasuredLink, ...]:
    """Measure every link for offloading from this device.

    - On CUDA: copies to and from pinned and pageable host memory.
    - On the CPU: copies between two buffers, like an offload to host memory, and to and from a file in `folder`, with
      direct I/O if the file system supports it.

    Bandwidths are of copies of 64 MiB in one direction at a time, latencies of a single byte (a file:
    one block). Allocation is the cost of the first use of host memory: page faults, on CUDA also pinning, for a file
    the allocation of its blocks.

    Args:
        device: "cpu" or "cuda".
        folder: the folder of the CPU's file; by default the system's folder for temporary files.
        cache: return an earlier measurement under the same settings, and store a new one. Each folder has an entry of
            its own.

    Raises:
        InputError: the device is not available, or the folder cannot hold the file.
        TransferError: the driver cannot pin memory.

    Example:
        >>> [link.name for link in measure_links("cpu")]  # doctest: +SKIP
        ['host slab', 'file in /tmp, direct I/O']
    """
    place = measurement_cache.device_of(device)
    copies = _recalled("copies", place) if cache else None
    if copies is None:
        with isolated(place):
            copies = _cuda_copies(place) if place.type == "cuda" else (_slab_copies(),)
        if cache:
            measurement_cache.remember("links", place, {"copies": [asdict(link) for link in copies]})
    if place.type == "cuda":
        return copies
    return (*copies, _file(place, folder, cache))


def link_to(leaves: Offloading, device: torch.device) -> Link:
    """The link to plan for: the simulated one of `leaves.pace`, or else the measured one; with the limit of `leaves`.

    Raises:
        InputError, TransferError: as of `measure_links`.
    """
    if leaves.pace is not None:
        return replace(leaves.pace, host_bytes=leaves.host_bytes)
    measured = measure_links(device, folder=leaves.folder)
    return measured[0 if leaves.folder is None else -1].link(leaves.host_bytes)


def _file(place: torch.device, folder: str | Path | None, cache: bool) -> MeasuredLink:
    where = Path(tempfile.gettempdir() if folder is None else folder).absolute()
    if not where.is_dir():
        raise InputError(f"folder={str(folder)!r} is not a folder; give a writable one on a local disk")
    key = f"file in {where.resolve()}"
    known = _recalled(key, place) if cache else None
    if known:
        return known[0]
    link = file_link(where)
    if cache:
        measurement_cache.remember("links", place, {key: [asdict(link)]})
    return link


def _recalled(key: str, place: torch.device) -> tuple[MeasuredLink, ...] | None:
    known = measurement_cache.recall("links", place, [key]).get(key)
    try:
        return read_value(tuple[MeasuredLink, ...], known, key) or None
    except InputError:  # missing or invalid
        return None


def _slab_copies() -> MeasuredLink:
    near, far = (torch.ones(64 * _MIB, dtype=torch.uint8) for _ in range(2))
    return _copies("host slab", near, far, _page_seconds_per_mib())


def _cuda_copies(device: torch.device) -> tuple[MeasuredLink, ...]:
    near = torch.ones(64 * _MIB, dtype=torch.uint8, device=device)
    pageable = torch.ones(near.numel(), dtype=torch.uint8)
    pinned = torch.ones(near.numel(), dtype=torch.uint8, pin_memory=True)
    return (
        _copies("pinned memory", near, pinned, _pin_seconds_per_mib()),
        _copies("pageable memory", near, pageable, _page_seconds_per_mib()),
    )


def _copies(name: str, near: torch.Tensor, far: torch.Tensor, allocation_seconds_per_mib: float) -> MeasuredLink:
    device, pinned = near.device, far.is_pinned() if near.is_cuda else False

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        return fastest_seconds(lambda: target.copy_(source, non_blocking=pinned), device)

    return MeasuredLink(
        name=name,
        to_host_bytes_per_second=near.nbytes / seconds(far, near),
        to_device_bytes_per_second=near.nbytes / seconds(near, far),
        to_host_latency_seconds=seconds(far[:1], near[:1]),
        to_device_latency_seconds=seconds(near[:1], far[:1]),
        allocation_seconds_per_mib=allocation_seconds_per_mib,
    )


def _page_seconds_per_mib() -> float:
    """Seconds to allocate a MiB of host memory and touch every page."""
    times = []
    for _ in range(_ALLOCATIONS):
        start = time.perf_counter()
        fresh = torch.empty(_ALLOCATION_MIB * _MIB, dtype=torch.uint8)
        fresh[:: mmap.PAGESIZE].fill_(1)
        times.append(time.perf_counter() - start)
        del fresh
    return min(times) / _ALLOCATION_MIB


def _pin_seconds_per_mib() -> float:
    """Seconds to allocate and pin a MiB of host memory.

    With cudaHostRegister: PyTorch's pinned memory allocator reuses freed memory.
    """
    times = []
    for _ in range(_ALLOCATIONS):
        start = time.perf_counter()
        fresh = torch.empty(_ALLOCATION_MIB * _MIB, dtype=torch.uint8)
        code = pin(fresh.data_ptr(), fresh.nbytes)
        times.append(time.perf_counter() - start)
        if code != 0:
            raise TransferError(
                f"the driver could not pin {_ALLOCATION_MIB} MiB of host memory (CUDA error {code}); free host "
                "memory, or raise the limit of locked memory (ulimit -l)"
            )
        unpin(fresh.data_ptr())
        del fresh
    return min(times) / _ALLOCATION_MIB


def file_link(folder: Path) -> MeasuredLink:
    """Write and read an unlinked file of 64 MiB in `folder`, as offloading does, repeatedly for a second.

    Bandwidths are means over all runs, because the disk's own cache makes the first ones fast; latencies are of one
    block of 4 KiB. The file is deleted when this returns, and also when the process is killed.

    Raises:
        InputError: the folder does not exist, is not writable, or is full.
    """
    own = torch.Generator().manual_seed(0)
    data = torch.randint(256, (FILE_BYTES,), dtype=torch.uint8, generator=own)  # some disks do not store zeros
    address = data.data_ptr()
    try:
        file = SpillFile(folder)
        start = time.perf_counter()
        position = file.allocate(FILE_BYTES)
        allocation_seconds = time.perf_counter() - start

        def write(nbytes: int) -> None:
            file.write(position, address, nbytes)
            file.flush()

        return MeasuredLink(
            name=f"file in {folder}, {'direct I/O' if file.direct else 'page cache'}",
            to_host_bytes_per_second=FILE_BYTES / _mean_seconds(lambda: write(FILE_BYTES)),
            to_device_bytes_per_second=FILE_BYTES / _mean_seconds(lambda: file.read(position, address, FILE_BYTES)),
            to_host_latency_seconds=_mean_seconds(lambda: write(HOST_PAGE_BYTES)),
            to_device_latency_seconds=_mean_seconds(lambda: file.read(position, address, HOST_PAGE_BYTES)),
            allocation_seconds_per_mib=allocation_seconds * _MIB / FILE_BYTES,
        )
    except (OSError, TransferError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"folder={str(folder)!r} cannot hold a file of {FILE_BYTES >> 20} MiB: {reason}; give a writable folder of "
            "a local disk with free space"
        ) from error


def _mean_seconds(run: Callable[[], None]) -> float:
    run()  # the first write to an allocated block also updates the metadata
    start = time.perf_counter()
    runs, seconds = 0, 0.0
    while seconds < _MIN_SECONDS or runs == 0:
        run()
        runs += 1
        seconds = time.perf_counter() - start
    return seconds / runs
