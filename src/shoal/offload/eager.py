"""Offloading in eager mode, without a plan: `saved_tensors_hooks` move what autograd saves to the host.

The first half of CPU offloading (Hascoet et al., section 4): tensors are copied as soon as only autograd holds them, on
side streams or threads, to host memory that is reused between steps, and fetched one tensor ahead of the backward pass.
The other half, batch norm that is inverted instead of offloaded, is `shoal.invert_norm`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.core import arguments
from shoal.core.sizes import in_pages, parse_bytes
from shoal.errors import InputError, brief
from shoal.lowlevel.torch_state import has_other_owners, storage_of
from shoal.offload.links.open_link import OpenLink, open_link
from shoal.offload.links.slab import Copy, Lease

_IN_FLIGHT = 2  # offloads that may be running while the next tensor is computed
_LOOK_BACK = 64  # earlier storages that are looked at for the next prefetch

_links: dict[tuple[torch.device, str, int | None, int], OpenLink] = {}


class offload_activations:
    """Offload what autograd saves inside the block to the host until the backward pass needs it.

    Replaces, in plain PyTorch, `torch.autograd.graph.save_on_cpu(pin_memory=True)`, which copies
    synchronously, allocates pinned memory for each tensor, and copies a storage again for each view of it.

    Parameters, and other leaves that require grad, stay on the device. Gradients are those of plain PyTorch, bit for
    bit. Writing to a saved tensor in place is an error in the backward pass, as without the block.

    Args:
        link: None or "host" for host memory, pinned where the device is CUDA; a folder on a local disk for a file
            there (CPU only); or a link of `shoal.offload.links.open_link.open_link`. The first two are opened once and
            kept for the next block, until `close`.
        min_bytes: storages smaller than this stay on the device.
        host_budget: most host bytes, an int or a text such as "2GiB"; None for no limit. An open link has a limit of
            its own.

    Attributes:
        offloaded_bytes: of the storages offloaded in the last block.
        kept_bytes: of the tensors that stayed on the device in the last block, each time they were saved.

    Raises:
        InputError: a size is invalid, or there is no such link.
        TransferError: in the block or in the backward pass: the host budget is too small, the disk is full, or the
            folder is gone. The next block is not affected.

    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
    >>> with offload_activations() as offloading:
    ...     loss = model(torch.ones(256, 512)).sum()
    >>> offloading.offloaded_bytes
    1048576
    >>> loss.backward()
    >>> offloading.close()

    Limits: a storage is copied when nothing but autograd holds it, at the latest at the end of the block; what the
    caller holds longer (the input, an output) is copied and frees nothing. Writes through `.data` are not detected, as
    in autograd: until the copy is made they are read, after the block only if the tensor is still alive. A new `.data`
    is read for leaves that require grad only. Prefetching assumes that the backward pass needs tensors in
    reverse order of saving; where it does not, fetches are late, not wrong.
    """

    def __init__(
        self,
        link: OpenLink | str | Path | None = None,
        min_bytes: int | str = "1MiB",
        host_budget: int | str | None = None,
    ) -> None:
        self.offloaded_bytes = 0
        self.kept_bytes = 0
        self._min_bytes = parse_bytes(min_bytes, "min_bytes")
        self._host_budget = None if host_budget is None else parse_bytes(host_budget, "host_budget")
        self._where = (
            "host" if link is None else str(arguments.path("link", link)) if isinstance(link, str | Path) else None
        )
        self._given = None if link is None or isinstance(link, str | Path) else link
        if self._given is not None and not hasattr(self._given, "offload"):
            raise InputError(f"link={brief(link)}: expected 'host', a folder or an open link")
        if self._where not in (None, "host"):
            self._link(torch.device("cpu"))  # a missing folder is an error now
        self._blocks: list[saved_tensors_hooks] = []
        self._saved = 0
        self._in_order: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._staying: list[weakref.ref[SavedStorage]] = []  # as long as something else can write to them
        self._of_storage: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._leaving: deque[weakref.ref[SavedStorage]] = deque()
        self._ahead: weakref.ref[SavedStorage] | None = None
        self._fetching = threading.Lock()

    def __enter__(self) -> Self:
        if not self._blocks:
            self.offloaded_bytes = self.kept_bytes = 0
        block = saved_tensors_hooks(self._pack, self._unpack)
        block.__enter__()
        self._blocks.append(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._blocks.pop().__exit__(kind, error, traceback)
        if error is None:  # after an error most of them are not needed
            self._start_offloads(of_all=True)
            self._finish_offloads(0)
        self._staying.clear()

    def close(self) -> None:
        """Free the host bytes, unless they belong to an open link that was passed in. Graphs whose backward pass has
        not run cannot run it."""
        for key in [key for key in _links if key[1:3] == (self._where, self._host_budget)]:
            _links.pop(key).close()

    def _pack(self, tensor: torch.Tensor) -> _KeptTensor | SavedTensor:
        self._start_offloads()
        if not self._may_leave(tensor) or self._link(tensor.device) is None:
            self.kept_bytes += tensor.nbytes if tensor.layout is torch.strided else 0
            return _KeptTensor(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        key = tensor.untyped_storage()._cdata
        storage = self._of_storage.get(key)
        if storage is None or not storage.holds(tensor):
            storage = SavedStorage(tensor, self._saved)
            self._saved += 1
            self._of_storage[key] = self._in_order[storage.order] = storage
            self._staying.append(weakref.ref(storage))
        return storage.of(tensor)

    def _unpack(self, packed: _KeptTensor | SavedTensor) -> torch.Tensor:
        if isinstance(packed, _KeptTensor):
            check_version(packed.tensor._version, packed.version)
            return packed.tensor.detach()
        with self._fetching:
            packed.storage.start_fetch()
            self._fetch_one_ahead_of(packed.storage)
            return packed.storage.tensor(packed)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
            return False
        base = tensor if tensor._base is None else tensor._base
        if (base.is_leaf and base.requires_grad) or tensor.is_conj() or tensor.is_neg():
            return False
        nbytes = tensor.untyped_storage().nbytes()
        # A chunk of unsafe_chunk is not a view: its version counter does not count writes to the other chunks.
        return nbytes >= self._min_bytes and base.nbytes == nbytes

    def _link(self, device: torch.device) -> OpenLink | None:
        """The link for tensors of this device; None if they stay."""
        if self._given is not None:
            return self._given if self._given.device == device else None
        assert self._where is not None
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and self._where != "host"):
            return None
        key = (device, self._where, self._host_budget, os.getpid())  # a forked child opens its own
        if key not in _links:
            _links[key] = open_link(device, self._where, self._host_budget)
        return _links[key]

    def _start_offloads(self, of_all: bool = False) -> None:
        """Offload what nothing else can write to any more, or at the end of the block all that was saved."""
        waiting, self._staying = self._staying, []
        for reference in waiting:
            storage = reference()
            if storage is None:
                continue
            if not of_all and storage.may_be_written:
                self._staying.append(reference)
                continue
            link = self._link(storage.device)
            assert link is not None
            self._finish_offloads(_IN_FLIGHT - 1)
            storage.offload(link)
            self.offloaded_bytes += storage.nbytes
            self._leaving.append(reference)

    def _finish_offloads(self, still_leaving: int) -> None:
        """Wait for the oldest offloads, until at most `still_leaving` are running."""
        while self._leaving:
            storage = self._leaving[0]()
            if storage is not None and not storage.has_left and len(self._leaving) <= still_leaving:
                return
            self._leaving.popleft()
            if storage is not None:
                storage.finish_offload()

    def _fetch_one_ahead_of(self, storage: SavedStorage) -> None:
        ahead = None if self._ahead is None else self._ahead()
        if ahead is not None and ahead is not storage and ahead.order > storage.order:
            ahead.drop_fetch()  # the backward pass did not need it
        elif ahead is not None and ahead is not storage:
            return  # still ahead
        self._ahead = None
        for order in range(storage.order - 1, max(-1, storage.order - 1 - _LOOK_BACK), -1):
            following = self._in_order.get(order)
            if following is not None and not following.is_here:
                following.start_fetch()
                self._ahead = weakref.ref(following)
                return


@dataclass(slots=True)
class _KeptTensor:
    """A tensor that stays. A leaf itself, as in autograd, so that a new `.data` of it is read; others detached: a saved
    output would otherwise keep its own grad_fn alive, a reference cycle."""

    tensor: torch.Tensor
    version: int


def size_class_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to one of four sizes an octave, so that slots fit again when sizes vary a little.

    >>> size_class_bytes(2**20), size_class_bytes(2**20 + 1)
    (1048576, 1310720)
    """
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return in_pages(-(-nbytes // step) * step)


class VersionCounter:
    """The version counter of a tensor, shared with its views and detached aliases; keeps no storage alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            # A detached alias shares the counter, even after its `.data` is replaced.
            self._alias = tensor.detach()
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.saved = tensor._version

    def check(self) -> None:
        """Raise RuntimeError if the tensor was written to: with saved_tensors_hooks autograd does not check."""
        check_version(self._alias._version, self.saved)


def check_version(present: int, saved: int) -> None:
    if present != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
            f"version {present}; expected version {saved} instead (offload_activations)"
        )


@dataclass(eq=False, weakref_slot=True, slots=True)
class SavedTensor:
    """What autograd holds in place of a tensor: its version, and dtype, size, strides and offset in a saved storage."""

    storage: SavedStorage
    versions: VersionCounter
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


class SavedStorage:
    """One storage. It stays on the device until `offload`.

    Autograd saves tensors, but bytes belong to storages. What the backward pass of plain PyTorch reads is what the
    storage holds by then, so the copy is made when nothing but this record owns the storage: nothing can write to
    it any more.

    It is fetched once for all tensors on it, and stays on the device until each that is alive was unpacked.

    Args:
        tensor: one that covers the storage or a part of it.
        order: its number among the saved storages.
    """

    def __init__(self, tensor: torch.Tensor, order: int) -> None:
        storage = tensor.untyped_storage()
        self.order = order
        self.nbytes = storage.nbytes()
        self.device = tensor.device
        # A tensor, so that the storage is owned as by any other.
        self._source: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._elsewhere = StorageWeakRef(storage)
        self._tensors: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self._not_asked: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self._fetched: torch.UntypedStorage | None = None
        self._fetch: Copy | None = None
        self._link: OpenLink | None = None
        self._lease: Lease | None = None
        self._offload: Copy | None = None

    def of(self, tensor: torch.Tensor) -> SavedTensor:
        """The record of a tensor on this storage."""
        saved = SavedTensor(
            self, VersionCounter(tensor), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        )
        self._tensors.add(saved)
        return saved

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has this storage."""
        return self._elsewhere.cdata == tensor.untyped_storage()._cdata  # unique while the weak reference lives

    @property
    def may_be_written(self) -> bool:
        """Whether something else owns the storage: a variable, an op that has not returned, another view."""
        return self._source is not None and has_other_owners(self._source)

    def offload(self, link: OpenLink) -> None:
        """Start to copy the bytes to the host.

        Args:
            link: an open link of the tensor's device.

        Raises:
            TransferError: the host has no memory, or its budget is too small.
        """
        assert self._source is not None, "it was offloaded"
        self._link = link
        self._lease = link.pool.lease(size_class_bytes(self.nbytes))
        link.begin_step()
        self._offload = link.offload(self._source.untyped_storage(), self._lease.slab, 0)
        self._source = None

    @property
    def has_left(self) -> bool:
        return self._offload is not None and self._offload.is_over

    @property
    def is_here(self) -> bool:
        """Whether its bytes are on the device, or being fetched."""
        return self._present() is not None

    def finish_offload(self) -> None:
        """Have the computation wait until the bytes are on the host.

        Raises:
            TransferError: the copy failed.
        """
        if self._offload is not None:
            self._offload.wait()

    def start_fetch(self) -> None:
        """Start to fetch the bytes, if they are not on the device.

        Raises:
            TransferError: the offload failed.
        """
        if self.is_here:
            return
        assert self._link is not None and self._lease is not None and self._offload is not None
        self._offload.wait()
        storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        self._fetch = self._link.fetch(storage, self._lease.slab, 0, self._offload)
        self._fetched = storage
        self._not_asked = weakref.WeakSet(self._tensors)

    def drop_fetch(self) -> None:
        """Free the fetched bytes: the prefetch was too early."""
        if self._fetch is not None:
            self._fetch.abandon()
        self._fetch = self._fetched = None

    def tensor(self, saved: SavedTensor) -> torch.Tensor:
        """The saved tensor on the device, ready to be read.

        Raises:
            RuntimeError: the tensor was written to since it was saved.
            TransferError: a copy failed.
        """
        saved.versions.check()
        storage = self._present()
        if storage is None:
            self.start_fetch()
            storage = self._fetched
        assert storage is not None
        if self._fetch is not None:
            self._fetch.wait()
        with torch.no_grad():
            tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
            tensor.set_(storage, saved.storage_offset, saved.size, saved.stride)
        if self._fetched is not None:
            self._not_asked.discard(saved)
            if not self._not_asked:
                self._fetch = self._fetched = None
        return tensor

    def _present(self) -> torch.UntypedStorage | None:
        """The bytes on the device: fetched, or alive because something else holds the storage (an input, autograd)."""
        if self._fetched is not None:
            return self._fetched
        if self._source is not None:
            return self._source.untyped_storage()
        storage = storage_of(self._elsewhere)
        return storage if storage is not None and storage.nbytes() == self.nbytes else None
