"""A storage that autograd saved in eager mode and that waits on the host: identity, version, and one fetch for all.

Autograd saves tensors, but bytes belong to storages. Two tensors share a record when they share a storage *and* its
version: a view saved by another op is no second copy, and a storage that was written to in between is no first one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.core.sizes import in_pages
from shoal.offload.links.open_link import OpenLink
from shoal.offload.links.slab import Copy


def size_class_bytes(nbytes: int) -> int:
    """`nbytes` rounded up to one of four sizes an octave, so that slots fit again when sizes vary a little.

    >>> size_class_bytes(2**20), size_class_bytes(2**20 + 1)
    (1048576, 1310720)
    """
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return in_pages(-(-nbytes // step) * step)


class VersionCounter:
    """How often the tensor, its views and its detached aliases were written to; holds none of their bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            # An alias shares the counter for good, also when it is pointed at other bytes.
            self._alias = tensor.detach()
            self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.saved = tensor._version

    def check(self) -> None:
        """RuntimeError, as without hooks, if there was a write since: with hooks autograd leaves that to them."""
        check_version(self._alias._version, self.saved)

    @property
    def is_current(self) -> bool:
        return self._alias._version == self.saved


def check_version(present: int, saved: int) -> None:
    if present != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: it is at "
            f"version {present}; expected version {saved} instead (offload_activations)"
        )


@dataclass(eq=False, weakref_slot=True, slots=True)
class SavedTensor:
    """What autograd holds in place of a tensor: where it lies in a saved storage."""

    storage: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int


class SavedStorage:
    """One storage at one version, on its way to the host as soon as this is made.

    Device bytes come back once for all tensors on it, and stay until each that still lives was asked for.

    Args:
        link: an open link of the tensor's device.
        tensor: one that covers the storage or a part of it.
        order: its place among those that were saved.

    Raises:
        TransferError: the host has no room, or may not use so much.
    """

    def __init__(self, link: OpenLink, tensor: torch.Tensor, order: int) -> None:
        storage = tensor.untyped_storage()
        self.order = order
        self.nbytes = storage.nbytes()
        self.device = tensor.device
        self.versions = VersionCounter(tensor)
        self._link = link
        self._lease = link.pool.lease(size_class_bytes(self.nbytes))
        link.begin_step()
        self._elsewhere = StorageWeakRef(storage)
        self._tensors: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self._not_asked: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self._fetched: torch.UntypedStorage | None = None
        self._fetch: Copy | None = None
        self._offload = link.offload(storage, self._lease.slab, 0)

    def of(self, tensor: torch.Tensor) -> SavedTensor:
        """A tensor on this storage, to be saved."""
        saved = SavedTensor(self, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        self._tensors.add(saved)
        return saved

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether these are the bytes of `tensor`."""
        same = self._elsewhere.cdata == tensor.untyped_storage()._cdata  # no other has it while the reference lives
        return same and self.versions.is_current and self.versions.saved == tensor._version

    @property
    def has_left(self) -> bool:
        return self._offload.is_over

    @property
    def is_here(self) -> bool:
        """Whether its bytes are on the device, or on their way."""
        return self._present() is not None

    def finish_offload(self) -> None:
        """Have the computation wait until the bytes are on the host.

        Raises:
            TransferError: the copy failed.
        """
        self._offload.wait()

    def start_fetch(self) -> None:
        """Ask for the bytes, if they are not here.

        Raises:
            TransferError: they never arrived on the host.
        """
        if self.is_here:
            return
        self._offload.wait()
        storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        self._fetch = self._link.fetch(storage, self._lease.slab, 0, self._offload)
        self._fetched = storage
        self._not_asked = weakref.WeakSet(self._tensors)

    def drop_fetch(self) -> None:
        """Give the fetched bytes back: they came too early."""
        if self._fetch is not None:
            self._fetch.abandon()
        self._fetch = self._fetched = None

    def tensor(self, saved: SavedTensor) -> torch.Tensor:
        """The saved tensor on the device, plain and ready to be read.

        Raises:
            RuntimeError: the tensor was written to since it was saved.
            TransferError: its bytes are lost.
        """
        self.versions.check()
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
        """The bytes on the device: ours, or those that someone else keeps anyway (an input, an output, autograd)."""
        if self._fetched is not None:
            return self._fetched
        storage = torch.UntypedStorage._new_with_weak_ptr(self._elsewhere.cdata)
        return storage if storage is not None and storage.nbytes() == self.nbytes else None
