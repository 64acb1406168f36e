"""CUDA graphs on the CPU: the ops of a pass are written down, and a replay runs them again on the same tensors.

As on a device, nothing is done while a pass is recorded. Blocks are not shared: what a plan frees too early is not
found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import shoal.engine.cuda_graphs as tested


class EmulatedGraph:
    """As `torch.cuda.CUDAGraph`."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for op, args, kwargs, results in self._calls:
            for old, new in zip(_tensors(results), _tensors(op(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class EmulatedPool:
    """As `shoal.lowlevel.cuda_graphs.GraphPool`. Every graph that was recorded stays in `graphs`."""

    graphs: list[EmulatedGraph]

    def __init__(self, device: torch.device) -> None:
        self.is_released = False

    def record(self, run: Callable[[], Any]) -> tuple[EmulatedGraph, Any]:
        with _WritesDown() as written:
            results = run()
        written.undo()
        graph = EmulatedGraph(written.calls)
        self.graphs.append(graph)
        return graph, written.as_others_see(results)

    def release(self, graphs: Iterable[EmulatedGraph]) -> None:
        self.is_released = True

    def reserved_bytes(self) -> int:
        return 1


class _WritesDown(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._generator = torch.get_rng_state()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            key = tensor.untyped_storage()._cdata
            if key not in self._made and key not in self._before:
                self._before[key] = tensor.untyped_storage(), tensor.untyped_storage().clone()
        results = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, results))
        for tensor in _tensors(results):
            key = tensor.untyped_storage()._cdata
            if key not in self._before:
                self._made[key] = tensor
        return results

    def undo(self) -> None:
        """Put back what was written over, the generator too, and spoil what was computed."""
        torch.set_rng_state(self._generator)
        for storage, before in self._before.values():
            storage.copy_(before)
        for tensor in self._made.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def as_others_see(self, results: Any) -> Any:
        """The results in storages of their own over the same bytes: those that were made are held here for good."""
        storages: dict[int, Any] = {}

        def seen(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata not in self._made:
                return value
            own = value.untyped_storage()
            if own._cdata not in storages:
                pointer: Any = torch._C
                storages[own._cdata] = pointer._construct_storage_from_data_pointer(
                    own.data_ptr(), value.device, own.nbytes()
                )
            made = torch.empty(0, dtype=value.dtype)
            return made.set_(storages[own._cdata], value.storage_offset(), value.shape, value.stride())

        return tree_map(seen, results)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def emulate(monkeypatch: Any) -> list[EmulatedGraph]:
    """Let models on the CPU be compiled with `cuda_graphs=True`; the graphs, as they come."""
    graphs: list[EmulatedGraph] = []
    monkeypatch.setenv("SHOAL_KERNELS", "reference")  # others are called past PyTorch's dispatcher
    monkeypatch.setattr(EmulatedPool, "graphs", graphs, raising=False)
    monkeypatch.setattr(tested, "GraphPool", EmulatedPool)
    monkeypatch.setattr(tested, "invalidate", lambda storage, why: None)  # a CPU build of PyTorch has it not
    monkeypatch.setattr("shoal.engine.compile_options.CompileOptions.check_device", lambda options, device_type: None)
    return graphs
