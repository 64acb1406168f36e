"""The ways between the device at hand and its host, each measured and remembered on disk."""

from __future__ import annotations

import mmap
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.hardware import Link, MeasuredLink
from shoal.core.records import read_value
from shoal.cost import measurement_cache
from shoal.cost.measure import fastest_seconds
from shoal.cost.measure_disk import FILE_BYTES, file_rates
from shoal.errors import InputError, TransferError
from shoal.lowlevel.torch_internals import isolated
from shoal.offload.policy import Offloading

_MIB = 2**20
_ALLOCATIONS = 5
_ALLOCATION_MIB = 64


def measure_links(
    device: str | torch.device = "cpu", *, folder: str | Path | None = None, cache: bool = True
) -> tuple[MeasuredLink, ...]:
    """Measure every way an offload from this device may take.

    - On CUDA: copies to and from pinned and pageable host memory.
    - On the CPU: copies between two buffers, as an offload to a host slab does, and to and from a file in `folder`, by
      direct I/O where the file system has it.

    Bandwidths are those of 64 MiB (256 MiB on CUDA) one way at a time, latencies those of a single byte (of a file: of
    one block), and allocation is what the first use of fresh host bytes costs: page faults, on CUDA also pinning, of a
    file the reservation of its blocks.

    Args:
        device: "cpu" or "cuda".
        folder: where the CPU's file goes; by default the system's folder for temporary files.
        cache: return what was measured here before under the same settings, and remember what is measured now. Each
            folder is remembered for itself.

    Raises:
        InputError: the device is not here, or the folder cannot hold the file.
        TransferError: the driver pins no memory.

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
    """The link to plan for: as it is rehearsed, or else as it was measured here; its room is what `leaves` allows.

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
        raise InputError(f"folder={str(folder)!r} is no folder; give a writable one on a local disk")
    key = f"file in {where.resolve()}"
    known = _recalled(key, place) if cache else None
    if known:
        return known[0]
    rates = file_rates(where)
    link = MeasuredLink(
        name=f"file in {where}, {'direct I/O' if rates.direct else 'page cache'}",
        to_host_bytes_per_second=rates.write_bytes_per_second,
        to_device_bytes_per_second=rates.read_bytes_per_second,
        to_host_latency_seconds=rates.write_seconds,
        to_device_latency_seconds=rates.read_seconds,
        allocation_seconds_per_mib=rates.allocation_seconds * _MIB / FILE_BYTES,
    )
    if cache:
        measurement_cache.remember("links", place, {key: [asdict(link)]})
    return link


def _recalled(key: str, place: torch.device) -> tuple[MeasuredLink, ...] | None:
    known = measurement_cache.recall("links", place).get(key)
    try:
        return read_value(tuple[MeasuredLink, ...], known, key) or None
    except InputError:  # nothing, or what cannot be
        return None


def _slab_copies() -> MeasuredLink:
    near, far = (torch.ones(64 * _MIB, dtype=torch.uint8) for _ in range(2))
    return _copies("host slab", near, far, _page_seconds_per_mib())


def _cuda_copies(device: torch.device) -> tuple[MeasuredLink, ...]:
    near = torch.ones(256 * _MIB, dtype=torch.uint8, device=device)
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
    """How long fresh host memory takes until every page is there."""
    times = []
    for _ in range(_ALLOCATIONS):
        start = time.perf_counter()
        fresh = torch.empty(_ALLOCATION_MIB * _MIB, dtype=torch.uint8)
        fresh[:: mmap.PAGESIZE].fill_(1)
        times.append(time.perf_counter() - start)
        del fresh
    return min(times) / _ALLOCATION_MIB


def _pin_seconds_per_mib() -> float:
    """How long fresh host memory takes until every page is there and pinned.

    By registration: PyTorch's allocator of pinned memory hands out again what was freed.
    """
    driver: Any = torch.cuda.cudart()
    times = []
    for _ in range(_ALLOCATIONS):
        start = time.perf_counter()
        fresh = torch.empty(_ALLOCATION_MIB * _MIB, dtype=torch.uint8)
        code = driver.cudaHostRegister(fresh.data_ptr(), fresh.nbytes, 0)
        times.append(time.perf_counter() - start)
        if int(code) != 0:
            raise TransferError(
                f"the driver could not pin {_ALLOCATION_MIB} MiB of host memory (CUDA error {int(code)}); free host "
                "memory, or raise the limit of locked memory (ulimit -l)"
            )
        driver.cudaHostUnregister(fresh.data_ptr())
        del fresh
    return min(times) / _ALLOCATION_MIB
