"""The transfers of a planned step, called by its forward and backward graphs.

A step's host bytes lie in one slab at offsets planned here. `begin` leases it for one forward pass and its backward
passes and returns a *receipt*: a small tensor that autograd saves with the others. When the receipt is freed (after the
backward pass, with a discarded graph, or by an exception), the slab is free for the next step.

The graphs of one iteration are steps of their own. A graph may start the copy back of another one's storage, and wait
for its copy to the host: `RunningTransfers` knows which step that is. What it does not do, as in an iteration that goes
on in another way than was planned, the storage's own graph does when it needs the storage.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from shoal.core.sizes import HOST_PAGE_BYTES, format_bytes, in_pages
from shoal.errors import InputError, TransferError
from shoal.offload.links.open_link import OpenLink
from shoal.offload.links.slab import Copy, Lease, Slab

_tickets = itertools.count(1)


class Transfers:
    """The calls of one planned step's graphs. Each call names a slot: the host memory of one storage.

    Replaces, in plain PyTorch, `tensor.to("cpu", non_blocking=True)` with streams and events by hand.

    Args:
        link: an open link, which may be shared with other steps and is not closed here.
        slot_bytes: the bytes of each slot.
        overlaps: False waits for every copy right after it is started, as a link without its own streams does.
        running: those of the graphs of an iteration; None for a step of one graph. The slab of one of several is no
            larger than it needs: see `SlabPool.lease`.
        names: of the storages that have the slots, by which other graphs ask for them.

    Attributes:
        host_bytes: the size of a step's slab; 0 without slots, for a graph that only does what it does for others.

    Raises:
        TransferError: the host has no memory for the slab, or its budget is too small.

    >>> from shoal.offload.links.open_link import open_link
    >>> transfers = Transfers(open_link("cpu"), [12])
    >>> x = torch.arange(3.0)
    >>> receipt = transfers.begin()
    >>> transfers.start_offload(receipt, 0, x)
    >>> transfers.finish_offload(receipt, 0)
    >>> y = transfers.start_fetch(receipt, 0)
    >>> transfers.finish_fetch(receipt, 0)
    >>> y
    tensor([0., 1., 2.])

    Limits: a second forward pass before the backward pass of the first takes a second slab. Calls of one step come
    from one thread at a time, in the order of the plan.
    """

    def __init__(
        self,
        link: OpenLink,
        slot_bytes: Sequence[int],
        *,
        overlaps: bool = True,
        running: RunningTransfers | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._link = link
        self._running = running
        self._overlaps = overlaps
        self._slot_bytes = tuple(slot_bytes)
        self._slot_called = {name: slot for slot, name in enumerate(names)}
        *self._offsets, total = accumulate(map(in_pages, self._slot_bytes), initial=0)
        self.host_bytes = max(total, HOST_PAGE_BYTES) if slot_bytes else 0
        self._steps: weakref.WeakValueDictionary[int, _TransferStep] = weakref.WeakValueDictionary()
        if slot_bytes:
            link.pool.reserve(self.host_bytes)
        self._closer = weakref.finalize(self, link.pool.unreserve, self.host_bytes)
        self._closer.atexit = False  # the link frees everything itself

    def begin(self) -> torch.Tensor:
        """Start a step.

        Returns:
            Its receipt, an int64 tensor of one element, not allocated by torch. Keep it, or a tensor that shares its
            storage, until the last backward pass.

        Raises:
            TransferError: every slab is leased to a step whose backward pass has not run, and there is no memory for
                another one.
        """
        if not self._closer.alive:
            raise TransferError("these transfers were closed")
        exact = self._running is not None
        step = _TransferStep(self, self._link.pool.lease(self.host_bytes, exact=exact) if self.host_bytes else None)
        self._link.begin_step()
        self._steps[step.ticket] = step
        if self._running is not None:
            self._running.add(step, self._link.device)
        receipt = _TransferReceipt(step.ticket.to_bytes(8, sys.byteorder))
        receipt.step = step
        return torch.frombuffer(receipt, dtype=torch.int64)

    def start_offload(self, receipt: torch.Tensor, slot: int, tensor: torch.Tensor) -> None:
        """Start to copy the whole storage of `tensor` to the host, and hold it until `finish_offload`.

        Raises:
            InputError: the storage is larger than the slot, or on another device than the link's.
            TransferError: the step is over, or the link is closed.
        """
        step, storage = self._step(receipt), tensor.untyped_storage()
        self._check(slot, storage.nbytes(), storage.device)
        step.views[slot] = _View(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        step.offloads[slot] = self._link.offload(storage, step.slab, self._offsets[slot])
        if not self._overlaps:
            step.offloads[slot].settle()

    def finish_offload(self, receipt: torch.Tensor, slot: int) -> None:
        """Have the computation wait until the bytes are on the host, and release the device storage.

        Raises:
            TransferError: the copy failed, or was never started.
        """
        self._step(receipt).release(slot)

    def start_fetch(self, receipt: torch.Tensor, slot: int) -> torch.Tensor:
        """Allocate a device storage for the slot and start to copy into it.

        It may be called again after `finish_fetch`, for a second backward pass.

        Returns:
            A plain tensor with a storage of its own, and the size and strides of the offloaded one. Read it after
            `finish_fetch`.

        Raises:
            TransferError: the slot was never offloaded, the step is over, or the link is closed.
            torch.OutOfMemoryError: there is no room on the device.
        """
        step = self._step(receipt)
        early = step.early.pop(slot, None)
        return self._start_fetch(step, slot) if early is None else early

    def _start_fetch(self, step: _TransferStep, slot: int) -> torch.Tensor:
        offload = _started(step.offloads, slot, "offload")
        if slot not in step.released:  # another graph was to do it, and has not run
            step.release(slot)
        if slot in step.fetches:
            step.fetches[slot].abandon()
        like = step.views[slot]
        # By torch.empty, so that the device's allocator serves it: a bare UntypedStorage would not use it.
        storage = torch.empty(offload.nbytes, dtype=torch.uint8, device=self._link.device).untyped_storage()
        step.fetches[slot] = self._link.fetch(storage, step.slab, self._offsets[slot], offload)
        if not self._overlaps:
            step.fetches[slot].settle()
        with torch.no_grad():
            blank = torch.empty(0, dtype=like.dtype, device=self._link.device)
            return blank.set_(storage, like.storage_offset, like.size, like.stride)

    def finish_fetch(self, receipt: torch.Tensor, slot: int) -> None:
        """Have the computation wait until the copy of `start_fetch` has arrived.

        Raises:
            TransferError: the copy failed, or was never started.
        """
        step = self._step(receipt)
        _started(step.fetches, slot, "fetch").wait()

    def finish_offload_of(self, receipt: torch.Tensor, distance: int, name: str) -> None:
        """`finish_offload` for a storage of another graph of the iteration, if it has begun.

        Args:
            receipt: of this graph.
            distance: by how many forward passes later the other graph runs.
            name: of the storage.
        """
        found = self._found(receipt, distance, name)
        if found is not None:
            step, slot = found
            step.release(slot)

    def start_fetch_of(self, receipt: torch.Tensor, distance: int, name: str) -> None:
        """Start what `start_fetch` would for a storage of another graph of the iteration, which gets it by that call.

        Args:
            receipt, distance, name: as of `finish_offload_of`.
        """
        found = self._found(receipt, distance, name)
        if found is not None:
            step, slot = found
            if slot not in step.fetches:  # else its graph runs backward a second time, or has done so before this one
                step.early[slot] = step.of._start_fetch(step, slot)

    def _found(self, receipt: torch.Tensor, distance: int, name: str) -> tuple[_TransferStep, int] | None:
        """Another graph's step of the same iteration, and the slot of what it has offloaded; None if it did not."""
        own = self._steps.get(int(receipt))
        step = None if own is None else own.other(distance)
        slot = None if step is None else step.of._slot_called.get(name)
        if step is None or slot is None or slot not in step.offloads or step.ticket not in step.of._steps:
            return None
        return step, slot

    def close(self) -> None:
        """Stop all copies and free the slabs; a backward pass that has not run yet fails."""
        for step in tuple(self._steps.values()):
            step.abandon()
        self._steps.clear()
        self._closer()

    def _step(self, receipt: torch.Tensor) -> _TransferStep:
        step = self._steps.get(int(receipt))
        if step is None:
            raise TransferError(
                "the host bytes of this step are gone: its transfers were closed, or what autograd saved was copied or "
                "freed; run the forward pass again"
            )
        return step

    def _check(self, slot: int, nbytes: int, device: torch.device) -> None:
        if not 0 <= slot < len(self._slot_bytes):
            raise InputError(f"slot {slot} is none of the {len(self._slot_bytes)} there are")
        # A kernel's result may be larger than its fake tensor: the batch statistics of a half-precision batch norm are
        # float32. The rest of the slot's last page holds them.
        if nbytes > in_pages(max(1, self._slot_bytes[slot])):
            raise InputError(
                f"slot {slot} has {format_bytes(self._slot_bytes[slot])}; a storage of {format_bytes(nbytes)} was given"
            )
        if device != self._link.device and (device.type != self._link.device.type or device.index is not None):
            raise InputError(f"slot {slot}: a storage on {device} cannot use the link of {self._link.device}")


class RunningTransfers:
    """Those of the graphs of an iteration, by place: how many graphs that train ran before.

    Args:
        place: of the graph that runs.
    """

    def __init__(self, place: Callable[[], int]) -> None:
        self._place = place
        self._steps: dict[int, weakref.ref[_TransferStep]] = {}

    def begin(self) -> None:
        """An iteration begins. What was fetched early in the one before, and was not needed yet, is freed."""
        for reference in self._steps.values():
            step = reference()
            if step is not None:
                step.drop_early()
        self._steps = {}

    def add(self, step: _TransferStep, device: torch.device) -> None:
        """The step of the graph that runs."""
        step.place, step.iteration = self._place(), self._steps
        step.stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._steps[step.place] = weakref.ref(step)


class _TransferStep:
    """The state of a step; it lives as long as the receipt.

    Attributes:
        of: what it is a step of.
        released: slots whose storages the device has freed.
        early: storages by slot whose copies back another graph has started.
        place, iteration: as of `RunningTransfers`.
        stream: on which its graph runs; memory that it has allocated is freed there.
    """

    def __init__(self, of: Transfers, lease: Lease | None) -> None:
        self.ticket = next(_tickets)
        self.of = of
        self.lease = lease
        self.offloads: dict[int, Copy] = {}
        self.fetches: dict[int, Copy] = {}
        self.views: dict[int, _View] = {}
        self.released: set[int] = set()
        self.early: dict[int, torch.Tensor] = {}
        self.place = 0
        self.iteration: Mapping[int, weakref.ref[_TransferStep]] = {}
        self.stream: torch.Stream | None = None

    @property
    def slab(self) -> Slab:
        assert self.lease is not None  # there are slots
        return self.lease.slab

    def other(self, distance: int) -> _TransferStep | None:
        """That of another graph of the iteration, on the same stream."""
        reference = self.iteration.get(self.place + distance)
        step = None if reference is None else reference()
        return step if step is not None and step.stream == self.stream else None

    def release(self, slot: int) -> None:
        """Wait for the copy to the host."""
        _started(self.offloads, slot, "offload").wait()
        self.released.add(slot)

    def drop_early(self) -> None:
        """Free what other graphs have fetched early."""
        for slot in tuple(self.early):
            self.fetches[slot].abandon()
            del self.early[slot]

    def abandon(self) -> None:
        """Stop all copies, and free what those hold that have ended and that nobody has waited for."""
        self.early.clear()
        for copy in (*self.offloads.values(), *self.fetches.values()):
            copy.abandon()
        if self.lease is not None:
            self.lease.abandon()


class _View(NamedTuple):
    """Size, strides and offset of a tensor, in elements."""

    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype


class _TransferReceipt(bytearray):
    """The memory of a receipt: freed with the last tensor that uses it."""

    step: _TransferStep


def _started(copies: dict[int, Copy], slot: int, what: str) -> Copy:
    copy = copies.get(slot)
    if copy is None:
        raise TransferError(f"no {what} of slot {slot} was started in this step")
    return copy
