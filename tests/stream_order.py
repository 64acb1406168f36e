"""Whether the accesses of a recorded step to memory are ordered, by the streams they run on and what these wait for.

Two accesses to the same bytes, one of which writes, are a race unless one happens before the other. To hand a block out
and to free it are writes on the stream of its owner, who waits for nothing to use it again. So without a race each
offload starts after its storage is computed and ends before it is freed, and each fetch ends before its reader.

On CUDA PyTorch's own trace of events is recorded, on the CPU the calls of a link, whose two threads stand for streams.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import _gpu_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPUTE = 0  # the stream of ops on the CPU
_RENAMED = (torch.ops.aten.set_,)  # changes what a tensor is, not what is in memory


@dataclass(frozen=True)
class Access:
    """A stream reads or writes the bytes from `begin` to before `end`."""

    stream: int
    begin: int
    end: int
    writes: bool
    what: str


@dataclass(frozen=True)
class Mark:
    """`event` is what the stream has been given so far."""

    stream: int
    event: int


@dataclass(frozen=True)
class Wait:
    """The stream, or every stream where it is None, does nothing more before `event`."""

    stream: int | None
    event: int


Entry = Access | Mark | Wait


def in_order(entries: Iterable[Entry]) -> Iterator[tuple[Access, dict[int, int]]]:
    """Each access, and how many of each stream's accesses are over before it begins."""
    given: Counter[int] = Counter()
    before: dict[int, dict[int, int]] = defaultdict(dict)
    marks: dict[int, dict[int, int]] = {}
    for entry in entries:
        if isinstance(entry, Access):
            yield entry, dict(before[entry.stream])
            given[entry.stream] += 1
            before[entry.stream][entry.stream] = given[entry.stream]
        elif isinstance(entry, Mark):
            marks[entry.event] = dict(before[entry.stream])
        else:
            for stream in [*before] if entry.stream is None else [entry.stream]:
                for other, number in marks.get(entry.event, {}).items():
                    before[stream][other] = max(number, before[stream].get(other, 0))


def races(entries: Iterable[Entry]) -> list[str]:
    """Every two accesses that no order between streams keeps apart, in words."""
    found: list[str] = []
    earlier: dict[int, list[Access]] = defaultdict(list)
    for access, before in in_order(entries):
        for stream, others in earlier.items():
            for other in others[before.get(stream, 0) :]:
                if (access.writes or other.writes) and access.begin < other.end and other.begin < access.end:
                    found.append(f"{access.what} does not wait for {other.what}")
        earlier[access.stream].append(access)
    return found


def without_each_wait(entries: Sequence[Entry]) -> Iterator[tuple[Wait, list[Entry]]]:
    """Each wait and what is left of the record without it, but for those that order nothing: a thread and a stream copy
    in order, so that to wait for the second of two copies is to wait for both."""
    whole = [*in_order(entries)]
    for place, entry in enumerate(entries):
        if isinstance(entry, Wait):
            left = [*entries[:place], *entries[place + 1 :]]
            if [*in_order(left)] != whole:
                yield entry, left


class Recorder(TorchDispatchMode):
    """Records the accesses of every op on tensors of one device, and when their storages are freed."""

    def __init__(self, device: str, stream: Callable[[], int] = lambda: COMPUTE) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._device, self._stream = device, stream
        self._alive: dict[int, tuple[StorageWeakRef, Access]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.add()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        named = {argument.name: argument for argument in func._schema.arguments}
        given = [*zip(func._schema.arguments, args, strict=False), *((named[key], kwargs[key]) for key in kwargs)]
        returned = zip(func._schema.returns, result if len(func._schema.returns) > 1 else (result,), strict=False)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if func.overloadpacket not in _RENAMED and any(tensor.device.type == self._device for tensor in tensors):
            for argument, value in given:
                self._use(str(func), argument.alias_info, value, argument.alias_info is not None)
            for output, value in returned:
                self._use(str(func), output.alias_info, value, True)
        return result

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # for Dynamo: a step that is compiled already runs within it

    def add(self, *entries: Entry) -> None:
        """Write them down, after what was freed since the last ones."""
        for key, (storage, last) in [*self._alive.items()]:
            if storage.expired():
                del self._alive[key]
                self.entries.append(last)
        self.entries += entries

    def _use(self, op: str, alias: Any, value: Any, writes: bool) -> None:
        if alias is not None and not alias.is_write:
            return  # a view
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage, stream, begin = tensor.untyped_storage(), self._stream(), tensor.data_ptr()
                extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
                self.entries.append(Access(stream, begin, begin + extent * tensor.itemsize, writes, op))
                if storage._cdata not in self._alive:
                    whole = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                    freed = Access(stream, *whole, True, f"freeing what {op} was the first to use")
                    self._alive[storage._cdata] = StorageWeakRef(storage), freed


@contextmanager
def recorded_on_cuda() -> Iterator[list[Entry]]:
    """The record of what the block does on the present CUDA device."""
    recorder = Recorder("cuda", lambda: torch.cuda.current_stream().cuda_stream)
    torch._C._activate_gpu_trace()  # type: ignore[attr-defined]
    _gpu_trace.register_callback_for_event_record(lambda event, stream: recorder.add(Mark(stream, event)))
    _gpu_trace.register_callback_for_event_wait(lambda event, stream: recorder.add(Wait(stream, event)))
    _gpu_trace.register_callback_for_event_synchronization(lambda event: recorder.add(Wait(None, event)))
    with recorder:
        yield recorder.entries
    for callbacks in (
        _gpu_trace.EventRecordCallbacks,
        _gpu_trace.EventWaitCallbacks,
        _gpu_trace.EventSynchronizationCallbacks,
    ):
        callbacks.callback_list.clear()
