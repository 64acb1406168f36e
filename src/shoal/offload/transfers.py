"""The transfers of a planned step, as its forward and backward graphs call for them.

A step's host bytes lie in one slab at offsets planned here. `begin` leases it for one forward pass and its backward
passes and hands out a *receipt*: a small tensor that autograd saves with the others. When the receipt dies, after the
backward pass, with a step that was abandoned or on the way out of an exception, the slab is free for the next step.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from shoal.core.sizes import HOST_PAGE_BYTES, format_bytes, in_pages
from shoal.errors import InputError, TransferError
from shoal.offload.links.open_link import OpenLink
from shoal.offload.links.slab import Copy, Lease

_tickets = itertools.count(1)


class Transfers:
    """What the graphs of one planned step call. Each call names a slot, the place of one storage on the host.

    Replaces, in plain PyTorch, `tensor.to("cpu", non_blocking=True)` with streams and events by hand.

    Args:
        link: an open link, which may be shared with other steps and is not closed here.
        slot_bytes: the bytes of each slot.
        overlaps: False has the computation wait for every copy as soon as it is started: what a link without streams of
            its own does, for comparison.

    Attributes:
        host_bytes: the size of a step's slab.

    Raises:
        TransferError: the host has no room for the slab, or may not use so much.

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

    def __init__(self, link: OpenLink, slot_bytes: Sequence[int], *, overlaps: bool = True) -> None:
        self._link = link
        self._overlaps = overlaps
        self._slot_bytes = tuple(slot_bytes)
        *self._offsets, total = accumulate(map(in_pages, self._slot_bytes), initial=0)
        self.host_bytes = max(total, HOST_PAGE_BYTES)
        self._steps: weakref.WeakValueDictionary[int, _Step] = weakref.WeakValueDictionary()
        link.pool.reserve(self.host_bytes)
        self._closer = weakref.finalize(self, link.pool.unreserve, self.host_bytes)
        self._closer.atexit = False  # the link's own gives everything back

    def begin(self) -> torch.Tensor:
        """Start a step.

        Returns:
            Its receipt, an int64 tensor of one element in memory that is not torch's. Keep it, or a tensor that shares
            its storage, for as long as a backward pass may come.

        Raises:
            TransferError: every slab is leased to a step whose backward pass has not been, and there is no room for
                another one.
        """
        if not self._closer.alive:
            raise TransferError("these transfers were closed")
        step = _Step(self._link.pool.lease(self.host_bytes))
        self._link.begin_step()
        self._steps[step.ticket] = step
        receipt = _Receipt(step.ticket.to_bytes(8, sys.byteorder))
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
        step.layouts[slot] = _Layout(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        step.offloads[slot] = self._link.offload(storage, step.lease.slab, self._offsets[slot])
        if not self._overlaps:
            step.offloads[slot].settle()

    def finish_offload(self, receipt: torch.Tensor, slot: int) -> None:
        """Have the computation wait until the bytes are on the host; they are no longer held here.

        Raises:
            TransferError: the copy failed, or was never started.
        """
        step = self._step(receipt)
        _started(step.offloads, slot, "offload").wait()

    def start_fetch(self, receipt: torch.Tensor, slot: int) -> torch.Tensor:
        """Allocate device bytes for what is in the slot and start to fill them.

        It may be called again after `finish_fetch`, for a second backward pass.

        Returns:
            A plain tensor, laid out as the one that was offloaded, that alone has its storage. It may be read after
            `finish_fetch`.

        Raises:
            TransferError: the slot was never offloaded, the step is over, or the link is closed.
            torch.OutOfMemoryError: there is no room on the device.
        """
        step = self._step(receipt)
        offload = _started(step.offloads, slot, "offload")
        if slot in step.fetches:
            step.fetches[slot].abandon()
        like = step.layouts[slot]
        # From torch's device allocator, as the step's other tensors: a bare UntypedStorage would go past it.
        storage = torch.empty(offload.nbytes, dtype=torch.uint8, device=self._link.device).untyped_storage()
        step.fetches[slot] = self._link.fetch(storage, step.lease.slab, self._offsets[slot], offload)
        if not self._overlaps:
            step.fetches[slot].settle()
        with torch.no_grad():
            blank = torch.empty(0, dtype=like.dtype, device=self._link.device)
            return blank.set_(storage, like.storage_offset, like.size, like.stride)

    def finish_fetch(self, receipt: torch.Tensor, slot: int) -> None:
        """Have the computation wait until the tensor of `start_fetch` is filled.

        Raises:
            TransferError: the copy failed, or was never started.
        """
        step = self._step(receipt)
        _started(step.fetches, slot, "fetch").wait()

    def close(self) -> None:
        """Stop what still moves and give the slabs back; steps that wait for their backward pass cannot have it."""
        for step in tuple(self._steps.values()):
            step.lease.abandon()
        self._steps.clear()
        self._closer()

    def _step(self, receipt: torch.Tensor) -> _Step:
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
        # What PyTorch foretells of a result is not always what a kernel gives: a batch norm's statistics in half
        # precision come in float32. The rest of the last page serves for that.
        if nbytes > in_pages(max(1, self._slot_bytes[slot])):
            raise InputError(
                f"slot {slot} has {format_bytes(self._slot_bytes[slot])}; a storage of {format_bytes(nbytes)} was given"
            )
        if device != self._link.device and (device.type != self._link.device.type or device.index is not None):
            raise InputError(f"slot {slot}: a storage on {device} cannot use the link of {self._link.device}")


class _Step:
    """What lives as long as a receipt."""

    def __init__(self, lease: Lease) -> None:
        self.ticket = next(_tickets)
        self.lease = lease
        self.offloads: dict[int, Copy] = {}
        self.fetches: dict[int, Copy] = {}
        self.layouts: dict[int, _Layout] = {}


class _Layout(NamedTuple):
    """How a tensor lies in its storage, in elements."""

    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype


class _Receipt(bytearray):
    """The memory of a receipt: torch lets go of it with the last tensor on it."""

    step: _Step


def _started(copies: dict[int, Copy], slot: int, what: str) -> Copy:
    copy = copies.get(slot)
    if copy is None:
        raise TransferError(f"no {what} of slot {slot} was started in this step")
    return copy
