"""A caching allocator for the CPU, like PyTorch's for CUDA: what is freed stays for the next tensor that fits there.

With glibc's malloc a large tensor's memory is mapped when it is allocated, filled with zeros page by page while an op
writes its result, and unmapped when it is freed: in every step again. What is smaller lies in a heap with holes, so
that a process takes more of the machine's memory than its tensors add up to. Here both are in one range of addresses,
in huge pages where the system has them, that holds no more than was in use at once, and a fiftieth
(`cpu_allocator.cpp`, compiled once, in seconds).

Limits: pages of 2 MiB in which any tensor lies are not given back. Where many small tensors stay between large ones
that are freed, more is held.

It serves tensors of 64 KiB and more of the whole process once `use_caching_allocator` is called. Memory that NumPy,
oneDNN or Python allocate is not its own. A forked process, such as a worker of a `DataLoader`, has torch's allocator
until it calls that too.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shoal.errors import InputError
from shoal.lowlevel.extension import loaded
from shoal.memory.limit import is_counting

CACHING, TORCH = "caching", "torch"
_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")

_serving: ctypes.CDLL | None = None


class CpuMemory(NamedTuple):
    """Bytes of the caching allocator; of tensors of 64 KiB and more, allocated since it exists.

    Attributes:
        in_use: of tensors now. most_in_use: at once, since `release_unused`.
        held: of the process's memory, for them and for the next ones.
    """

    in_use: int
    most_in_use: int
    held: int


def use_caching_allocator() -> None:
    """Serve the tensors of this process on the CPU from a caching allocator, from here on, as PyTorch does on CUDA.

    Steps become faster, because malloc maps and fills large tensors again in every step, and the process holds at most
    what its tensors use at once, and a fiftieth. Budgets, predicted and measured bytes, and results are the same with
    it and without. `shoal.compile` leaves the allocator as it is; `shoal train` calls this.

    Replaces, in plain PyTorch, starting Python with `LD_PRELOAD` of jemalloc or tcmalloc.

    Call it before the first step: ops that were timed before keep the times of PyTorch's allocator. Tensors that exist
    stay where they are. A second call does nothing.

    Raises:
        InputError: it is not available, because the system is not Linux, the address space is limited (`ulimit -v`) or
            there is no C++ compiler; or a step is being measured, and its tensors would no longer be counted.

    >>> import shoal
    >>> shoal.use_caching_allocator()  # once, where the program begins
    """
    global _serving
    if active() == CACHING:
        return
    if obstacle := why_unavailable():
        raise InputError(f"the caching allocator is not available: {obstacle}")
    if is_counting("cpu"):
        raise InputError("memory is being counted: call use_caching_allocator() before the first step")
    library = _library()
    if not library.cpu_allocator_install():
        raise InputError("no addresses are left, or another library has replaced torch's allocator by one of its own")
    _serving = library


def stop_caching() -> None:
    """Leave new tensors to torch's allocator again, for what compares both in one process."""
    if _serving is not None:
        release_unused()
        _serving.cpu_allocator_stop()


def active() -> str:
    """Which allocator new tensors on the CPU have: "caching" or "torch"."""
    return CACHING if _serving is not None and _serving.cpu_allocator_serves() else TORCH


def release_unused() -> None:
    """Give the system back what no tensor uses, as `torch.cuda.empty_cache` does for a GPU.

    Pages of 2 MiB are given back; what shares one with a tensor stays. Without the caching allocator it does nothing.
    """
    if _serving is not None:
        _serving.cpu_allocator_give_back()


def cpu_memory() -> CpuMemory:
    """What the caching allocator has; zeros where it is not there."""
    told = (ctypes.c_int64 * 3)()
    if _serving is not None:
        _serving.cpu_allocator_bytes(told)
    return CpuMemory(*told)


@cache
def why_unavailable() -> str:
    """Why this process cannot have the caching allocator; "" if it can."""
    if sys.platform != "linux":
        return f"the system is {sys.platform}; it needs Linux"
    import resource  # not there on Windows

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "the address space of the process is limited (ulimit -v)"
    try:
        _library()
    except InputError as error:
        return str(error)
    return ""


@cache
def _library() -> ctypes.CDLL:
    library = loaded(_SOURCE, "the caching allocator of the CPU")
    library.cpu_allocator_install.restype = ctypes.c_bool
    library.cpu_allocator_serves.restype = ctypes.c_bool
    return library
