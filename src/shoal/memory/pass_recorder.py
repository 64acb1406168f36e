"""The peak of one pass after another on the CPU, without a C++ compiler that could build what counts all the time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch

from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import WeakStorage, distinct_bytes, storage_sizes


class PassRecorder:
    """The peak of one pass after another on the CPU, as PyTorch's profiler records what is allocated in it.

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
