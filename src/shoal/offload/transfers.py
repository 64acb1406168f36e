"""The transfers of a planned step, called by its forward and backward graphs.

A step's host bytes lie in one slab at offsets planned here. `begin` leases it for one forward pass and its backward
passes and returns a *receipt*: a small tensor that autograd saves with the others. When the receipt is freed (after the
backward pass, with a discarded graph, or by an exception), the slab is free for the next step.
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
    """The calls of one planned step's graphs. Each call names a slot: the host memory of one storage.

    Replaces, in plain PyTorch, `tensor.to("cpu", non_blocking=True)` with streams and events by hand.

    Args:
        link: an open link, which may be shared with other steps and is not closed here.
        slot_bytes: the bytes of each slot.
        overlaps: False waits for every copy right after it is started, as a link without its own streams does.
        exact: whether a step's slab is no larger than it needs: see `SlabPool.lease`.

    Attributes:
        host_bytes: the size of a step's slab.

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
        self, link: OpenLink, slot_bytes: Sequence[int], *, overlaps: bool = True, exact: bool = False
    ) -> None:
        self._link = link
        self._exact = exact
        self._overlaps = overlaps
        self._slot_bytes = tuple(slot_bytes)
        *self._offsets, total = accumulate(map(in_pages, self._slot_bytes), initial=0)
        self.host_bytes = max(total, HOST_PAGE_BYTES)
        self._steps: weakref.WeakValueDictionary[int, _TransferStep] = weakref.WeakValueDictionary()
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
        step = _TransferStep(self._link.pool.lease(self.host_bytes, exact=self._exact))
        self._link.begin_step()
        self._steps[step.ticket] = step
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
        step.offloads[slot] = self._link.offload(storage, step.lease.slab, self._offsets[slot])
        if not self._overlaps:
            step.offloads[slot].settle()

    def finish_offload(self, receipt: torch.Tensor, slot: int) -> None:
        """Have the computation wait until the bytes are on the host, and release the device storage.

        Raises:
            TransferError: the copy failed, or was never started.
        """
        step = self._step(receipt)
        _started(step.offloads, slot, "offload").wait()

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
        offload = _started(step.offloads, slot, "offload")
        if slot in step.fetches:
            step.fetches[slot].abandon()
        like = step.views[slot]
        # By torch.empty, so that the device's allocator serves it: a bare UntypedStorage would not use it.
        storage = torch.empty(offload.nbytes, dtype=torch.uint8, device=self._link.device).untyped_storage()
        step.fetches[slot] = self._link.fetch(storage, step.lease.slab, self._offsets[slot], offload)
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

    def close(self) -> None:
        """Stop all copies and free the slabs; a backward pass that has not run yet fails."""
        for step in tuple(self._steps.values()):
            step.lease.abandon()
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


class _TransferStep:
    """The state of a step; it lives as long as the receipt."""

    def __init__(self, lease: Lease) -> None:
        self.ticket = next(_tickets)
        self.lease = lease
        self.offloads: dict[int, Copy] = {}
        self.fetches: dict[int, Copy] = {}
        self.views: dict[int, _View] = {}


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
