"""CUDA graphs: what a function launches is recorded once, and is one launch from then on.

The functions of `torch._C` are those that Inductor's CUDA graph trees call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Graph = torch.cuda.CUDAGraph
_private: Any = torch._C  # its stubs lack these names


class GraphPool:
    """Device memory that several CUDA graphs share: what is freed while one is recorded is used again by the next.

    Nothing else gets memory of it, so a graph finds its blocks at the same addresses in every replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # the default stream cannot be recorded

    def record(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """The graph of what `run` launches, none of which is done, and what it returns.

        cuBLAS's workspaces are of the pool while it runs: those of before are freed, and so are these.
        """
        graph = Graph()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            _private._cuda_clearCublasWorkspaces()
            try:
                # Other threads, such as one that pins batches, go on with what they do.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    results = run()
            finally:
                _private._cuda_clearCublasWorkspaces()
        return graph, results

    def release(self, graphs: Iterable[Graph]) -> None:
        """Give these graphs back, and to the device what nothing uses of the pool any more."""
        torch.cuda.synchronize(self._device)
        for graph in graphs:
            graph.reset()
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        """What the allocator has reserved of the device for this pool."""
        own = tuple(self._pool)
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == own)


@dataclass(frozen=True)
class _GraphTensor:
    """A tensor in a block of a pool."""

    block: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class Results:
    """What a recorded function returned: for each replay tensors over the same bytes.

    Args:
        values: what it returned.
        arguments: what it was given; those that it returns are taken from the arguments of the replay.
        fixed: tensors that lie outside of the pool, and stay where they are.
        device: of the pool.
    """

    def __init__(
        self, values: Sequence[Any], arguments: Sequence[Any], fixed: Sequence[Any], device: torch.device
    ) -> None:
        self._device = device
        self._blocks: list[tuple[int, int]] = []
        self._made: dict[int, torch.Tensor] = {}
        self._values: list[Any] = []
        places = {id(argument): place for place, argument in enumerate(arguments)}
        outside = {tensor.untyped_storage()._cdata for tensor in fixed if isinstance(tensor, torch.Tensor)}
        known: dict[int, int] = {}
        for value in values:
            if not isinstance(value, torch.Tensor):
                self._values.append(value)
            elif id(value) in places:
                self._values.append(_Argument(places[id(value)]))
            elif value.untyped_storage()._cdata in outside:
                self._values.append(value)
            else:
                storage = value.untyped_storage()
                if storage._cdata not in known:
                    known[storage._cdata] = len(self._blocks)
                    self._blocks.append((storage.data_ptr(), storage.nbytes()))
                self._values.append(
                    _GraphTensor(
                        known[storage._cdata], int(value.storage_offset()), value.shape, value.stride(), value.dtype
                    )
                )

    @property
    def length(self) -> int:
        """How many there are."""
        return len(self._values)

    def largest(self, places: Iterable[int]) -> list[int]:
        """The place, of these, of what lies in the largest block; none where they lie in no block of the pool."""
        own = [place for place in places if isinstance(self._values[place], _GraphTensor)]
        return sorted(own, key=lambda place: self._blocks[self._values[place].block][1])[-1:]

    def again(self, arguments: Sequence[Any], fresh: Collection[int]) -> list[Any]:
        """The results of a replay.

        Args:
            arguments: of the replay.
            fresh: places of those that get a storage of their own each time, whose life can be followed; what lies in
                the same block shares it. The others are the same tensors in every replay.
        """
        storages: dict[int, Any] = {}
        for place in fresh:
            value = self._values[place]
            if isinstance(value, _GraphTensor) and value.block not in storages:
                storages[value.block] = self._storage(value.block)
        results: list[Any] = []
        for place, value in enumerate(self._values):
            if isinstance(value, _Argument):
                results.append(arguments[value.place])
            elif not isinstance(value, _GraphTensor):
                results.append(value.detach() if isinstance(value, torch.Tensor) else value)
            elif value.block in storages:
                results.append(self._tensor(value, storages[value.block]))
            else:
                if place not in self._made:
                    self._made[place] = self._tensor(value, self._storage(value.block))
                results.append(self._made[place])
        return results

    def _storage(self, block: int) -> Any:
        address, nbytes = self._blocks[block]
        return _private._construct_storage_from_data_pointer(address, self._device, nbytes)

    def _tensor(self, value: _GraphTensor, storage: Any) -> torch.Tensor:
        made = torch.empty(0, dtype=value.dtype, device=self._device)
        return made.set_(storage, value.offset, value.shape, value.strides)


@dataclass(frozen=True)
class _Argument:
    """A result that is an argument."""

    place: int


def invalidate(storage: int, why: str) -> None:
    """Have every access to a storage, by its key, raise a RuntimeError with this text."""
    _private._set_storage_data_ptr_access_error_msg(storage, why)
