"""A caching allocator for the CPU, like PyTorch's for CUDA: what is freed stays for the next tensor that fits there.

With glibc's malloc a large tensor's memory is mapped when it is allocated, filled with zeros page by page while an op
writes its result, and unmapped when it is freed: in every step again. What is smaller lies in a heap with holes, so
that a process takes more of the machine's memory than its tensors add up to. Here both are in one range of addresses,
in huge pages where the system has them, that holds no more than was in use at once, and a fiftieth
(`cpu_allocator.cpp`, compiled once, in seconds).

Limits: pages of 2 MiB in which any tensor lies are not given back. Where many small tensors stay between large ones
that are freed, more is held.

It serves tensors of 64 KiB and more of the whole process, from the first CPU step that Shoal plans, or the first op
that it times, on. Memory that NumPy, oneDNN or Python allocate is not its own. A forked process, such as a worker of a
`DataLoader`, has torch's allocator again. `SHOAL_CPU_ALLOCATOR=torch` leaves torch's allocator everywhere.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shoal.errors import InputError
from shoal.lowlevel.extension import loaded

VARIABLE = "SHOAL_CPU_ALLOCATOR"
CACHING, TORCH = "caching", "torch"
_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")

log = logging.getLogger("shoal")
_serving: ctypes.CDLL | None = None


class CpuMemory(NamedTuple):
    """Bytes of the caching allocator; of tensors of 64 KiB and more, allocated since it is there.

    Attributes:
        in_use: of tensors now. most_in_use: at once, since `release_unused`.
        held: of the process's memory, for them and for the next ones.
    """

    in_use: int
    most_in_use: int
    held: int


def use_caching() -> str:
    """Let the caching allocator serve this process, if it does not yet; a second call is cheap.

    Replaces, in plain PyTorch, starting Python with `LD_PRELOAD` of jemalloc or tcmalloc.

    Returns:
        Which allocator tensors on the CPU have: "caching", and from then on nothing else; "torch" where
        `SHOAL_CPU_ALLOCATOR` asks for it before the first call, there is no C++ compiler, the system is not Linux, or
        the address space is limited (`ulimit -v`).

    Raises:
        InputError: `SHOAL_CPU_ALLOCATOR` is neither "caching" nor "torch".
    """
    wanted = os.environ.get(VARIABLE, CACHING)
    if wanted not in (CACHING, TORCH):
        raise InputError(f"{VARIABLE}={wanted!r} is unknown; set it to {CACHING!r} or {TORCH!r}")
    global _serving
    library = _serving or (_library() if wanted == CACHING else None)
    if library is None or not library.cpu_allocator_install():
        return TORCH
    _serving = library
    return CACHING


def why_not_caching() -> str:
    """Why tensors on the CPU keep torch's allocator; "" where they have the caching one, from here on."""
    if use_caching() == CACHING:
        return ""
    if os.environ.get(VARIABLE) == TORCH:
        return f"{VARIABLE}={TORCH}"
    return _obstacle() or "no addresses are left, or another allocator has taken the place of torch's"


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
def _obstacle() -> str:
    if sys.platform != "linux":
        return f"the system is {sys.platform}; it needs Linux"
    import resource  # not there on Windows

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "the address space of the process is limited (ulimit -v)"
    try:
        loaded(_SOURCE, "the caching allocator of the CPU")
    except InputError as error:
        return str(error)
    return ""


@cache
def _library() -> ctypes.CDLL | None:
    obstacle = _obstacle()
    if obstacle:
        log.info("tensors on the CPU keep torch's allocator: %s", obstacle)
        return None
    library = loaded(_SOURCE, "the caching allocator of the CPU")
    library.cpu_allocator_install.restype = ctypes.c_bool
    return library
