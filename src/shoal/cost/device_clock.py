"""How long a GPU computes an op, apart from how long the host takes to launch it.

What lies between two events around a single call is mostly its launch: 6 to 14 µs for kernels that take 2. So calls are
queued up after a kernel that only waits, and run back to back when it ends. Before each of them the L2 cache is
overwritten: in a step its operands were written long ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shoal.lowlevel.cuda_calls import l2_bytes, spin

_FIRST_CYCLES = 1 << 20  # half a millisecond
_MAX_CYCLES = 1 << 27  # some 70 ms
_MIN_CALLS = 3
_MAX_CALLS = 10
_ENOUGH_SECONDS = 0.003  # of calls, after the fewest


class DeviceTime(NamedTuple):
    """What one call takes.

    Attributes:
        kernel_seconds: on the device, its allocations included.
        launch_seconds: on the host, until the call returns.
    """

    kernel_seconds: float
    launch_seconds: float


class DeviceClock:
    """Times calls on one CUDA device.

    It holds twice the bytes of the device's L2 cache, where there is room for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            self._overwritten: torch.Tensor | None = torch.empty(2 * l2_bytes(device), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            self._overwritten = None
        self._cycles = _FIRST_CYCLES
        self._empty_seconds = 0.0  # that two events are apart with nothing between
        self._empty_seconds = min(one.kernel_seconds for one in self._queued(lambda: None, _MAX_CALLS))

    def time(self, run: Callable[[], Any], *, once: bool = False) -> DeviceTime:
        """The fastest of three to ten calls; of one where `once` is set or that takes long.

        `run` must have been called before: a first call selects kernels.
        """
        (first,) = self._queued(run, 1)
        if once or first.kernel_seconds > _ENOUGH_SECONDS:
            return first
        n_calls = min(_MAX_CALLS, max(_MIN_CALLS, int(_ENOUGH_SECONDS / max(first.kernel_seconds, 1e-6))))
        found = self._queued(run, n_calls)
        return DeviceTime(min(one.kernel_seconds for one in found), min(one.launch_seconds for one in found))

    def give_back(self) -> bool:
        """Free what the clock holds of the device; whether it held any. Times are then of operands in the cache."""
        held, self._overwritten = self._overwritten is not None, None
        torch.accelerator.empty_cache()
        return held

    def _queued(self, run: Callable[[], Any], n_calls: int) -> list[DeviceTime]:
        """Each of that many calls, all of which were launched before the device began the first."""
        cycles = self._cycles
        while True:
            begins, ends = (
                [torch.Event(device=self._device, enable_timing=True) for _ in range(n_calls)] for _ in "be"
            )
            launches: list[float] = []
            spin(self._device, cycles)
            waited = torch.Event(device=self._device)
            waited.record()
            for begin, end in zip(begins, ends, strict=True):
                if self._overwritten is not None:
                    self._overwritten.zero_()
                begin.record()
                called = time.perf_counter()
                result = run()
                launches.append(time.perf_counter() - called)
                end.record()
                del result  # its block exists for the next call
            all_queued = not waited.query()
            ends[-1].synchronize()
            if all_queued:
                self._cycles = cycles
            if all_queued or cycles >= _MAX_CYCLES:  # an op that reads a value on the host waits for the device
                break
            cycles *= 4
        kernels = [begin.elapsed_time(end) / 1e3 - self._empty_seconds for begin, end in zip(begins, ends, strict=True)]
        return [DeviceTime(max(0.0, kernel), launch) for kernel, launch in zip(kernels, launches, strict=True)]
