"""The link of a CUDA device: two side streams, events and pinned host memory.

The host never blocks. The compute stream waits for an event of a side stream before it uses, or frees, what that stream
copied, so the caching allocator needs no `record_stream`: memory is freed on the stream that allocated it.
"""

from __future__ import annotations

import os
import weakref

import torch

from shoal.core.sizes import format_bytes
from shoal.errors import TransferError
from shoal.offload.links.host import HostSlab
from shoal.offload.links.slab import Copy, Slab, SlabPool


class StreamCopy:
    """A transfer on a side stream: after the work submitted to the compute stream so far, and before `wait`."""

    def __init__(self, storage: torch.UntypedStorage, slab: Slab) -> None:
        self.nbytes = storage.nbytes()
        self.done: torch.Event | None = None  # None until it is enqueued
        self._device = storage.device
        self._storage: torch.UntypedStorage | None = storage
        self._slab: Slab | None = slab
        self._abandoned = False
        self._stall: tuple[torch.Event, torch.Event] | None = None

    @property
    def is_over(self) -> bool:
        return self.done is None or self.done.query()

    @property
    def error(self) -> BaseException | None:
        return TransferError("it was abandoned") if self._abandoned else None

    def wait(self) -> None:
        if self._abandoned or self.done is None:
            raise TransferError(f"the transfer of {format_bytes(self.nbytes)} was abandoned")
        if self._storage is None:
            return
        compute = torch.accelerator.current_stream(self._device)
        began, ended = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        began.record(compute)
        compute.wait_event(self.done)
        ended.record(compute)
        self._stall = (began, ended)
        self._release()

    def abandon(self) -> None:
        if self._storage is not None:
            self._abandoned = True
            self.settle()

    def settle(self) -> None:
        if self.done is not None:
            self.done.synchronize()
        self._release()

    def stalled_seconds(self) -> float:
        """Synchronizes with the end of the wait."""
        if self._stall is None:
            return 0.0
        began, ended = self._stall
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    def _release(self) -> None:
        slab, self._slab = self._slab, None
        self._storage = None
        if slab is not None:
            slab.running.discard(self)


class CudaLink:
    """An open link of a CUDA device; see `open_link`.

    Args:
        device: a CUDA device with its index.
        budget_bytes: most pinned bytes.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None) -> None:
        self.device = device
        self.pool = SlabPool(lambda nbytes: HostSlab(nbytes, pinned=True), "pinned host memory", budget_bytes)
        self._to_host = torch.Stream(device=device)
        self._to_device = torch.Stream(device=device)
        self._closed = False
        self._pid = os.getpid()
        self._closer = weakref.finalize(self, _close, self._to_host, self._to_device, self.pool, self._pid)

    def begin_step(self) -> None:
        """Writes to a slab come after the reads of the step that had it before."""
        self._to_host.wait_stream(self._to_device)

    def offload(self, storage: torch.UntypedStorage, slab: Slab, offset: int) -> Copy:
        return self._copy(self._to_host, storage, slab, offset, None)

    def fetch(self, storage: torch.UntypedStorage, slab: Slab, offset: int, after: Copy | None = None) -> Copy:
        return self._copy(self._to_device, storage, slab, offset, after)

    def close(self) -> None:
        self._closed = True
        self._closer()

    def _copy(
        self, stream: torch.Stream, storage: torch.UntypedStorage, slab: Slab, offset: int, after: Copy | None
    ) -> Copy:
        if self._closed or os.getpid() != self._pid:
            raise TransferError("the link was closed, or belongs to the process before a fork; open another one")
        copy = StreamCopy(storage, slab)
        slab.running.add(copy)
        try:
            if isinstance(after, StreamCopy) and after.done is not None:
                stream.wait_event(after.done)
            stream.wait_stream(torch.accelerator.current_stream(self.device))
            if copy.nbytes:
                assert isinstance(slab, HostSlab)
                device_bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
                host_bytes = slab.bytes[offset : offset + copy.nbytes]
                outwards = stream is self._to_host
                _copy_on(stream, *((host_bytes, device_bytes) if outwards else (device_bytes, host_bytes)))
            done = torch.Event(device=self.device)
            done.record(stream)
            copy.done = done
        except BaseException:
            stream.synchronize()  # the copy may be running without an event
            copy.abandon()
            raise
        return copy


def _copy_on(stream: torch.Stream, to: torch.Tensor, source: torch.Tensor) -> None:
    with stream, torch.no_grad():
        to.copy_(source, non_blocking=True)


def _close(to_host: torch.Stream, to_device: torch.Stream, pool: SlabPool, pid: int) -> None:
    if os.getpid() == pid:
        to_host.synchronize()
        to_device.synchronize()
    pool.close()
