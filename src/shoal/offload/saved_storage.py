"""An offloaded storage of eager mode: its identity, and one copy and one fetch for all tensors on it.

Autograd saves tensors, but bytes belong to storages. What the backward pass of plain PyTorch reads is what the storage
holds by then, so the copy is made when nothing but this record owns the storage: nothing can write to it any more.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.core.sizes import in_pages
from shoal.lowlevel.torch_state import has_other_owners, storage_of
from shoal.offload.links.open_link import OpenLink
from shoal.offload.links.slab import Copy, Lease


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
