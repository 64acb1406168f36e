"""The link of the CPU "device": two threads that copy to slabs of host memory or of a file, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from shoal.offload.links.copy import Copy
from shoal.offload.links.copy_thread import CopyThread, Pace, ThreadCopy
from shoal.offload.links.slab import Slab, SlabPool


class ThreadLink:
    """An open link of the CPU; see `open_link`.

    Args:
        make: makes a slab of so many bytes.
        place: where slabs lie, for messages.
        budget_bytes: most bytes of all slabs together.
        to_host, to_device: the speed each way.
    """

    def __init__(
        self, make: Callable[[int], Slab], place: str, budget_bytes: int | None, to_host: Pace, to_device: Pace
    ) -> None:
        self.device = torch.device("cpu")
        self.pool = SlabPool(make, place, budget_bytes)
        self._to_host = CopyThread("shoal-to-host", lambda slab, *where: slab.write(*where), to_host)
        self._to_device = CopyThread("shoal-to-device", lambda slab, *where: slab.read(*where), to_device)
        self._closer = weakref.finalize(self, _close, self._to_host, self._to_device, self.pool)

    def begin_step(self) -> None:
        """Nothing: threads finish what they write before it is read."""

    def offload(self, storage: torch.UntypedStorage, slab: Slab, offset: int) -> Copy:
        copy = ThreadCopy(f"offloading to {self.pool.place}", storage, slab, offset)
        slab.running.add(copy)
        self._to_host.submit(copy)
        return copy

    def fetch(self, storage: torch.UntypedStorage, slab: Slab, offset: int, after: Copy | None = None) -> Copy:
        copy = ThreadCopy(f"fetching from {self.pool.place}", storage, slab, offset, after)
        slab.running.add(copy)
        self._to_device.submit(copy)
        return copy

    def close(self) -> None:
        self._closer()


def _close(to_host: CopyThread, to_device: CopyThread, pool: SlabPool) -> None:
    to_host.close()
    to_device.close()
    pool.close()
