"""The measured peak of one real step, forward and backward, in device bytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from shoal import allocations
from shoal.errors import InputError
from shoal.runtime.wall import Wall, wall
from shoal.standing import distinct_bytes


@dataclass(frozen=True)
class Measured:
    """What a step really used.

    Attributes:
        forward_bytes, loss_bytes, backward_bytes: highest use within each part; `loss` is all between the two graphs,
            0 where it could not be metered.
    """

    forward_bytes: int
    loss_bytes: int
    backward_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Highest device use between the start of the forward and the end of the backward pass."""
        return max(self.forward_bytes, self.loss_bytes, self.backward_bytes)


class StepMeter:
    """Meters one step at a time: `begin`, `pause` after the forward pass, `resume` before the backward pass, `end`.

    On CUDA it reads the allocator's own peak. On the CPU the counting allocator of `shoal.runtime.wall` counts, on top
    of the bytes of the tensors that were there before: what else is in use, or freed, is not the step's. Where that
    cannot be built (no C++ compiler), PyTorch's profiler lists the allocations of the two graphs, and what lies between
    them is not metered.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._standing = ExitStack()
        self._counter: Wall | None = None
        self._running = False
        self._recording = False
        self._before_bytes = 0
        self._peaks: list[int] = []

    def begin(self, resident: Iterable[torch.Tensor]) -> bool:
        """Start with the forward pass. An unfinished step is dropped.

        Args:
            resident: every tensor that is in use already.

        Returns:
            Whether the step is metered: not where a profiler is in the way.
        """
        self.abandon()
        self._peaks = []
        self._before_bytes = distinct_bytes(resident)
        try:
            self._counter = self._standing.enter_context(wall(None, self.device))
            self._counter.start_fresh()
        except InputError:
            if allocations.is_busy():
                return False
            self._record()
        self._running = True
        return True

    def pause(self) -> None:
        """The forward pass is over."""
        if self._running:
            self._close_part()

    def resume(self, resident: Iterable[torch.Tensor]) -> None:
        """The backward pass begins; `resident` is what is in use now, saved tensors included."""
        if not self._running:
            return
        if self._counter is not None:
            self._close_part()
        else:
            self._peaks.append(0)
            self._before_bytes = distinct_bytes(resident)
            self._record()

    def end(self) -> Measured | None:
        """The backward pass is over: what the step used, or None where it was not metered from start to end."""
        if not self._running or len(self._peaks) != 2:
            self.abandon()
            return None
        self._close_part()
        self.abandon()
        return Measured(*self._peaks)

    def abandon(self) -> None:
        """Forget a step that did not reach its end."""
        if self._recording:
            allocations.stop()
        self._recording = self._running = False
        self._counter = None
        self._standing.close()

    def _record(self) -> None:
        allocations.start()
        self._recording = True

    def _close_part(self) -> None:
        if self._counter is None:
            self._recording = False
            self._peaks.append(self._before_bytes + allocations.peak_bytes(allocations.stop()))
            return
        on_cuda = self.device.type == "cuda"
        self._peaks.append(self._counter.peak_bytes if on_cuda else self._before_bytes + self._counter.fresh_peak_bytes)
        self._counter.reset_fresh_peak()
