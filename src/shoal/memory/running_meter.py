"""The device bytes in use from one moment to the next, counted as long as the meter runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from shoal.core.joined_step import Interval
from shoal.errors import InputError
from shoal.lowlevel import allocations
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.lowlevel.torch_state import allocated_bytes
from shoal.memory import reads
from shoal.memory.limit import MemoryLimit, memory_limit
from shoal.memory.storage_bytes import WeakStorage, bytes_on, distinct_bytes, storage_sizes


class RunningMeter:
    """Counts what is in use and tells, at each `mark`, the peak since the one before.

    What is allocated while it runs is counted by the allocator: on CUDA by the caching allocator, on the CPU by the
    counting one of `shoal.memory.limit`. What was there before it ran is counted as it is named: on CUDA what else was
    there is taken off what the allocator counts. Without a C++ compiler, PyTorch's profiler can record each pass on the
    CPU, from `go_on` to `mark`; what lies between passes is not measured then.

    >>> meter = RunningMeter(torch.device("cpu"))
    >>> meter.start()
    >>> x = torch.empty(100)
    >>> meter.restart_from([x])
    >>> y = torch.empty(50)
    >>> del y
    >>> meter.mark()
    Interval(peak_bytes=600, end_bytes=400)
    >>> meter.close()

    Attributes:
        reserved_bytes: most that CUDA's allocator had reserved at a mark since it was started, for all of the process;
            0 on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reserved_bytes = 0
        self._entered = ExitStack()
        self._counter: MemoryLimit | None = None
        self._recorder: PassRecorder | None = None
        self._before_bytes = 0
        self._others_bytes = 0  # on CUDA: in use since before, but not named
        self._there: set[int] = set()
        self._passing: tuple[WeakStorage, ...] = ()
        self._passing_bytes = 0  # when the last interval began

    @property
    def is_running(self) -> bool:
        """Whether it counts."""
        return self._counter is not None

    def start(self, *, this_thread: bool = False, or_records: bool = False) -> None:
        """Count from here on.

        Args:
            this_thread: whether what other threads of Python allocate is left out.
            or_records: whether passes are recorded without a C++ compiler.

        Raises:
            InputError: there is no C++ compiler, on the CPU, and a profiler is running if passes may be recorded.
        """
        if self._counter is not None:
            return
        try:
            self._counter = self._entered.enter_context(memory_limit(None, self.device))
        except InputError:
            if not or_records or allocations.is_busy():
                raise
            self._recorder = PassRecorder(self.device, (), ())
            return
        self._counter.start_fresh(this_thread=this_thread)
        self._before_bytes, self._there, self.reserved_bytes = 0, set(), 0
        self._others_bytes = self._counter.stale_bytes

    def count_this_thread(self) -> None:
        """The thread whose allocations count is this one: a backward pass may run in another than the forward pass."""
        if self._counter is not None:
            self._counter.count_this_thread()

    def restart_from(self, tensors: Iterable[torch.Tensor], passing: Iterable[WeakStorage] = ()) -> None:
        """Of what was there before the meter ran, count these tensors, these storages while they are alive, and nothing
        else."""
        if self._recorder is not None:
            self._recorder = PassRecorder(self.device, list(tensors), passing)
            return
        self._before_bytes, self._there = 0, set()
        if self._counter is not None and self.device.type == "cuda":
            self._others_bytes = self._counter.stale_bytes
        self.count(tensors)
        self._passing = tuple({held.key: held for held in passing if held.key not in self._there}.values())
        self._there.update(held.key for held in self._passing)
        self._passing_bytes = self._passing_now_bytes()
        if self.device.type == "cuda":
            self._others_bytes = max(0, self._others_bytes - self._passing_bytes)

    def go_on(self, tensors: Iterable[torch.Tensor]) -> int:
        """Another pass begins, in which these tensors are in use. Those that were not counted yet, as of the next
        micro-batch, are in use only from here on; those on "meta", which stand for memory to come, have been counted.

        Returns:
            How many bytes were not counted yet; 0 where passes are recorded.
        """
        if self._recorder is not None:
            self._recorder.start(tensors)
            return 0
        return self.count(tensor for tensor in tensors if tensor.device.type == self.device.type)

    def _passing_now_bytes(self) -> int:
        return sum(allocated_bytes(held.nbytes, self.device) for held in self._passing if held.is_alive)

    def count(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count these tensors too; how many bytes of theirs were not counted yet."""
        counter = self._counter
        if counter is None:
            return 0
        new = [t for t in tensors if t.device.type in (self.device.type, "meta") and not self._is_counted(counter, t)]
        self._there.update(t.untyped_storage()._cdata for t in new)
        if self.device.type == "cuda":
            new_bytes = min(bytes_on(self.device, new), self._others_bytes)
            self._others_bytes -= new_bytes
            return new_bytes
        new_bytes = distinct_bytes(new)
        self._before_bytes += new_bytes
        return new_bytes

    def count_reads(self) -> int:
        """Count what ops have read since `reads.start` too; how many bytes of that were not counted yet."""
        found = reads.stop()
        if self._counter is None:
            return 0
        new = self._counter.stale_among(found, self._there)
        self._there.update(new)
        new_bytes = sum(new.values())
        if self.device.type == "cuda":
            new_bytes = min(new_bytes, self._others_bytes)
            self._others_bytes -= new_bytes
        else:
            self._before_bytes += new_bytes
        return new_bytes

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was allocated since the meter runs, as far as that can be told."""
        return self._counter is not None and self._counter.is_fresh(tensor)

    def in_use_bytes(self) -> int:
        """Device bytes in use now; 0 where it does not run."""
        counter = self._counter
        if counter is None:
            return 0
        if self.device.type == "cuda":
            return counter.live_bytes - self._others_bytes
        return self._before_bytes + self._passing_now_bytes() + counter.fresh_bytes

    def refused(self, refusals: Refusals) -> int:
        """The bytes that it would have taken to go on, when an allocation was refused; 0 where it does not run."""
        if self._counter is None:
            return 0
        own_bytes = self._before_bytes + self._passing_now_bytes()
        if self.device.type == "cuda":
            own_bytes = -self._others_bytes
        return own_bytes + refusals.in_use_bytes + refusals.last_bytes

    def mark(self, *, passed: bool = False) -> Interval:
        """What was in use since the last mark, and what is now.

        Args:
            passed: whether storages that pass were freed, where they were, before all else: eager code between two
                passes drops old gradients before it computes a loss.
        """
        counter = self._counter
        if counter is None:
            return Interval(0 if self._recorder is None else self._recorder.stop(), 0)
        if self.device.type == "cuda":
            measured = Interval(counter.peak_bytes - self._others_bytes, counter.live_bytes - self._others_bytes)
            self.reserved_bytes = max(self.reserved_bytes, counter.reserved_peak_bytes)
            counter.reset_peak()
            return measured
        end_bytes, now_bytes = self.in_use_bytes(), self._passing_now_bytes()
        passing_bytes = now_bytes if passed else self._passing_bytes
        measured = Interval(self._before_bytes + passing_bytes + counter.fresh_peak_bytes, end_bytes)
        counter.reset_fresh_peak()
        self._passing_bytes = now_bytes
        return measured

    def close(self) -> None:
        """Count no longer."""
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
        self._counter, self._passing, self._passing_bytes = None, (), 0
        self._entered.close()

    def _is_counted(self, counter: MemoryLimit, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage()._cdata in self._there:
            return True
        return tensor.device.type != "meta" and counter.is_fresh(tensor)


class PassRecorder:
    """The peak of one pass after another on the CPU, as PyTorch's profiler records what is allocated in it.

    It needs no C++ compiler, which could build what counts all the time.

    Args:
        device: where they run.
        resident: every tensor that is in use and stays in use.
        passing: other storages, which may be freed; each counts while it is alive.
    """

    def __init__(self, device: torch.device, resident: Sequence[torch.Tensor], passing: Iterable[WeakStorage]) -> None:
        self._device = device
        self._there = set(storage_sizes(resident))
        self._passing = {held.key: held for held in passing if held.key not in self._there}
        self._before_bytes = 0
        self._changes: list[int] = []  # up to the last watched storage that was freed
        self._released_bytes = 0  # of that storage
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []
        self._is_recording = False

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
