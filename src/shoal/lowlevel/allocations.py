"""Every allocation and every release of device bytes while something runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import accumulate
from typing import Any, TypeVar

from torch import get_num_threads, set_num_threads
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from shoal.errors import InputError

Result = TypeVar("Result")


def is_busy() -> bool:
    """Whether a profiler is already running on this thread; `record` cannot run at the same time."""
    return bool(_profiler_enabled())


def unprofiled(call: Callable[[], Result]) -> Result:
    """Call something where no profiler sees it and `record` can run, also while one runs on this thread.

    A profiler of PyTorch's is one of a thread: while one runs here, the call is made on another, and this thread waits.
    What PyTorch keeps for each thread (grad mode, autocast, modes of dispatch) is as on a new thread there, but for the
    number of threads that kernels take: the bits of sums depend on it.

    Returns:
        What `call` returns; what it raises is raised here.

    >>> import torch
    >>> with torch.autograd.profiler.profile(use_kineto=False) as profiler:
    ...     unprofiled(lambda: record(lambda: torch.ones(256))[1])
    [1024]
    """
    if not is_busy():
        return call()
    threads = get_num_threads()
    with ThreadPoolExecutor(1, "shoal-unprofiled", initializer=set_num_threads, initargs=(threads,)) as thread:
        return thread.submit(copy_context().run, call).result()


def record(run: Callable[[], Result]) -> tuple[Result, list[int]]:
    """Run something on the CPU and list the bytes its allocator allocated (positive) and freed (negative), in order.

    These are the `[memory]` events of `torch.profiler`, read from the older of PyTorch's two profilers: it costs well
    under a millisecond to start, and the newer one writes two lines to stderr every time. Bytes of tensors only:
    what a library allocates without PyTorch's allocator is not seen.

    Returns:
        What `run` returns, and the bytes. Releases after `run` returned are not among them.

    Raises:
        InputError: a profiler is already running on this thread.

    >>> import torch
    >>> record(lambda: torch.ones(256).relu())[1]
    [1024, 1024, -1024]
    """
    if is_busy():
        raise InputError("allocations cannot be recorded while a profiler runs; start it after the first steps")
    start()
    changes: list[int] = []
    try:
        result = run()
    finally:
        changes = stop()
    return result, changes


def start() -> None:
    """Begin to list allocations on this thread, for what no single call encloses; see `record`."""
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))


def stop() -> list[int]:
    """End what `start` began: the bytes allocated and freed since, in order."""
    threads: list[list[Any]] = _disable_profiler_legacy()
    first = threads[0][0]
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    if len(threads) > 1:
        events.sort(key=lambda event: first.cpu_elapsed_us(event))
    return [event.cpu_memory_usage() for event in events if event.cpu_memory_usage()]


def peak_bytes(changes: Sequence[int]) -> int:
    """The most bytes in use at once, counted from where the changes begin.

    >>> peak_bytes([1024, 1024, -1024])
    2048
    """
    return max(0, max(accumulate(changes), default=0))
