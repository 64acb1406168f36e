"""A slab of anonymous host memory, pinned where a CUDA device copies to it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

import torch

from shoal.core.sizes import format_bytes
from shoal.errors import TransferError
from shoal.lowlevel.cuda_calls import pin, unpin
from shoal.offload.links.slab import Slab


class HostSlab(Slab):
    """Anonymous pages from mmap, not from torch's allocator, whose bytes count as device memory on the CPU.

    Pages are committed when they are first written. A forked child does not inherit them.

    Args:
        nbytes: the size.
        pinned: register it with CUDA, so that copies run while the device computes.

    Raises:
        TransferError: there is not enough host memory, or CUDA cannot pin it.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        super().__init__(nbytes)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TransferError(
                f"{format_bytes(nbytes)} of host memory cannot be allocated: {reason}; offload less or to a folder"
            ) from error
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with suppress(OSError):  # not supported by this kernel
                    mapping.madvise(getattr(mmap, advice))
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        if pinned:
            _pin(self.address, nbytes)
            weakref.finalize(self, _unpin, self.address, mapping, os.getpid())

    def write(self, offset: int, address: int, nbytes: int) -> None:
        ctypes.memmove(self.address + offset, address, nbytes)

    def read(self, offset: int, address: int, nbytes: int) -> None:
        ctypes.memmove(address, self.address + offset, nbytes)


def _pin(address: int, nbytes: int) -> None:
    status = pin(address, nbytes)
    if status:
        raise TransferError(
            f"CUDA cannot pin {format_bytes(nbytes)} of host memory (error {status}); allow fewer host bytes, or raise "
            "the limit of locked memory (ulimit -l)"
        )


def _unpin(address: int, mapping: mmap.mmap, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the pages nor CUDA
        unpin(address)
    del mapping  # held until here: pages must be unpinned before they are unmapped
