"""The measured peak of device memory over one training step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.core.joined_step import Interval
from shoal.errors import InputError
from shoal.lowlevel import allocations
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.lowlevel.torch_state import allocated_bytes
from shoal.memory import reads
from shoal.memory.limit import MemoryLimit, memory_limit
from shoal.memory.storage_bytes import bytes_on, distinct_bytes

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


class WeakStorage:
    """A weak reference to a tensor's storage.

    Attributes:
        nbytes: its bytes.
        key: no other live storage has it.

    >>> x = torch.empty(100)
    >>> held = WeakStorage(x)
    >>> held.nbytes, held.is_alive
    (400, True)
    >>> del x
    >>> held.is_alive
    False
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.key: int = storage._cdata
        self._reference = StorageWeakRef(storage)

    @property
    def is_alive(self) -> bool:
        """Whether any tensor still uses it."""
        return not self._reference.expired()


class StepMeter:
    """Measures one step at a time: `begin`, `pause` after the forward pass, `resume` before the backward pass, `end`.

    A step may have several forward and backward passes, in any order: `go_on` begins another forward pass, and `pause`
    ends each of them.

    `intervals` holds what was in use before the first pass, then what each pass and each stretch between two passes
    used, in order; empty where that could not be measured.

    On the CPU the counting allocator of `shoal.memory.limit` counts what the step allocates; the bytes of the tensors
    that existed before are added, those among them that only code between the passes reads (`shoal.memory.reads`)
    once it has. On CUDA it is the caching allocator's peak, less what was there before the step and
    is not of it, such as a second model. Without a C++ compiler, PyTorch's profiler records the allocations of the two
    graphs on the CPU, and what lies between them is not measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.intervals: list[Interval] = []
        self._entered = ExitStack()
        self._counter: MemoryLimit | None = None
        self._running = False
        self._recording = False
        self._before_bytes = 0
        self._others_bytes = 0  # on CUDA: in use, but not by the step
        self._there: set[int] = set()
        self._passing: tuple[WeakStorage, ...] = ()
        self._passing_bytes = 0
        self._changes: list[int] = []  # of the part that is recorded, up to the last watched storage that was freed
        self._released_bytes = 0  # of that storage
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self._part: Part = "forward"
        self._peaks: dict[Part, int] = {}
        self._before_backward_bytes = self._reserved_bytes = self._given_bytes = 0
        self._noting = False

    def begin(self, resident: Iterable[torch.Tensor], passing: Iterable[WeakStorage] = ()) -> bool:
        """Start with the forward pass. An unfinished step is discarded.

        Args:
            resident: every tensor that is in use now and stays in use.
            passing: other storages, which may be freed before the step ends; each counts while it is alive.

        Returns:
            Whether the step is measured: not if a profiler is running and there is no C++ compiler.
        """
        self.abandon()
        self._peaks = {}
        self._before_backward_bytes = self._reserved_bytes = self._given_bytes = 0
        self._part = "forward"
        resident = list(resident)
        self._before_bytes = distinct_bytes(resident)
        self._there = {t.untyped_storage()._cdata for t in resident}
        self._passing = tuple({held.key: held for held in passing if held.key not in self._there}.values())
        self._passing_bytes = self._passing_now_bytes()
        try:
            self._counter = self._entered.enter_context(memory_limit(None, self.device))
            self._counter.start_fresh()
            self._counter.count_this_thread()
        except InputError:
            if allocations.is_busy():
                return False
            self._record()
        if self._counter is not None and self.device.type == "cuda":
            own_bytes = bytes_on(self.device, resident) + self._passing_now_bytes()
            self._others_bytes = max(0, self._counter.live_bytes - own_bytes)
        self._running = True
        before_bytes = self.in_use_bytes()
        self.intervals = [Interval(before_bytes, before_bytes)] if self._counter is not None else []
        return True

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was allocated since the step began, as far as that can be told."""
        return self._counter is not None and self._counter.is_fresh(tensor)

    def in_use_bytes(self) -> int:
        """Device bytes in use now; 0 if that cannot be measured."""
        if self._counter is None:
            return 0
        if self.device.type == "cuda":
            return self._counter.live_bytes - self._others_bytes
        return self._before_bytes + self._passing_now_bytes() + self._counter.fresh_bytes

    def _passing_now_bytes(self) -> int:
        return sum(allocated_bytes(held.nbytes, self.device) for held in self._passing if held.is_alive)

    def refused(self, refusals: Refusals) -> tuple[Part, int]:
        """The part in which an allocation was refused, and the bytes it would have taken to go on; 0 if these are not
        measured."""
        if not self._running or self._counter is None:
            return self._part, 0
        if self.device.type == "cuda":
            in_use_bytes = refusals.in_use_bytes - self._others_bytes
        else:
            in_use_bytes = self._before_bytes + self._passing_now_bytes() + refusals.in_use_bytes
        return self._part, in_use_bytes + refusals.last_bytes

    def pause(self) -> None:
        """End a forward or backward pass."""
        if self._running:
            self._close_part()
            self._part = "loss"
            if self._counter is not None:
                reads.start()
                self._noting = True

    def go_on(self, resident: Iterable[torch.Tensor]) -> None:
        """Begin another forward pass; `resident` is what is in use now, saved tensors included."""
        self._open_part("forward", resident)

    def resume(self, resident: Iterable[torch.Tensor]) -> None:
        """Begin a backward pass; `resident` is what is in use now, saved tensors included."""
        self._open_part("backward", resident)
        self._before_backward_bytes = max(self._before_backward_bytes, self.in_use_bytes())

    def end(self, *, paused: bool = False, counts_since: bool = False) -> Measured | None:
        """End the last backward pass. Returns what the step used, or None if it was not measured from start to end.

        Args:
            paused: whether that pass has been ended by `pause`.
            counts_since: whether what was used since then counts, as one more of `intervals`.
        """
        if not self._running or self._part != ("loss" if paused else "backward"):
            self.abandon()
            return None
        if counts_since and self._counter is not None:
            self._part = "backward"
        if not paused or self._part == "backward":
            self._close_part()
        self.abandon()
        return self.so_far()

    def so_far(self) -> Measured:
        """What the parts that are over have used."""
        peaks = self._peaks
        return Measured(
            peaks.get("forward", 0),
            peaks.get("loss", 0),
            peaks.get("backward", 0),
            self._before_backward_bytes,
            self._reserved_bytes,
            self._given_bytes,
        )

    def abandon(self) -> None:
        """Discard a step that did not end."""
        if self._recording:
            self._stop_recording()
        if self._noting:
            reads.stop()
        self._running = self._noting = False
        self._counter = None
        self._passing = ()
        self._entered.close()

    def _open_part(self, part: Part, resident: Iterable[torch.Tensor]) -> None:
        if not self._running:
            return
        if self._counter is not None:
            self._close_part()
            self._count_what_was_read(self._counter)
            self._count_what_was_there(self._counter, resident)
        else:
            resident = list(resident)
            self._before_bytes = distinct_bytes(resident)
            self._record()
            self._watch(resident)
        self._passing_bytes = self._passing_now_bytes()
        self._part = part

    def _count_what_was_there(self, counter: MemoryLimit, resident: Iterable[torch.Tensor]) -> None:
        """Add tensors from before the step that are in use only from here on, such as the next micro-batch."""
        old = (t for t in resident if t.untyped_storage()._cdata not in self._there and not counter.is_fresh(t))
        late = [t for t in old if t.device.type == self.device.type]
        self._before_bytes += distinct_bytes(late)
        self._others_bytes = max(0, self._others_bytes - bytes_on(self.device, late))
        self._there.update(t.untyped_storage()._cdata for t in late)

    def _count_what_was_read(self, counter: MemoryLimit) -> None:
        """Add what code between two passes has read and what was there before the step: it has been all along."""
        if not self._noting:
            return
        self._noting = False
        known = self._there.union(held.key for held in self._passing)
        found = counter.stale_among(reads.stop(), known)
        given_bytes = sum(found.values())
        self._there.update(found)
        if self.device.type == "cuda":
            given_bytes = min(given_bytes, self._others_bytes)
            self._others_bytes -= given_bytes
        else:
            self._before_bytes += given_bytes
        self._given_bytes += given_bytes
        self._peaks = {part: peak_bytes + given_bytes for part, peak_bytes in self._peaks.items()}
        self.intervals = [Interval(i.peak_bytes + given_bytes, i.end_bytes + given_bytes) for i in self.intervals]
        if self._before_backward_bytes:
            self._before_backward_bytes += given_bytes

    def _record(self) -> None:
        allocations.start()
        self._recording = True

    def _stop_recording(self) -> list[int]:
        """The changes since the part began."""
        self._changes += self._with_released(allocations.stop())
        changes, self._changes, self._watched, self._recording = self._changes, [], [], False
        return changes

    def _watch(self, resident: Iterable[torch.Tensor]) -> None:
        """Note when storages are freed: the profiler does not know those that were allocated between two parts, such as
        the gradients of results, and would count them to the end."""
        thread = threading.get_ident()
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in resident if t.device == self.device}

        def watched(storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
            nbytes = storage.nbytes()

            def freed(_: object) -> None:
                if self._recording and threading.get_ident() == thread:
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

    def _close_part(self) -> None:
        if self._counter is None:
            peak_bytes = allocations.peak_bytes(self._stop_recording())
        elif self.device.type == "cuda":
            peak_bytes = self._counter.peak_bytes - self._others_bytes
            self._reserved_bytes = max(self._reserved_bytes, self._counter.reserved_peak_bytes)
            self._counter.reset_peak()
            self._note(peak_bytes)
            self.intervals.append(Interval(peak_bytes, self.in_use_bytes()))
            return
        else:
            peak_bytes = self._counter.fresh_peak_bytes
            self._counter.reset_fresh_peak()
        # A storage that is freed during the loss was alive when the forward pass ended, and counts there.
        passing_bytes = self._passing_bytes
        if self._part == "loss":
            passing_bytes = self._passing_now_bytes()
        self._note(self._before_bytes + passing_bytes + peak_bytes)
        if self._counter is not None:
            self.intervals.append(Interval(self._before_bytes + passing_bytes + peak_bytes, self.in_use_bytes()))

    def _note(self, peak_bytes: int) -> None:
        self._peaks[self._part] = max(self._peaks.get(self._part, 0), peak_bytes)
