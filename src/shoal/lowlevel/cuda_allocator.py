"""PyTorch's caching allocator on CUDA: settings once a process runs, and its record of what it does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shoal.lowlevel.torch_versions import get_allocator_settings, set_allocator_settings

_EXPANDABLE = "expandable_segments"
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_MOST_ENTRIES = 1_000_000
_private: Any = torch._C  # its stubs lack these names


def set_expandable_segments() -> bool:
    """Let the caching allocator grow its segments from here on, unless the environment says whether it may.

    Its blocks are then cut to size, so that what it hands out is what was asked for, in steps of 512 bytes, and what is
    freed fits what comes next: less is reserved for the same tensors. Segments that are there stay as they are.

    Returns:
        Whether its segments grow now.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return False
    given = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
    if _EXPANDABLE not in given:
        set_allocator_settings(f"{given},{_EXPANDABLE}:True" if given else f"{_EXPANDABLE}:True")
        return True
    return f"{_EXPANDABLE}:true" in given.lower().replace(" ", "")


def allocator_settings() -> str:
    """What the caching allocator was told, by the environment and since, and which allocator it is."""
    given = " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name))
    return f"{torch.cuda.get_allocator_backend()} {given} {get_allocator_settings()}".strip()


def start_record() -> bool:
    """Let the allocator write down what it does; False where somebody has it write already."""
    if torch._C._cuda_isHistoryEnabled():
        return False
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=_MOST_ENTRIES)
    return True


def stop_record() -> None:
    """End it, and drop what was written."""
    torch.cuda.memory._record_memory_history(enabled=None)


def label(text: str) -> None:
    """What is recorded with each entry of the record from here on."""
    torch._C._cuda_setMemoryMetadata(text)


def record_length(device: torch.device) -> int:
    """How many entries there are."""
    return len(_entries(device))


def recorded(device: torch.device, start: int) -> list[tuple[str, int, int, bool]]:
    """What was done on the current stream since the entry `start`: label, address, bytes, allocated (or freed)."""
    stream = torch.cuda.current_stream(device).cuda_stream
    found = []
    for entry in _entries(device)[start:]:
        if entry["stream"] == stream and entry["action"] in ("alloc", "free_completed"):
            allocated = entry["action"] == "alloc"
            found.append((entry.get("user_metadata", ""), entry["addr"], entry["size"], allocated))
    return found


def segments(device: torch.device) -> list[dict[str, Any]]:
    """What the allocator has reserved for the current stream, outside of private pools."""
    stream = torch.cuda.current_stream(device).cuda_stream
    found = torch.cuda.memory_snapshot()
    index = torch.device("cuda", torch.cuda.current_device()).index if device.index is None else device.index
    return [s for s in found if s["device"] == index and s["stream"] == stream and s["segment_pool_id"] == (0, 0)]


def blocks_in_use(device: torch.device) -> dict[int, int]:
    """Bytes of each block that is in use, as the allocator counts them, by its address."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = (segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index)
    blocks = (block for segment in segments for block in segment["blocks"])
    return {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}


def _entries(device: torch.device) -> list[dict[str, Any]]:
    index = torch.cuda.current_device() if device.index is None else device.index
    entries: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][index]
    return entries


@dataclass(frozen=True)
class Refusals:
    """Allocations that have raised `torch.OutOfMemoryError`.

    Attributes:
        count: how many.
        last_bytes: what the last of them asked for, at least.
        in_use_bytes: what was in use then: on CUDA by the whole process, on the CPU of what was allocated since
            `MemoryLimit.start_fresh`.
    """

    count: int
    last_bytes: int = 0
    in_use_bytes: int = 0


_refused: dict[int, Refusals] = {}


@cache
def _watch_refusals() -> None:
    def refused(device: int, segment_bytes: int, total_bytes: int, free_bytes: int) -> None:
        count = refusals_on(torch.device("cuda", device)).count + 1
        # The caller may reset the allocator's peak before this is read, so that what is in use is noted here.
        in_use_bytes = torch.accelerator.memory_allocated(device)
        _refused[device] = Refusals(count, least_request(segment_bytes), in_use_bytes)

    _private._cuda_attach_out_of_memory_observer(refused)  # cannot be taken away again


def refusals_on(device: torch.device) -> Refusals:
    """Those on a CUDA device, since this was first asked."""
    _watch_refusals()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return _refused.get(index, Refusals(0))


def least_request(segment_bytes: int) -> int:
    """The smallest request for which the caching allocator makes a segment of this size.

    Its observers are not told what was asked for.

    >>> least_request(40 << 20) >> 20, least_request(20 << 20) >> 20, least_request(2 << 20)
    (38, 1, 512)
    """
    if segment_bytes == 2 << 20:  # for requests of up to 1 MiB
        return 512
    if segment_bytes == 20 << 20:  # for those of up to 10 MiB, and for 18 to 20 MiB
        return (1 << 20) + 512
    return max(0, segment_bytes - (2 << 20) + 512)
