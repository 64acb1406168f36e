"""The peak of steps under a host, by PyTorch's own memory events: shares no code with `memory/running_meter`."""

from __future__ import annotations

import gc
import time
from itertools import accumulate
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.lowlevel import allocations

_RECORD_FROM = 3  # steps: in those before it Shoal profiles ops and plans, in addition to which nothing else can record
_MEASURE_FROM = 4  # by then what was there before the recording, and is dropped in each step, is gone: PyTorch's events
# do not tell how much was freed of that
_MARK_BYTES = 4321  # an allocation that nothing else makes


class HostMeter:
    """Most bytes in use between the ends of two optimizer steps, from the fifth step on, whoever runs the loop.

    They are the tensors that are there when the fourth step has ended, but for those from before the run, such as the
    data set: parameters, gradients, buffers, the optimizer's state, whatever the host or Shoal holds; and all that is
    allocated and not freed from then on: batches, activations, gradients, the optimizer's own temporaries.

    Attributes:
        peak_bytes: those bytes.
        steps: how many there were.
        step_seconds: from the end of a step, or from where the meter was opened, to the end of the next.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.steps = 0
        self.step_seconds: list[float] = []
        self._before: dict[int, StorageWeakRef] = {}  # weak: no other storage gets one's number meanwhile
        self._there_bytes = 0

    def __enter__(self) -> HostMeter:
        self._before = {key: StorageWeakRef(storage) for key, storage in _storages().items()}
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        if self.steps < _RECORD_FROM:
            return
        changes = allocations.stop()
        marks = [place for place, change in enumerate(changes) if change == _MARK_BYTES]
        if len(marks) > 1:
            self.peak_bytes = self._there_bytes + max(accumulate(changes[marks[0] + 2 : marks[-1]]))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
            return  # Shoal tries out how much state there will be
        self.steps += 1
        self.step_seconds.append(time.perf_counter() - self._since)
        gc.collect()  # what a host leaves in circles goes by chance
        if self.steps == _RECORD_FROM:
            allocations.start()
        if self.steps == _MEASURE_FROM:
            fresh = [storage for key, storage in _storages().items() if key not in self._before]
            self._there_bytes = sum(storage.nbytes() for storage in fresh)
        if self.steps >= _MEASURE_FROM:
            torch.empty(_MARK_BYTES, dtype=torch.uint8)
        self._since = time.perf_counter()


def _storages() -> dict[int, torch.UntypedStorage]:
    """Every block of PyTorch's allocator that a tensor known to Python uses."""
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == "cpu"}
    return {key: storage for key, storage in storages.items() if storage.resizable()}  # others are mapped elsewhere
