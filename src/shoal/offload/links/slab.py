"""Slabs of host bytes, copies to and from them, and the pool that leases each slab to one step at a time.

Slabs are not freed explicitly: a slab is free when no `Lease` on it is alive, so an exception, a discarded graph or
Ctrl-C cannot leak one.
"""

from __future__ import annotations

import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from shoal.core.sizes import format_bytes
from shoal.errors import TransferError


class Copy(Protocol):
    """A transfer that was started, on any link. It keeps its device bytes alive until `wait` returns or `abandon`."""

    nbytes: int

    def wait(self) -> None:
        """Have the computation wait until the bytes have arrived; the copy holds no device bytes afterwards.

        Raises:
            TransferError: the transfer failed, or was abandoned.
        """

    def abandon(self) -> None:
        """Stop it if possible, and free its device bytes as soon as that is safe."""

    def settle(self) -> None:
        """Block until no byte moves any more, whether the transfer succeeded or not."""

    @property
    def is_over(self) -> bool:
        """Whether no byte moves any more."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it is over."""

    def stalled_seconds(self) -> float:
        """How long `wait` held up the computation."""


class Slab(ABC):
    """A block of host bytes.

    Attributes:
        nbytes: its size.
        running: copies to or from it that may not be over.
        holder: a weak reference to its lease.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.running: set[Copy] = set()
        self.holder: weakref.ref[Lease] | None = None

    @property
    def is_free(self) -> bool:
        return self.holder is None or self.holder() is None

    @abstractmethod
    def write(self, offset: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` at `address` in the memory of this process to `offset` in the slab."""

    @abstractmethod
    def read(self, offset: int, address: int, nbytes: int) -> None:
        """Copy `nbytes` at `offset` in the slab to `address` in the memory of this process."""

    def settle(self) -> None:
        """Block until all copies to or from it are over."""
        for copy in tuple(self.running):
            copy.settle()
            self.running.discard(copy)


class Lease:
    """Reserves a slab for a step for as long as the lease is alive. Copies that run when it is freed are abandoned."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        slab.holder = weakref.ref(self)

    def abandon(self) -> None:
        """Abandon every copy that is still running."""
        for copy in tuple(self.slab.running):
            copy.abandon()

    def __del__(self) -> None:
        self.abandon()


class SlabPool:
    """Leases slabs; it makes them when needed and keeps them for the next step.

    Args:
        make: makes a slab of a given size.
        place: the kind of memory, for messages.
        budget_bytes: most bytes of all slabs together; None for no limit.
    """

    def __init__(self, make: Callable[[int], Slab], place: str, budget_bytes: int | None) -> None:
        self.place = place
        self.budget_bytes = budget_bytes
        self._make: Callable[[int], Slab] | None = make  # None once it is closed
        self._slabs: list[Slab] = []
        self._alive: weakref.WeakSet[Slab] = weakref.WeakSet()
        self._reserved: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs that exist, leased or free."""
        return sum(slab.nbytes for slab in self._alive)

    @property
    def leased(self) -> int:
        """How many slabs are leased."""
        return sum(not slab.is_free for slab in self._alive)

    def reserve(self, nbytes: int) -> None:
        """Keep a slab of `nbytes` or more ready until `unreserve`.

        Raises:
            TransferError: the budget is too small, or there is no memory.
        """
        with self._lock:
            if all(slab.nbytes < nbytes for slab in self._slabs):
                self._slabs.append(self._made(nbytes))
            self._reserved[nbytes] += 1
            self._trim()

    def unreserve(self, nbytes: int) -> None:
        """No longer keep a slab for a step of `nbytes`."""
        with self._lock:
            self._reserved -= Counter({nbytes: 1})
            self._trim()

    def lease(self, nbytes: int, *, exact: bool = False) -> Lease:
        """The smallest free slab of at least `nbytes`, or a new one.

        Args:
            nbytes: of the slab.
            exact: no larger one either: graphs of one iteration lease at the same time, and the larger is for another.

        Raises:
            TransferError: none is free, and the budget is too small or there is no memory for another.
        """
        with self._lock:
            most = nbytes if exact else sys.maxsize
            fitting = [slab for slab in self._slabs if nbytes <= slab.nbytes <= most and slab.is_free]
            slab = min(fitting, key=lambda slab: slab.nbytes, default=None)
            if slab is None:
                slab = self._made(nbytes)
                self._slabs.append(slab)
            lease = Lease(slab)
        slab.settle()  # copies of a discarded step
        return lease

    def close(self) -> None:
        """Free all slabs, a leased one when its lease is freed, and make no more.

        Compiled code may keep the pool alive until the process ends, so `make` (and with it a file descriptor) is
        released here.
        """
        with self._lock:
            self._make = None
            self._slabs.clear()

    def _made(self, nbytes: int) -> Slab:
        if self._make is None:
            raise TransferError(f"the link to {self.place} was closed; open another one")
        budget = self.budget_bytes
        if budget is not None:
            free = sorted((slab for slab in self._slabs if slab.is_free), key=lambda slab: slab.nbytes)
            while free and self.held_bytes + nbytes > budget:
                free[-1].settle()
                self._slabs.remove(free.pop())
            if self.held_bytes + nbytes > budget:
                leased = sum(slab.nbytes for slab in self._alive if not slab.is_free)
                others = f"{format_bytes(leased)} are held for a backward pass to come" if leased else "none are in use"
                raise TransferError(
                    f"{format_bytes(nbytes)} of {self.place} asked for, {format_bytes(budget)} allowed, {others}; "
                    "allow more host bytes, or run each backward pass before the next forward pass"
                )
        slab = self._make(nbytes)
        self._alive.add(slab)
        return slab

    def _trim(self) -> None:
        """Of the free slabs keep only the smallest one that is large enough for every reservation. Without reservations
        keep none."""
        if not self._reserved:
            self._slabs.clear()
            return
        most = max(self._reserved)
        free = [slab for slab in self._slabs if slab.is_free]
        kept = min((slab for slab in free if slab.nbytes >= most), key=lambda slab: slab.nbytes, default=None)
        self._slabs = [slab for slab in self._slabs if slab is kept or slab not in free]
