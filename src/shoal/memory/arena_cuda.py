"""One block of CUDA memory for a training step: a memory pool whose segments lie at planned places inside it.

NOT YET RUN ON A GPU. The replay of `arena_cuda.cpp` is tested with a stand-in for cudaMalloc; what calls torch.cuda is
written from torch's documentation and source alone.

PyTorch's caching allocator stays in front of every memory pool. It asks the pool's own allocator for segments of
megabytes and hands out tensors within them by its own best fit. So what is planned here are the segments' places, not
each tensor's; to replay each tensor the caching allocator would have to be replaced altogether
(`torch.cuda.memory.change_current_allocator`), and with it go the statistics that walls and budgets read.

The first steps are recorded: the pool takes its segments from cudaMalloc. When a step asked for none, the pool is
dropped, one block for all its segments is reserved, and a new pool takes them from there. A segment that the plan does
not know comes from cudaMalloc and is counted as a departure.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from shoal.core.sizes import format_bytes
from shoal.errors import InputError
from shoal.lowlevel.extension import compiled

log = logging.getLogger("shoal")

_SOURCE = Path(__file__).with_name("arena_cuda.cpp")
_open: set[int] = set()  # devices: the allocator's functions know of one arena each


class CudaArena:
    """Serves a training step's segments from one block; a context manager, or call `close`.

    Replaces, in plain PyTorch, `torch.cuda.use_mem_pool` around the step.

    Args:
        device: a CUDA device; "cuda" is the current one.

    Attributes:
        bytes: of the block; 0 while steps are recorded.
        highest_live_bytes: the most bytes that tensors of a recorded step had at once, on top of what was there before.
        departures: segments that did not get a place in the block.
        departed_steps, replayed_steps: how many steps had such ones, and how many ran with the block at all.

    Raises:
        InputError: there is no CUDA, no C++ compiler, or an arena on this device is open already.

    Known limits: it has not been run; the backward pass runs on the calling thread, since only that thread's
    allocations go to the pool; tensors that outlive `close` keep their segments' block.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        if not torch.cuda.is_available():
            raise InputError(f"no arena can be made on {device}: torch sees no CUDA device here")
        device = torch.device(device)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        if self._index in _open:
            raise InputError(f"an arena on {self.device} is open already; close it first")
        self._library = _library()
        self._library.arena_cuda_use(*_cuda_malloc_and_free())
        path = str(compiled(_SOURCE, "an arena on CUDA", links=()))
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "arena_cuda_alloc", "arena_cuda_free")
        self._closed = False
        self.bytes = self.highest_live_bytes = 0
        self.departures = self.departed_steps = self.replayed_steps = 0
        self._pool: torch.cuda.MemPool | None = self._new_pool()
        _open.add(self._index)

    @property
    def _index(self) -> int:
        return int(self.device.index)

    @property
    def fragmentation(self) -> float:
        """Bytes of the block over the most bytes of tensors in it at once."""
        return self.bytes / self.highest_live_bytes if self.bytes and self.highest_live_bytes else 1.0

    @contextmanager
    def step(self, key: Hashable = None) -> Iterator[None]:
        """Everything that repeats: forward pass, loss, backward pass, optimizer.

        Args:
            key: as `Arena.step` takes it; a pool serves all steps alike.
        """
        if self._closed or self._pool is None:
            raise InputError("this arena is closed; make another one")
        asked = self._library.arena_cuda_asked(self._index, None)
        before_bytes = torch.cuda.memory_allocated(self.device)
        if not self.bytes:
            torch.cuda.reset_peak_memory_stats(self.device)
        with torch.autograd.set_multithreading_enabled(False), torch.cuda.use_mem_pool(self._pool, self.device):
            yield
        grown = self._library.arena_cuda_asked(self._index, None) - asked
        if self.bytes:
            self._learn()
        else:
            peak_bytes = torch.cuda.max_memory_allocated(self.device) - before_bytes
            self.highest_live_bytes = max(self.highest_live_bytes, peak_bytes)
            if asked and not grown:
                self._plan()

    def close(self) -> None:
        """Give the block back once no tensor lies in it. Closing twice is nothing."""
        if self._closed:
            return
        self._closed = True
        self._drop_pool()
        self._library.arena_cuda_plan(self._index, 0, (ctypes.c_int64 * 0)())
        _open.discard(self._index)

    def __enter__(self) -> CudaArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _learn(self) -> None:
        self.replayed_steps += 1
        departures = self._library.arena_cuda_departures(self._index)
        if departures == self.departures:
            return
        if not self.departures:
            log.warning("a step asked for segments that are not in the arena's plan; cudaMalloc served them")
        self.departed_steps += 1
        self.departures = departures

    def _plan(self) -> None:
        count = self._library.arena_cuda_asked(self._index, None)
        sizes = (ctypes.c_int64 * count)()
        self._library.arena_cuda_asked(self._index, sizes)
        self._drop_pool()
        failure = self._library.arena_cuda_plan(self._index, count, sizes)
        if failure:
            log.warning("no arena of %s can be had (CUDA error %d)", format_bytes(sum(sizes)), failure)
        else:
            self.bytes = sum(sizes)
        self._pool = self._new_pool()

    def _new_pool(self) -> torch.cuda.MemPool:
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool(self._allocator.allocator())

    def _drop_pool(self) -> None:
        """Its segments go back as soon as no tensor lies in them."""
        torch.cuda.synchronize(self.device)
        self._pool = None
        torch.cuda.empty_cache()


def _cuda_malloc_and_free() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """Of the CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps")
    loaded = (
        {line.split()[-1] for line in maps.read_text().splitlines() if "libcudart" in line} if maps.exists() else ()
    )
    for path in (None, *loaded):
        try:
            runtime = ctypes.CDLL(path)
            return ctypes.cast(runtime.cudaMalloc, ctypes.c_void_p), ctypes.cast(runtime.cudaFree, ctypes.c_void_p)
        except (AttributeError, OSError):
            continue
    raise InputError("an arena on CUDA needs libcudart, and torch has loaded none; install a torch with CUDA")


@cache
def _library() -> ctypes.CDLL:
    """The functions of arena_cuda.cpp."""
    library = ctypes.CDLL(str(compiled(_SOURCE, "an arena on CUDA", links=())))
    pointer, number, numbers = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("arena_cuda_use", None, [pointer, pointer]),
        ("arena_cuda_alloc", pointer, [ctypes.c_ssize_t, ctypes.c_int, pointer]),
        ("arena_cuda_free", None, [pointer, ctypes.c_ssize_t, ctypes.c_int, pointer]),
        ("arena_cuda_plan", ctypes.c_int, [ctypes.c_int, number, numbers]),
        ("arena_cuda_departures", number, [ctypes.c_int]),
        ("arena_cuda_asked", number, [ctypes.c_int, numbers]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
