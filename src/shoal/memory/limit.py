"""A wall at a number of device bytes: what would go past it raises `torch.OutOfMemoryError`, as on a smaller device.

On CUDA the caching allocator's own limit is the wall. It bounds what that allocator has reserved, a little more
than `max_memory_allocated` reads. On the CPU torch's allocator is replaced by one that counts every request exactly
(`wall.cpp`, compiled once, in seconds); it sees what torch allocates from when the wall is raised until it is taken
down, so raise it before the model is made. Memory that NumPy, oneDNN or Python hold for themselves is not seen.

Walls may stand inside one another: the lowest limit holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from shoal.core.sizes import parse_bytes
from shoal.errors import InputError
from shoal.lowlevel.extension import compiled

_SOURCE = Path(__file__).with_name("limit.cpp")
_NO_LIMIT = -1


class _Memory(Protocol):
    """A device's allocator, as far as a wall needs it. Negative limits are none."""

    def raise_wall(self) -> None: ...
    def take_down(self) -> None: ...
    def set_limit(self, limit_bytes: int) -> None: ...
    def start_fresh(self) -> None: ...
    def fresh_peak_bytes(self) -> int: ...
    def reset_fresh_peak(self) -> None: ...
    def is_fresh(self, address: int) -> bool: ...
    def live_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def set_peak(self, peak_bytes: int) -> None: ...
    def allocations(self) -> int: ...


class Wall:
    """A wall that stands; made by `wall`.

    Attributes:
        device: the device it bounds.
    """

    def __init__(self, memory: _Memory, device: torch.device, limit_bytes: int | None) -> None:
        self.device = device
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._first_allocation = memory.allocations()

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that may be in use at once; None to count only. May be set while the wall stands."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | str | None) -> None:
        self._limit_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "limit_bytes")
        _enforce(self._memory)

    @property
    def live_bytes(self) -> int:
        """Bytes in use. On the CPU: of what was allocated while a wall stood, this one or another."""
        return self._memory.live_bytes()

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use since the wall was raised or `reset_peak` was called."""
        return self._memory.peak_bytes()

    @property
    def allocations(self) -> int:
        """How many allocations were granted since the wall was raised."""
        return self._memory.allocations() - self._first_allocation

    def start_fresh(self) -> None:
        """Let `fresh_peak_bytes` count what is allocated from here on, whatever is freed of what was there before."""
        self._memory.start_fresh()

    @property
    def fresh_peak_bytes(self) -> int:
        """Most bytes in use of what was allocated since `start_fresh`, in the time since `reset_fresh_peak`."""
        return self._memory.fresh_peak_bytes()

    def reset_fresh_peak(self) -> None:
        """Let `fresh_peak_bytes` start again from what is in use."""
        self._memory.reset_fresh_peak()

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is among what `fresh_peak_bytes` counts."""
        return self._memory.is_fresh(tensor.untyped_storage().data_ptr())

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again from `live_bytes`."""
        self._memory.set_peak(self._memory.live_bytes())


_standing: list[Wall] = []
_lifted = 0


@contextmanager
def wall(limit_bytes: int | str | None, device: str | torch.device = "cpu") -> Iterator[Wall]:
    """Bound the device bytes in use inside the `with` block.

    Replaces, in plain PyTorch, `torch.cuda.set_per_process_memory_fraction` on CUDA; the CPU has nothing like it.

    Args:
        limit_bytes: an int or a text such as "150MiB"; None counts without bounding.
        device: "cpu" or a CUDA device.

    Raises:
        torch.OutOfMemoryError: inside the block, from whatever asks for too much. Nothing is lost: free something and
            go on.
        InputError: the limit is no size, the device is of another type, or there is no C++ compiler for the CPU's wall.

    >>> with wall("1MiB") as w:
    ...     before = w.live_bytes
    ...     x = torch.empty(1000)
    ...     w.live_bytes - before, w.peak_bytes - before
    (4000, 4000)
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    limit = None if limit_bytes is None else parse_bytes(limit_bytes, "limit_bytes")
    memory = _memory_of(device)
    if _standing and _standing[-1]._memory is not memory:
        raise InputError(f"a wall stands on {_standing[-1].device} already; take it down before one on {device}")
    peak_outside = memory.peak_bytes()
    if not _standing:
        memory.raise_wall()
    raised = Wall(memory, device, limit)
    raised.reset_peak()
    _standing.append(raised)
    try:
        _enforce(memory)
        yield raised
    finally:
        _standing.remove(raised)
        if _standing:
            memory.set_peak(max(peak_outside, memory.peak_bytes()))
        _enforce(memory)
        if not _standing:
            memory.take_down()


@contextmanager
def lifted() -> Iterator[None]:
    """Let the block use any number of bytes and leave no trace in `peak_bytes`; without a wall, do nothing.

    For what is not the step: planning it, and profiling its ops.
    """
    global _lifted
    if not _standing:
        yield
        return
    memory = _standing[-1]._memory
    peak = memory.peak_bytes()
    _lifted += 1
    _enforce(memory)
    try:
        yield
    finally:
        _lifted -= 1
        memory.set_peak(max(peak, memory.live_bytes()))
        _enforce(memory)


def _enforce(memory: _Memory) -> None:
    limits = [standing.limit_bytes for standing in _standing if standing.limit_bytes is not None]
    memory.set_limit(_NO_LIMIT if _lifted or not limits else min(limits))


@cache
def _memory_of(device: torch.device) -> _Memory:
    if device.type == "cpu":
        return _CpuMemory()
    if device.type == "cuda":
        return _CudaMemory(device)
    raise InputError(f"no wall can be raised on {device}: expected 'cpu' or a CUDA device")


class _CudaMemory:
    """The caching allocator: its fraction is the limit, its statistics are the counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_bytes = torch.cuda.get_device_properties(device).total_memory
        self._fraction_before = 1.0
        self._peak_earlier = 0
        self._stale_bytes = 0

    def raise_wall(self) -> None:
        self._fraction_before = torch.cuda.get_per_process_memory_fraction(self._device)

    def take_down(self) -> None:
        torch.cuda.set_per_process_memory_fraction(self._fraction_before, self._device)

    def set_limit(self, limit_bytes: int) -> None:
        torch.cuda.empty_cache()  # what is cached counts against the fraction
        fraction = 1.0 if limit_bytes < 0 else min(1.0, limit_bytes / self._total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def start_fresh(self) -> None:
        self._stale_bytes = self.live_bytes()
        self.reset_fresh_peak()

    def fresh_peak_bytes(self) -> int:
        return self.peak_bytes() - self._stale_bytes

    def reset_fresh_peak(self) -> None:
        self.set_peak(self.live_bytes())

    def is_fresh(self, address: int) -> bool:
        return True  # the allocator's own peak counts every block

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(self._peak_earlier, torch.cuda.max_memory_allocated(self._device))

    def set_peak(self, peak_bytes: int) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_earlier = peak_bytes

    def allocations(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("allocation.all.allocated", 0))


class _CpuMemory:
    """The counting allocator of `wall.cpp`."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(compiled(_SOURCE, "a wall on the CPU")))
        library.wall_is_fresh.argtypes = [ctypes.c_void_p]
        for name in ("wall_live", "wall_peak", "wall_fresh_peak", "wall_allocations"):
            getattr(library, name).restype = ctypes.c_int64
        for name in ("wall_set_limit", "wall_set_peak"):
            getattr(library, name).argtypes = [ctypes.c_int64]
            getattr(library, name).restype = None
        self._library = library

    def raise_wall(self) -> None:
        self._library.wall_install()

    def take_down(self) -> None:
        self._library.wall_uninstall()

    def set_limit(self, limit_bytes: int) -> None:
        self._library.wall_set_limit(limit_bytes)

    def start_fresh(self) -> None:
        self._library.wall_start_fresh()

    def fresh_peak_bytes(self) -> int:
        return int(self._library.wall_fresh_peak())

    def reset_fresh_peak(self) -> None:
        self._library.wall_reset_fresh_peak()

    def is_fresh(self, address: int) -> bool:
        return bool(self._library.wall_is_fresh(address))

    def live_bytes(self) -> int:
        return int(self._library.wall_live())

    def peak_bytes(self) -> int:
        return int(self._library.wall_peak())

    def set_peak(self, peak_bytes: int) -> None:
        self._library.wall_set_peak(peak_bytes)

    def allocations(self) -> int:
        return int(self._library.wall_allocations())
