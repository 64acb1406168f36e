"""The measured peak of one real step, forward and backward, in device bytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.errors import InputError
from shoal.lowlevel import allocations
from shoal.memory.held import HeldStorage
from shoal.memory.limit import Wall, wall
from shoal.memory.static_memory import distinct_bytes

Part = Literal["forward", "loss", "backward"]


@dataclass(frozen=True)
class Measured:
    """What a step really used.

    Attributes:
        forward_bytes, loss_bytes, backward_bytes: highest use within each part; `loss` is all between the two graphs,
            0 where it could not be metered.
        before_backward_bytes: in use when a backward pass begins; 0 where it could not be metered.
    """

    forward_bytes: int
    loss_bytes: int
    backward_bytes: int
    before_backward_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Highest device use between the start of the forward and the end of the backward pass."""
        return max(self.forward_bytes, self.loss_bytes, self.backward_bytes)


class StepMeter:
    """Meters one step at a time: `begin`, `pause` after the forward pass, `resume` before the backward pass, `end`.

    A step may have several forward and backward passes, in any order: `go_on` begins another forward pass, and `pause`
    ends each of them.

    On CUDA it reads the allocator's own peak. On the CPU the counting allocator of `shoal.memory.limit` counts, on top
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
        self._there: set[int] = set()
        self._passing: tuple[HeldStorage, ...] = ()
        self._passing_bytes = 0
        self._part: Part = "forward"
        self._peaks: dict[Part, int] = {}
        self._before_backward_bytes = 0

    def begin(self, resident: Iterable[torch.Tensor], passing: Iterable[HeldStorage] = ()) -> bool:
        """Start with the forward pass. An unfinished step is dropped.

        Args:
            resident: every tensor that is in use already and stays.
            passing: storages besides that may go before the step ends; each counts in the parts that it lives to see.

        Returns:
            Whether the step is metered: not where a profiler is in the way.
        """
        self.abandon()
        self._peaks = {}
        self._before_backward_bytes = 0
        self._part = "forward"
        resident = list(resident)
        self._before_bytes = distinct_bytes(resident)
        self._there = {t.untyped_storage()._cdata for t in resident}
        self._passing = tuple({held.key: held for held in passing if held.key not in self._there}.values())
        self._passing_bytes = sum(held.nbytes for held in self._passing if held.is_alive)
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
        """A forward or backward pass is over."""
        if self._running:
            self._close_part()
            self._part = "loss"

    def go_on(self, resident: Iterable[torch.Tensor]) -> None:
        """Another forward pass of the step begins; `resident` is what is in use now, saved tensors included."""
        self._open_part("forward", resident)

    def resume(self, resident: Iterable[torch.Tensor]) -> None:
        """A backward pass begins; `resident` is what is in use now, saved tensors included."""
        self._open_part("backward", resident)
        if self._counter is not None:
            now_bytes = self._before_bytes + self._passing_bytes + self._counter.fresh_peak_bytes
            self._before_backward_bytes = max(self._before_backward_bytes, now_bytes)

    def end(self) -> Measured | None:
        """The last backward pass is over: what the step used, or None where it was not metered from start to end."""
        if not self._running or self._part != "backward":
            self.abandon()
            return None
        self._close_part()
        self.abandon()
        peaks = self._peaks
        return Measured(
            peaks.get("forward", 0), peaks.get("loss", 0), peaks.get("backward", 0), self._before_backward_bytes
        )

    def abandon(self) -> None:
        """Forget a step that did not reach its end."""
        if self._recording:
            allocations.stop()
        self._recording = self._running = False
        self._counter = None
        self._passing = ()
        self._standing.close()

    def _open_part(self, part: Part, resident: Iterable[torch.Tensor]) -> None:
        if not self._running:
            return
        if self._counter is not None:
            self._close_part()
            self._count_what_was_there(self._counter, resident)
        else:
            self._before_bytes = distinct_bytes(resident)
            self._record()
        self._passing_bytes = sum(held.nbytes for held in self._passing if held.is_alive)
        self._part = part

    def _count_what_was_there(self, counter: Wall, resident: Iterable[torch.Tensor]) -> None:
        """A batch that was made before the step, but is used from here on."""
        old = (t for t in resident if t.untyped_storage()._cdata not in self._there and not counter.is_fresh(t))
        late = [t for t in old if t.device.type == self.device.type]
        self._before_bytes += distinct_bytes(late)
        self._there.update(t.untyped_storage()._cdata for t in late)

    def _record(self) -> None:
        allocations.start()
        self._recording = True

    def _close_part(self) -> None:
        if self._counter is None:
            self._recording = False
            peak_bytes = allocations.peak_bytes(allocations.stop())
        elif self.device.type == "cuda":
            self._note(self._counter.peak_bytes)
            self._counter.reset_fresh_peak()
            return
        else:
            peak_bytes = self._counter.fresh_peak_bytes
            self._counter.reset_fresh_peak()
        # What passes away during the loss was there when the forward pass ended, and counts there.
        passing_bytes = self._passing_bytes
        if self._part == "loss":
            passing_bytes = sum(held.nbytes for held in self._passing if held.is_alive)
        self._note(self._before_bytes + passing_bytes + peak_bytes)

    def _note(self, peak_bytes: int) -> None:
        self._peaks[self._part] = max(self._peaks.get(self._part, 0), peak_bytes)
