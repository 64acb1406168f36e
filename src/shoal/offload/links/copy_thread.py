"""The link of the CPU: two threads, one each way, that copy to slabs of host memory or of a file, and back.

`ctypes.memmove`, `os.pwritev` and `os.preadv` release the GIL, and none of them takes a thread from torch's pool.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from shoal.core.sizes import format_bytes, in_pages
from shoal.errors import TransferError
from shoal.offload.links.slab import Copy, Slab, SlabPool

_LARGEST_PART_BYTES = 8 << 20
_PART_SECONDS = 0.02  # of a slowed-down copy, so that it spreads its memory traffic evenly
_POLL_SECONDS = 0.05  # between two checks whether a slowed-down copy is abandoned

Move = Callable[[Slab, int, int, int], None]  # a slab, an offset in it, an address in memory, bytes


@dataclass
class Pace:
    """The speed of a simulated link. A copy of n bytes takes latency_seconds + n / bytes_per_second from the time it
    was submitted, or from the end of the copy before it.

    Attributes:
        bytes_per_second: None for full speed.
        latency_seconds: before the first byte arrives.
        free_at: when the last copy ended, on the clock of `time.perf_counter`.
    """

    bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    free_at: float = field(default=0.0, init=False)

    @property
    def part_bytes(self) -> int:
        """Bytes to copy between two checks of the clock: whole pages."""
        if self.bytes_per_second is None:
            return _LARGEST_PART_BYTES
        return in_pages(max(1, int(min(_LARGEST_PART_BYTES, self.bytes_per_second * _PART_SECONDS))))

    def due(self, began: float, done_bytes: int) -> float:
        """When `done_bytes` of a copy should have arrived."""
        seconds = 0.0 if self.bytes_per_second is None else done_bytes / self.bytes_per_second
        return began + self.latency_seconds + seconds


class ThreadCopy:
    """A transfer that a `CopyThread` runs.

    It is over when the thread has copied its bytes, or when it was abandoned before the thread started it. It takes no
    lock, because the garbage collector may call `abandon` anywhere.

    Args:
        what: a description, for messages.
        storage: the device bytes.
        slab, offset: the host bytes.
        after: a copy that must be over before this one begins.
    """

    def __init__(
        self, what: str, storage: torch.UntypedStorage, slab: Slab, offset: int, after: Copy | None = None
    ) -> None:
        self.nbytes = storage.nbytes()
        self._what = what
        self._storage: torch.UntypedStorage | None = storage
        self._slab: Slab | None = slab
        self._offset = offset
        self._after = after
        self._asked_at = time.perf_counter()
        self._stalled_seconds = 0.0
        self.error: BaseException | None = None
        self._unwanted = False
        self.is_over = False
        self._owners: list[str] = []  # the first decides how it ends; append is atomic
        self._latch = threading.Lock()
        self._latch.acquire()

    def wait(self) -> None:
        if not self.is_over:
            began = time.perf_counter()
            try:
                self.settle()
            finally:
                self._stalled_seconds += time.perf_counter() - began
        self._storage = None  # not in the copy thread: the computing thread frees device bytes, where the plan says
        if self.error is not None:
            reason = getattr(self.error, "strerror", None) or str(self.error) or type(self.error).__name__
            raise TransferError(f"{self._what} of {format_bytes(self.nbytes)} failed: {reason}") from self.error

    def settle(self) -> None:
        while not self.is_over:
            if self._unwanted:
                self.abandon()
            # Ctrl-C may reach another waiter between the two calls, or `abandon` before its last one.
            if self._latch.acquire(timeout=1.0):
                self._latch.release()

    def abandon(self) -> None:
        self._unwanted = True
        if self._is_owned_by("waiter"):
            self._end(TransferError("it was abandoned before it began"))
        if self.is_over:
            self._storage = None

    def stalled_seconds(self) -> float:
        return self._stalled_seconds

    def run(self, move: Move, pace: Pace, closing: threading.Event) -> None:
        """Run it, in the thread."""
        if not self._is_owned_by("thread"):
            return
        error: BaseException | None = None
        try:
            self._move(move, pace, closing)
        except BaseException as caught:
            error = caught.with_traceback(None)  # its frames would keep the storage alive
        self._end(error)

    def _move(self, move: Move, pace: Pace, closing: threading.Event) -> None:
        assert self._storage is not None and self._slab is not None
        if self._after is not None:
            self._after.settle()
            if self._after.error is not None:
                raise self._after.error
        began = max(self._asked_at, pace.free_at)
        address, part_bytes = self._storage.data_ptr(), pace.part_bytes
        for done in range(0, self.nbytes, part_bytes):
            if self._unwanted:
                raise TransferError("it was abandoned")
            if closing.is_set():
                raise TransferError("the link was closed")
            part = min(part_bytes, self.nbytes - done)
            move(self._slab, self._offset + done, address + done, part)
            moved_at, due = time.perf_counter(), pace.due(began, done + part)
            pace.free_at = max(moved_at, due)
            while not self._unwanted and not closing.is_set() and (left := due - time.perf_counter()) > 0:
                closing.wait(min(left, _POLL_SECONDS))

    def _is_owned_by(self, who: str) -> bool:
        self._owners.append(who)
        return self._owners[0] == who

    def _end(self, error: BaseException | None) -> None:
        if self.is_over:
            return
        slab, self._slab = self._slab, None
        self._after = None
        self.error = error
        if slab is not None:
            slab.running.discard(self)
        self.is_over = True
        # Asked after `is_over` is set, as `abandon` asks after it has set this: one of them sees both.
        if self._unwanted:
            self._storage = None
        self._latch.release()


class CopyThread:
    """A daemon thread that runs copies in order; started by the first copy and joined by `close`.

    Args:
        name: of the thread.
        move: copies bytes in one direction.
        pace: its speed.
    """

    def __init__(self, name: str, move: Move, pace: Pace) -> None:
        self._name = name
        self._move = move
        self._pace = pace
        self._asked: SimpleQueue[ThreadCopy | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._pid = os.getpid()

    def submit(self, copy: ThreadCopy) -> None:
        """Run `copy` after those submitted before it.

        Raises:
            TransferError: the thread was closed, belongs to the parent process of a fork, or cannot start.
        """
        if os.getpid() != self._pid:
            raise TransferError("a link does not survive a fork: open one in this process")
        try:
            with self._starting:
                if self._thread is None and not self._closing.is_set():
                    thread = threading.Thread(
                        target=_serve,
                        args=(self._asked, self._move, self._pace, self._closing),
                        name=self._name,
                        daemon=True,
                    )
                    thread.start()
                    self._thread = thread
        except RuntimeError as error:
            raise TransferError(f"no thread for the link can be started: {error}") from error
        self._asked.put(copy)
        if self._closing.is_set():
            copy.abandon()
            raise TransferError("the link was closed; open another one")

    def close(self) -> None:
        """Fail the copies that are not over and end the thread."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        self._asked.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _serve(asked: SimpleQueue[ThreadCopy | None], move: Move, pace: Pace, closing: threading.Event) -> None:
    while (copy := asked.get()) is not None:
        copy.run(move, pace, closing)
        del copy  # its error may hold large objects


class ThreadLink:
    """An open link of the CPU; see `open_link`.

    Args:
        make: makes a slab of a given size.
        place: the kind of memory, for messages.
        budget_bytes: most bytes of all slabs together.
        to_host, to_device: the speed of each direction.
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
        """Nothing to do: a thread finishes a write before it is read."""

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
