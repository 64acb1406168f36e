"""The measured peak of device memory over one training step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.errors import InputError
from shoal.lowlevel import allocations
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.memory import reads
from shoal.memory.running_meter import RunningMeter
from shoal.memory.storage_bytes import WeakStorage, distinct_bytes, storage_sizes

Part = Literal["forward", "loss", "backward"]


@dataclass(frozen=True)
class Measured:
    """Device bytes of one step.

    Attributes:
        forward_bytes, loss_bytes, backward_bytes: peak within each part; `loss` is everything between the forward and
            the backward graph, 0 if it could not be measured.
        before_backward_bytes: in use when a backward pass begins; 0 if it could not be measured.
        given_bytes: of what code between the passes reads and the passes do not, such as targets, that was there before
            the step: part of all of these.
        reserved_bytes: most that CUDA's allocator had reserved meanwhile, for all of the process; 0 on the CPU.
    """

    forward_bytes: int
    loss_bytes: int
    backward_bytes: int
    before_backward_bytes: int = 0
    reserved_bytes: int = 0
    given_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak between the start of the forward pass and the end of the backward pass."""
        return max(self.forward_bytes, self.loss_bytes, self.backward_bytes)


class StepMeter:
    """Measures one step at a time: `begin`, `pause` after the forward pass, `resume` before the backward pass, `end`.

    A step may have several forward and backward passes, in any order: `go_on` begins another forward pass, and `pause`
    ends each of them.

    A `RunningMeter` counts, and those tensors that only code between the passes reads (`shoal.memory.reads`) once it
    has. Without a C++ compiler, PyTorch's profiler records the allocations of the two graphs on the CPU, and what lies
    between them is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._meter = RunningMeter(device)
        self._recorder: _PassRecorder | None = None
        self._runs = self._notes_reads = False
        self._part: Part = "forward"
        self._peaks: dict[Part, int] = {}
        self._before_backward_bytes = self._given_bytes = 0

    def begin(self, resident: Iterable[torch.Tensor], passing: Iterable[WeakStorage] = ()) -> bool:
        """Start with the forward pass. An unfinished step is discarded.

        Args:
            resident: every tensor that is in use now and stays in use.
            passing: other storages, which may be freed before the step ends; each counts while it is alive.

        Returns:
            Whether the step is measured: not if a profiler is running and there is no C++ compiler.
        """
        self.abandon()
        self._peaks, self._part = {}, "forward"
        self._before_backward_bytes = self._given_bytes = 0
        resident = list(resident)
        try:
            self._meter.start()
        except InputError:
            if allocations.is_busy():
                return False
            self._recorder = _PassRecorder(self.device, resident, passing)
        else:
            try:
                self._meter.count_this_thread()
                self._meter.restart_from(resident, passing)
                self._meter.mark()
            except BaseException:
                self._meter.close()  # else it would count for other models
                raise
        self._runs = True
        return True

    def refused(self, refusals: Refusals) -> tuple[Part, int]:
        """The part in which an allocation was refused, and the bytes it would have taken to go on; 0 if these are not
        measured."""
        return self._part, self._meter.refused(refusals)

    def pause(self) -> None:
        """End a forward or backward pass."""
        if self._runs:
            self._close_part()
            self._part = "loss"
            if self._recorder is None:
                reads.start()
                self._notes_reads = True

    def go_on(self, resident: Iterable[torch.Tensor]) -> None:
        """Begin another forward pass; `resident` is what is in use now, saved tensors included."""
        self._open_part("forward", resident)

    def resume(self, resident: Iterable[torch.Tensor]) -> None:
        """Begin a backward pass; `resident` is what is in use now, saved tensors included."""
        self._open_part("backward", resident)
        self._before_backward_bytes = max(self._before_backward_bytes, self._meter.in_use_bytes())

    def end(self) -> Measured | None:
        """End the last backward pass. Returns what the step used, or None if it was not measured from start to end."""
        measures = self._runs and self._part == "backward"
        if measures:
            self._close_part()
        self.abandon()
        return self.so_far() if measures else None

    def so_far(self) -> Measured:
        """What the parts that are over have used."""
        peaks = self._peaks
        return Measured(
            peaks.get("forward", 0),
            peaks.get("loss", 0),
            peaks.get("backward", 0),
            self._before_backward_bytes,
            self._meter.reserved_bytes,
            self._given_bytes,
        )

    def abandon(self) -> None:
        """Discard a step that did not end."""
        if self._recorder is not None:
            self._recorder.stop()
        if self._notes_reads:
            reads.stop()
        self._runs = self._notes_reads = False
        self._recorder = None
        self._meter.close()

    def _open_part(self, part: Part, resident: Iterable[torch.Tensor]) -> None:
        if not self._runs:
            return
        if self._recorder is not None:
            self._recorder.start(resident)
        else:
            self._count_reads()
            self._close_part()
            # Of before the step and in use only from here on, as the next micro-batch. What stands for memory to come,
            # on "meta", is counted when the step begins.
            self._meter.count(tensor for tensor in resident if tensor.device.type == self.device.type)
        self._part = part

    def _count_reads(self) -> None:
        """Count what code between two passes has read and what was there before the step: it has been all along."""
        if not self._notes_reads:
            return
        self._notes_reads = False
        given_bytes = self._meter.count_reads()
        self._given_bytes += given_bytes
        self._peaks = {part: peak_bytes + given_bytes for part, peak_bytes in self._peaks.items()}
        self._before_backward_bytes += given_bytes if self._before_backward_bytes else 0

    def _close_part(self) -> None:
        if self._recorder is not None:
            peak_bytes = self._recorder.stop()
        else:
            peak_bytes = self._meter.mark(passed=self._part == "loss").peak_bytes
        self._peaks[self._part] = max(self._peaks.get(self._part, 0), peak_bytes)


class _PassRecorder:
    """The peak of one pass after another on the CPU, as PyTorch's profiler records what is allocated in it.

    Args:
        device: where they run.
        resident, passing: as of `StepMeter.begin`, for the pass that begins.
    """

    def __init__(self, device: torch.device, resident: Sequence[torch.Tensor], passing: Iterable[WeakStorage]) -> None:
        self._device = device
        self._there = set(storage_sizes(resident))
        self._passing = {held.key: held for held in passing if held.key not in self._there}
        self._changes: list[int] = []  # up to the last watched storage that was freed
        self._released_bytes = 0  # of that storage
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self._is_recording = False
        self.start(resident)

    def start(self, resident: Iterable[torch.Tensor]) -> None:
        """A pass begins; `resident` is what is in use now."""
        resident = list(resident)
        passing_bytes = sum(held.nbytes for held in self._passing.values() if held.is_alive)
        self._before_bytes = distinct_bytes(resident) + passing_bytes
        allocations.start()
        self._is_recording = True
        self._watch(resident)

    def stop(self) -> int:
        """The pass ends; its peak. 0 if none runs."""
        if not self._is_recording:
            return 0
        changes = self._changes + self._with_released(allocations.stop())
        self._changes, self._watched, self._is_recording = [], [], False
        return self._before_bytes + allocations.peak_bytes(changes)

    def _watch(self, resident: Iterable[torch.Tensor]) -> None:
        """Note when storages are freed: the profiler does not know those that were allocated between two parts, such as
        the gradients of results, and would count them to the end."""
        thread = threading.get_ident()
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in resident if t.device == self._device}

        def watched(storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
            nbytes = storage.nbytes()

            def freed(_: object) -> None:
                if self._is_recording and threading.get_ident() == thread:
                    self._changes += self._with_released(allocations.stop())
                    self._released_bytes = nbytes
                    allocations.start()

            return weakref.ref(storage, freed)

        self._watched = [watched(each) for key, each in storages.items() if key not in self._there and each.nbytes()]

    def _with_released(self, changes: list[int]) -> list[int]:
        """The changes since a watched storage was freed, and that. If the profiler reports it, it comes first, with the
        bytes of what it saw at that address last: another storage, if this one was allocated between two parts."""
        released_bytes, self._released_bytes = self._released_bytes, 0
        if not released_bytes:
            return changes
        return [-released_bytes, *(changes[1:] if changes and changes[0] < 0 else changes)]
