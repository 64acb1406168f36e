"""A memory limit in device bytes: an allocation beyond it raises `torch.OutOfMemoryError`, as on a smaller device.

On CUDA the limit is the caching allocator's own. It bounds the bytes that allocator has reserved, which are a little
more than `torch.cuda.max_memory_allocated` reads. On the CPU torch's allocator is replaced by one that counts every
request exactly (`limit.cpp`, compiled once, in seconds). It counts what torch allocates while a limit is active, so
enter the block before the model is made; what is left of an earlier block does not count. Memory that NumPy, oneDNN or
Python allocate themselves is not counted.

Limits can be nested: the lowest one holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from shoal.core.sizes import parse_bytes
from shoal.errors import InputError
from shoal.lowlevel import cuda_calls
from shoal.lowlevel.cuda_allocator import Refusals, blocks_in_use, refusals_on
from shoal.lowlevel.extension import loaded
from shoal.lowlevel.mutated_inputs import are_plain
from shoal.lowlevel.torch_state import allocated_bytes
from shoal.memory.reads import Read

_SOURCE = Path(__file__).with_name("limit.cpp")
_NO_LIMIT = -1


class MemoryLimit:
    """An active limit, and the counts of its device; made by `memory_limit`.

    Attributes:
        device: the device it bounds.
    """

    def __init__(self, memory: _Memory, device: torch.device, limit_bytes: int | None) -> None:
        self.device = device
        self._memory = memory
        self._limit_bytes = limit_bytes

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that may be in use at once; None to count only. It may be set at any time inside the block."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | str | None) -> None:
        self._limit_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "limit_bytes")
        _enforce(self._memory)

    @property
    def live_bytes(self) -> int:
        """Bytes in use. On the CPU: of what was allocated since this limit, or the outermost around it, was entered."""
        return self._memory.live_bytes()

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use since the block was entered or `reset_peak` was called."""
        return self._memory.peak_bytes()

    @property
    def reserved_peak_bytes(self) -> int:
        """Most bytes that the allocator held of the device since `reset_peak`, for all purposes; 0 on the CPU."""
        return self._memory.reserved_peak_bytes()

    def start_fresh(self, *, this_thread: bool = False) -> None:
        """Let `fresh_peak_bytes` count only what is allocated from here on; earlier allocations do not count.

        Args:
            this_thread: whether it leaves out what other Python threads allocate, which load data or train models of
                their own, on the CPU.
        """
        self._memory.start_fresh(this_thread)

    def count_this_thread(self) -> None:
        """Let this thread be the one of `start_fresh(this_thread=True)` from here on."""
        self._memory.count_this_thread()

    @property
    def fresh_peak_bytes(self) -> int:
        """Most bytes in use, of what was allocated since `start_fresh`, since `reset_fresh_peak` was called."""
        return self._memory.fresh_peak_bytes()

    @property
    def fresh_bytes(self) -> int:
        """Bytes in use of what was allocated since `start_fresh`."""
        peak_bytes = self._memory.fresh_peak_bytes()
        self._memory.set_fresh_peak(0)  # sets it to what is in use
        now_bytes = self._memory.fresh_peak_bytes()
        self._memory.set_fresh_peak(peak_bytes)
        return now_bytes

    def reset_fresh_peak(self) -> None:
        """Reset `fresh_peak_bytes` to what is in use now."""
        self._memory.set_fresh_peak(0)

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether `fresh_peak_bytes` counts the tensor's storage; not that of a tensor that is made of others."""
        if not are_plain([tensor]):
            return False  # it has no memory of its own
        return self._memory.is_fresh(tensor.untyped_storage().data_ptr())

    def stale_among(self, found: Iterable[Read], known: Collection[int]) -> dict[int, int]:
        """Bytes of the storages of this device that `fresh_peak_bytes` does not count, by key, without known keys."""
        return {
            read.key: allocated_bytes(read.nbytes, self.device)
            for read in found
            if read.key not in known
            and read.device.type == self.device.type
            and not self._memory.is_fresh(read.address)
        }

    @property
    def stale_bytes(self) -> int:
        """Bytes in use of what was allocated before `start_fresh`, on CUDA; 0 on the CPU, which does not count them."""
        return self._memory.stale_bytes()

    def reset_peak(self) -> None:
        """Reset `peak_bytes` to `live_bytes`."""
        self._memory.set_peak(self._memory.live_bytes())


_active: list[MemoryLimit] = []
_cpu_libraries: list[ctypes.CDLL] = []
_lasting: dict[_Memory, list[int]] = {}
_suspended = 0


@contextmanager
def memory_limit(limit_bytes: int | str | None, device: str | torch.device = "cpu") -> Iterator[MemoryLimit]:
    """Bound the device bytes in use inside the `with` block, and count them.

    Replaces, in plain PyTorch, `torch.cuda.set_per_process_memory_fraction` on CUDA; the CPU has nothing like it.

    Args:
        limit_bytes: an int or a text such as "150MiB"; None counts without a limit.
        device: "cpu" or a CUDA device.

    Raises:
        torch.OutOfMemoryError: inside the block, from the allocation that does not fit. Free something and go on.
        InputError: the limit is not a size, the device is of another type, or there is no C++ compiler for the CPU.

    >>> with memory_limit("1MiB") as limit:
    ...     before_bytes = limit.live_bytes
    ...     x = torch.empty(1000)
    ...     limit.live_bytes - before_bytes, limit.peak_bytes - before_bytes
    (4000, 4000)
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.accelerator.current_device_index())
    parsed_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "limit_bytes")
    memory = _memory_of(device)
    if _active and _active[-1]._memory is not memory:
        raise InputError(f"a memory limit on {_active[-1].device} is active; leave it before one on {device}")
    outer_peak_bytes = memory.peak_bytes()
    if not _active and memory not in _lasting:
        memory.install()
    limit = MemoryLimit(memory, device, parsed_bytes)
    limit.reset_peak()
    _active.append(limit)
    try:
        _enforce(memory)
        yield limit
    finally:
        _active.remove(limit)
        if _active:
            memory.set_peak(max(outer_peak_bytes, memory.peak_bytes()))
        _enforce(memory)
        if not _active and memory not in _lasting:
            memory.uninstall()


def this_thread_works_for_steps() -> None:
    """What this thread allocates counts for whichever thread trains: it is one of Shoal's own."""
    for library in _cpu_libraries:
        library.limit_thread_works_for_steps()


def limit_reserved(limit_bytes: int, device: torch.device) -> Callable[[], None]:
    """Bound what the caching allocator of a CUDA device reserves, from here on; the lowest limit holds.

    Replaces `torch.cuda.set_per_process_memory_fraction`. Where the allocator reaches the limit it gives cached blocks
    back to the device first.

    Returns:
        What takes the limit away again; a second call does nothing.
    """
    memory, ours = _memory_of(device), [limit_bytes]
    if not _active and memory not in _lasting:
        memory.install()
    _lasting.setdefault(memory, []).extend(ours)
    _enforce(memory)

    def release() -> None:
        if not ours:
            return
        _lasting[memory].remove(ours.pop())
        if not _lasting[memory]:
            del _lasting[memory]
        _enforce(memory)
        if not _active and memory not in _lasting:
            memory.uninstall()

    return release


@contextmanager
def no_memory_limit() -> Iterator[None]:
    """Suspend all limits inside the block, and leave its peak out of the counts. Without a limit it does nothing.

    For what is not part of a training step: planning it, and profiling its ops.
    """
    global _suspended
    counting = _active[-1]._memory if _active else None
    peaks_bytes = None if counting is None else (counting.peak_bytes(), counting.fresh_peak_bytes())
    limiting = list(_lasting) if counting is None else [counting]
    _suspended += 1
    try:
        for memory in limiting:
            _enforce(memory)
        yield
    finally:
        _suspended -= 1
        if counting is not None and peaks_bytes is not None:
            counting.set_fresh_peak(peaks_bytes[1])
            counting.set_peak(max(peaks_bytes[0], counting.live_bytes()))
        for memory in limiting:
            _enforce(memory)


def is_counting(device_type: str) -> bool:
    """Whether a limit on a device of this type is active, or a step there is being measured."""
    return any(limit.device.type == device_type for limit in _active)


def refusals(device: torch.device) -> Refusals:
    """The allocations on the device that have raised `torch.OutOfMemoryError` since this was first asked.

    None are seen on the CPU without a C++ compiler.
    """
    try:
        return _memory_of(device).refusals()
    except InputError:
        return Refusals(0)


def _enforce(memory: _Memory) -> None:
    limits = [limit.limit_bytes for limit in _active if limit.limit_bytes is not None and limit._memory is memory]
    limits += _lasting.get(memory, [])
    memory.set_limit(_NO_LIMIT if _suspended or not limits else min(limits))


@cache
def _memory_of(device: torch.device) -> _Memory:
    if device.type == "cpu":
        return _CpuMemory()
    if device.type == "cuda":
        return _CudaMemory(device)
    raise InputError(f"no memory limit can be set on {device}: expected 'cpu' or a CUDA device")


class _CudaMemory:
    """The caching allocator: its memory fraction is the limit, its statistics are the counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_bytes = cuda_calls.total_bytes(device)
        self._fraction_before = 1.0
        self._limit_bytes = _NO_LIMIT
        self._peak_earlier = 0
        self._stale_bytes = 0
        self._stale: frozenset[int] = frozenset()

    def install(self) -> None:
        self._fraction_before = cuda_calls.memory_fraction(self._device)

    def uninstall(self) -> None:
        cuda_calls.set_memory_fraction(self._device, self._fraction_before)
        self._limit_bytes = _NO_LIMIT

    def set_limit(self, limit_bytes: int) -> None:
        if limit_bytes == self._limit_bytes:  # counting leaves the allocator as it is
            return
        self._limit_bytes = limit_bytes
        torch.accelerator.empty_cache()  # what is cached counts against the fraction
        fraction = 1.0 if limit_bytes < 0 else min(1.0, limit_bytes / self._total_bytes)
        cuda_calls.set_memory_fraction(self._device, fraction)

    def start_fresh(self, this_thread: bool) -> None:
        """The caching allocator does not tell threads apart."""
        self._stale_bytes = self.live_bytes()
        self._stale = self._addresses()
        self.set_fresh_peak(0)

    def count_this_thread(self) -> None:
        pass

    def _addresses(self) -> frozenset[int]:
        return frozenset(blocks_in_use(self._device))

    def stale_bytes(self) -> int:
        return sum(size for address, size in blocks_in_use(self._device).items() if address in self._stale)

    def fresh_peak_bytes(self) -> int:
        return self.peak_bytes() - self._stale_bytes

    def set_fresh_peak(self, peak_bytes: int) -> None:
        self.set_peak(max(self._stale_bytes + peak_bytes, self.live_bytes()))

    def is_fresh(self, address: int) -> bool:
        return address not in self._stale

    def live_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(self._peak_earlier, torch.accelerator.max_memory_allocated(self._device))

    def set_peak(self, peak_bytes: int) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._peak_earlier = peak_bytes
        if self._stale:
            self._stale &= self._addresses()  # those of blocks that are freed go to other tensors

    def reserved_peak_bytes(self) -> int:
        return torch.accelerator.max_memory_reserved(self._device)

    def refusals(self) -> Refusals:
        return refusals_on(self._device)


class _CpuMemory:
    """The counting allocator of `limit.cpp`, whose functions do what those of `_CudaMemory` do."""

    def __init__(self) -> None:
        library = loaded(_SOURCE, "a memory limit on the CPU")
        for name in ("live", "peak", "fresh_peak", "refusals", "refused", "fresh_at_refusal"):
            getattr(library, f"limit_{name}").restype = ctypes.c_int64
        for name in ("limit_set_bytes", "limit_set_peak", "limit_set_fresh_peak"):
            getattr(library, name).argtypes = [ctypes.c_int64]
            getattr(library, name).restype = None
        library.limit_is_fresh.argtypes = [ctypes.c_void_p]
        library.limit_is_fresh.restype = ctypes.c_bool
        library.limit_start_fresh.argtypes = [ctypes.c_int]
        _cpu_libraries[:] = [library]
        self._library = library
        self.install: Callable[[], object] = library.limit_install
        self.uninstall: Callable[[], object] = library.limit_uninstall
        self.set_limit: Callable[[int], object] = library.limit_set_bytes
        self.start_fresh: Callable[[bool], object] = library.limit_start_fresh
        self.count_this_thread: Callable[[], object] = library.limit_count_this_thread
        self.live_bytes: Callable[[], int] = library.limit_live
        self.peak_bytes: Callable[[], int] = library.limit_peak
        self.set_peak: Callable[[int], object] = library.limit_set_peak
        self.fresh_peak_bytes: Callable[[], int] = library.limit_fresh_peak
        self.set_fresh_peak: Callable[[int], object] = library.limit_set_fresh_peak
        self.is_fresh: Callable[[int], bool] = library.limit_is_fresh

    def stale_bytes(self) -> int:
        return 0

    def reserved_peak_bytes(self) -> int:
        return 0

    def refusals(self) -> Refusals:
        library = self._library
        return Refusals(library.limit_refusals(), library.limit_refused(), library.limit_fresh_at_refusal())


_Memory = _CudaMemory | _CpuMemory  # a device's allocator, as far as a limit needs it; a negative limit means none
