"""`TransferPlaces` of what is kept, by `csrc/transfer_places.cpp` where the native library is here.

A search compares tens of thousands of choices of one step. The step is laid out in flat arrays once; making a schedule
and placing its transfers then takes some tens of microseconds, milliseconds in Python, and every result has the bits of
Python's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.core.hardware import Link
from shoal.core.step import Op, StepGraph
from shoal.errors import PlanError
from shoal.lowlevel.dispatch import allowed
from shoal.lowlevel.native import fields, run_native
from shoal.planners.just_in_time import just_in_time
from shoal.planners.transfer_places import Placed, TransferPlaces, last_forward_reader


def places_of(graph: StepGraph, budget_bytes: int) -> Callable[[Collection[int]], Places]:
    """What makes the places of a choice of storages to keep, everything else being computed again just in time.

    Args:
        graph: the step, with a link.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit.

    Raises:
        PlanError: the step has no link.
    """
    if graph.link is None:
        raise PlanError("this step has no link to the host, so nothing can be offloaded")
    if "native" in allowed().kinds:
        step = _NativeStep(graph, graph.link)
        return lambda kept: NativePlaces(step, kept, budget_bytes)
    return lambda kept: TransferPlaces(graph, just_in_time(graph, kept), budget_bytes)


class _Struct(ctypes.Structure):
    """A structure of csrc/shoal_native.h that points to arrays, which it keeps alive."""

    def point(self, name: str, array: NDArray[np.generic]) -> None:
        """Let a field point to an array."""
        setattr(self, name, array.ctypes.data)
        self.__dict__.setdefault("arrays", []).append(array)


class _StepStruct(_Struct):
    """`ShoalTransferStep`."""

    _fields_ = fields(
        "int64 ops forward storages resident_bytes, pointer reads_begin reads writes_begin writes workspace_bytes"
        " overwrites seconds launch_seconds is_backward nbytes host_bytes producer last_forward_reader stays"
        " may_be_given_up may_leave to_host_seconds to_device_seconds, int64 written_count, pointer written,"
        "int32 overlaps"
    )


class _PlacesStruct(_Struct):
    """`ShoalTransferPlaces`."""

    _fields_ = fields(
        "pointer step kept, int64 budget_bytes, pointer forward_seconds backward_seconds between_seconds"
        " forward_room_bytes backward_room_bytes between_room_bytes backward_op back back_unit early_seconds can_leave,"
        "int64 backward between returning"
    )


class _PlacedStruct(_Struct):
    """`ShoalTransferPlaced`."""

    _fields_ = fields("pointer places wanted released fetched, double seconds, int64 excess_bytes host_bytes")


def _int64(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _flags(values: Iterable[bool]) -> NDArray[np.uint8]:
    return np.fromiter(values, np.uint8)


def _float64(values: Iterable[float]) -> NDArray[np.float64]:
    return np.fromiter(values, np.float64)


class _NativeStep:
    """A step in flat arrays, and room for the places of one set of storages at a time."""

    def __init__(self, graph: StepGraph, link: Link) -> None:
        self.struct = _StepStruct(len(graph.ops), graph.n_forward, len(graph.storages), graph.resident_bytes)
        runs = [*graph.ops, *(op.second for op in graph.ops)]
        self._add_lists("reads", [op.reads for op in runs])
        self._add_lists("writes", [op.writes for op in runs])
        self._add_ops(graph, runs)
        self._add_storages(graph, link)
        self.struct.overlaps = int(link.overlaps)
        self.n_forward, self.n_storages = graph.n_forward, len(graph.storages)
        self.n_after = len(graph.ops) - graph.n_forward
        self.released, self.fetched = (np.empty(self.n_storages, np.int64) for _ in range(2))
        self._mask = np.empty(self.n_storages, np.uint8)
        self.placed = _PlacedStruct()
        self.placed.point("released", self.released)
        self.placed.point("fetched", self.fetched)

    def _add_lists(self, name: str, lists: Sequence[Sequence[int]]) -> None:
        lengths = _int64(map(len, lists))
        self.struct.point(f"{name}_begin", np.concatenate((np.zeros(1, np.int64), lengths.cumsum())))
        self.struct.point(name, _int64(one for each in lists for one in each))

    def _add_ops(self, graph: StepGraph, runs: Sequence[Op]) -> None:
        point = self.struct.point
        point("workspace_bytes", _int64(op.workspace_bytes for op in runs))
        point("overwrites", _int64(op.overwrites for op in runs))
        point("seconds", _float64(op.seconds for op in runs))
        point("launch_seconds", _float64(op.launch_seconds for op in runs))
        point("is_backward", _flags(op.phase == "backward" for op in graph.ops))

    def _add_storages(self, graph: StepGraph, link: Link) -> None:
        point, storages, producer = self.struct.point, graph.storages, graph.producer
        point("nbytes", _int64(s.nbytes for s in storages))
        point("host_bytes", _int64(s.host_bytes for s in storages))
        point("producer", _int64(producer.get(s.id, -1) for s in storages))
        point("stays", _flags(s.id in graph.never_freed for s in storages))
        point("may_leave", _flags(s.id in graph.can_leave for s in storages))
        point("may_be_given_up", _flags(s.id in graph.can_be_recomputed for s in storages))
        written = sorted(graph.can_leave, key=lambda s: (producer[s], s))
        point("written", _int64(written))
        self.struct.written_count = len(written)
        last = dict.fromkeys(range(len(storages)), -1) | {s: last_forward_reader(graph, s) for s in written}
        point("last_forward_reader", _int64(last.values()))
        point("to_host_seconds", _float64(link.to_host_seconds(s.nbytes) for s in storages))
        point("to_device_seconds", _float64(link.to_device_seconds(s.nbytes) for s in storages))

    def mark(self, storages: Collection[int]) -> int:
        """Where there is a byte for each storage: whether it is one of these, until the next call."""
        self._mask.fill(0)
        self._mask[list(storages)] = 1
        return self._mask.ctypes.data


class NativePlaces:
    """`TransferPlaces` of one choice of storages to keep.

    Args:
        step: in flat arrays.
        kept: ids of storages, as for `just_in_time`.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit.
    """

    def __init__(self, step: _NativeStep, kept: Collection[int], budget_bytes: int) -> None:
        self._step, self._struct = step, _PlacesStruct()
        sizes = (("forward", step.n_forward), ("backward", step.n_after), ("between", step.n_after))
        self._seconds = {name: np.empty(size) for name, size in sizes}
        for name, size in sizes:
            self._struct.point(f"{name}_seconds", self._seconds[name])
            self._struct.point(f"{name}_room_bytes", np.empty(size, np.int64))
        self._struct.point("backward_op", np.empty(step.n_after, np.int64))
        for name, kind in (("back", "i8"), ("back_unit", "i8"), ("early_seconds", "f8"), ("can_leave", "u1")):
            self._struct.point(name, np.empty(step.n_storages, kind))
        self._struct.step, self._struct.budget_bytes = ctypes.addressof(step.struct), budget_bytes
        self._struct.kept = step.mark(kept)
        run_native("shoal_transfer_places", self._struct)

    @property
    def seconds(self) -> float:
        """How long the step takes with nothing offloaded."""
        counts = (self._step.n_forward, self._struct.between, self._struct.backward)
        parts = zip(("forward", "between", "backward"), counts, strict=True)
        return sum(seconds for name, count in parts for seconds in self._seconds[name][:count].tolist())

    def place(self, offloaded: Collection[int]) -> Placed:
        """Where those of `offloaded` that can leave do so, and come back."""
        step = self._step
        step.placed.places, step.placed.wanted = ctypes.addressof(self._struct), step.mark(offloaded)
        run_native("shoal_transfer_place", step.placed)
        gone = np.flatnonzero(step.released >= 0)
        storages = gone.tolist()
        return Placed(
            dict(zip(storages, step.released[gone].tolist(), strict=True)),
            dict(zip(storages, step.fetched[gone].tolist(), strict=True)),
            step.placed.seconds,
            step.placed.excess_bytes,
            step.placed.host_bytes,
        )


Places = TransferPlaces | NativePlaces
