"""One block of memory for a training step, each of its allocations at a planned address.

A step makes the same sequence of allocations every time. The first ones are recorded; then the blocks that come and go
with the step are laid out (`shoal.memory.layout`) and one block of memory is reserved for them, in huge pages where the
system has them. From then on the k-th allocation of a step gets its planned address. On the CPU this also ends what
glibc's malloc costs each step: large tensors are mapped, faulted in page by page and unmapped again.

Nothing is ever overwritten: before an address is given out, the arena looks whether a block that is still in use lies
there. An allocation that departs from the sequence - another size, a place still taken by a tensor that was kept - goes
to torch's own allocator, is counted and said (logger "shoal"). Three departing steps in a row are recorded anew.

    recorded ──two alike──▶ replayed ──departs three times in a row──▶ recorded

What is not served: tensors that outlive their successors of the next step (a loss that is kept), allocations outside of
steps and on other threads, and what oneDNN, NumPy or Python allocate for themselves.

A memory limit (`shoal.memory.limit`) inside an arena counts its allocations one by one. So a measured peak is what
tensors use; the arena holds `fragmentation` times as much, and holds it between steps too.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import sys
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from bench.cpu_arena.recorded_step import ArenaProblem, RecordedStep, arena_problem
from bench.cpu_arena.two_tiers import two_tiers
from shoal.core.sizes import format_bytes
from shoal.errors import InputError
from shoal.lowlevel.extension import loaded
from shoal.memory.layout.problem import Layout, check_layout

log = logging.getLogger("shoal")

_SOURCE = Path(__file__).with_name("arena.cpp")
_PATIENCE = 3  # departing steps in a row until a sequence is recorded anew
_MOST_RECORDED = 8  # steps without two alike until the recording starts again
_SEARCH_SECONDS = 8.0  # once for each sequence


class _Told(NamedTuple):
    """What the allocator says of a step; the last three are of its first departure. See arena.cpp."""

    served: int
    departures: int
    request: int
    asked_bytes: int
    planned_bytes: int


@dataclass
class _Sequence:
    """The steps of one key. Until it is planned, steps are recorded."""

    number: int
    starts: list[int] = field(default_factory=list)  # of each recorded step, in allocations
    planned: ArenaProblem | None = None
    layout: Layout | None = None
    departed_in_a_row: int = 0

    def record_again(self, library: ctypes.CDLL, handle: int) -> None:
        library.arena_forget(handle, self.number)
        self.starts.clear()
        self.planned = self.layout = None
        self.departed_in_a_row = 0


class Arena:
    """Serves a training step's allocations at planned addresses in one block; a context manager, or call `close`.

    Replaces nothing in plain PyTorch: its CPU allocator is malloc.

    Args:
        device: "cpu".

    Attributes:
        bytes: of the arena; 0 while steps are recorded.
        highest_live_bytes: the most bytes that a step has in it at once.
        departures: allocations of replayed steps that did not get their planned address.
        departed_steps, replayed_steps: how many steps had such ones, and how many were replayed at all.

    Raises:
        InputError: the device is another one, there is no C++ compiler, or torch's allocator was replaced by one that
            cannot be handed on to.

    >>> with Arena() as arena:
    ...     for _ in range(5):
    ...         with arena.step():
    ...             y = torch.ones(1000).exp().sum()
    ...     arena.bytes, arena.highest_live_bytes, arena.departures
    (8064, 8000, 0)

    Known limits: open and close it while no memory limit stands. The sequence is of one thread, so a backward pass that
    runs on a thread of its own is not served. The block is held until `close`. What is forked inside a step shares
    pages with it until they are written.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise InputError(f"no arena can be made on {self.device}: expected 'cpu'")
        if sys.platform == "win32":
            raise InputError("an arena needs mmap, which Windows does not have; train without one")
        self._library = _library()
        self._sequences: dict[Hashable, _Sequence] = {}
        self._running = self._closed = False
        self._told_departure = self._told_no_memory = False
        self.departures = self.departed_steps = self.replayed_steps = 0
        if not _open:
            _install(self._library)
        _open.append(self)
        self._handle = self._library.arena_open()

    @property
    def bytes(self) -> int:
        return max((each.layout.arena_bytes for each in self._sequences.values() if each.layout), default=0)

    @property
    def highest_live_bytes(self) -> int:
        return max((each.planned.highest_live_bytes for each in self._sequences.values() if each.planned), default=0)

    @property
    def fragmentation(self) -> float:
        """Arena bytes over the most bytes in use in it at once; 1.0 wastes nothing."""
        return self.bytes / self.highest_live_bytes if self.highest_live_bytes else 1.0

    @contextmanager
    def step(self, key: Hashable = None) -> Iterator[None]:
        """Everything that repeats: forward pass, loss, backward pass, optimizer.

        A step that ends in an exception is right all the same; if it was being recorded, it is recorded again.

        Args:
            key: tells steps of different sequences apart, such as the shape of the batch: the short last batch of an
                epoch then has a plan of its own in the same block. Without it, it departs from the plan of the others.

        Raises:
            InputError: a step of this thread runs already, or the arena is closed.
        """
        sequence = self._begin(key)
        done = False
        try:
            yield
            done = True
        finally:
            if sequence is not None:
                self._end(sequence, done)

    def close(self) -> None:
        """Give the block back: now, or when the last tensor in it is freed. Closing twice is nothing.

        Raises:
            InputError: a step runs.
        """
        if self._running:
            raise InputError("an arena cannot be closed while one of its steps runs; leave the step first")
        if self._closed:
            return
        self._closed = True
        _open.remove(self)
        if not _open:
            self._library.arena_uninstall()
        self._library.arena_close(self._handle)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self.close()

    def _begin(self, key: Hashable) -> _Sequence | None:
        """The sequence of the step; None where there is no memory for it and it runs without the arena."""
        if self._closed:
            raise InputError("this arena is closed; make another one")
        if self._running:
            raise InputError("a step of this arena runs already; steps cannot lie inside one another")
        sequence = self._sequences.get(key)
        if sequence is None:
            sequence = self._sequences[key] = _Sequence(self._library.arena_add_sequence(self._handle))
        replays = sequence.layout is not None
        if sequence.layout is None:
            recorded = self._library.arena_recorded(self._handle, sequence.number)
        elif not self._reserve(sequence.layout.arena_bytes):
            return None
        if not self._library.arena_begin(self._handle, sequence.number, replays):
            raise InputError("a step of another arena runs on this thread; steps cannot lie inside one another")
        if not replays:
            sequence.starts.append(recorded)
        self._running = True
        return sequence

    def _reserve(self, nbytes: int) -> bool:
        failure = self._library.arena_reserve(self._handle, nbytes)
        if failure and not self._told_no_memory:
            self._told_no_memory = True
            why = "tensors lie in the smaller one" if failure == errno.EBUSY else os.strerror(failure)
            log.warning("no arena of %s can be had (%s); steps go on without it", format_bytes(nbytes), why)
        return not failure

    def _end(self, sequence: _Sequence, done: bool) -> None:
        values = (ctypes.c_int64 * len(_Told._fields))()
        if not self._library.arena_end(self._handle, values):
            raise InputError(
                "a step of an arena ends on another thread than it began on; leave it where it was entered"
            )
        self._running = False
        if sequence.layout is not None:
            self._learn(sequence, _Told(*values))
        elif not done:
            sequence.record_again(self._library, self._handle)
        else:
            self._plan(sequence)

    def _learn(self, sequence: _Sequence, told: _Told) -> None:
        self.replayed_steps += 1
        if not told.departures:
            sequence.departed_in_a_row = 0
            return
        self.departures += told.departures
        self.departed_steps += 1
        sequence.departed_in_a_row += 1
        log.log(
            logging.DEBUG if self._told_departure else logging.WARNING,
            "a step departed from the arena's plan in %d of its allocations, which torch's own allocator served; "
            "the first was number %d: %s",
            told.departures,
            told.request,
            _why(told),
        )
        self._told_departure = True
        if sequence.departed_in_a_row == _PATIENCE:
            log.warning("%d steps in a row departed from the arena's plan; it is made again", _PATIENCE)
            sequence.record_again(self._library, self._handle)

    def _plan(self, sequence: _Sequence) -> None:
        """Lay the sequence out if the step that just ended is like one before it."""
        steps = _recorded_steps(self._library, self._handle, sequence)
        last = steps[-1]
        twin = next((step for step in reversed(steps[:-1]) if step.sizes_bytes == last.sizes_bytes), None)
        if twin is None:
            if len(steps) == _MOST_RECORDED:
                log.warning("no two of %d steps made the same allocations; the arena cannot serve them", len(steps))
                sequence.record_again(self._library, self._handle)
            return
        # Of the last step only its own deaths are known.
        died = tuple(twin_died if own is None else own for own, twin_died in zip(last.died, twin.died, strict=True))
        started = time.perf_counter()
        sequence.planned = arena_problem((twin, RecordedStep(last.sizes_bytes, died)))
        layout = two_tiers(sequence.planned.problem, time_limit_seconds=_SEARCH_SECONDS)
        check_layout(layout)
        sequence.layout = layout
        count = len(last.sizes_bytes)
        column = ctypes.c_int64 * count
        offsets = sequence.planned.offsets(layout.offsets)
        self._library.arena_plan(self._handle, sequence.number, count, column(*last.sizes_bytes), column(*offsets))
        self._library.arena_forget(self._handle, sequence.number)
        sequence.starts.clear()
        log.info(
            "arena of %s for %d of %d allocations, %.3f of the most in use, planned in %.1f s",
            format_bytes(layout.arena_bytes),
            len(sequence.planned.allocations),
            count,
            layout.arena_bytes / max(1, sequence.planned.highest_live_bytes),
            time.perf_counter() - started,
        )


_open: list[Arena] = []


def _recorded_steps(library: ctypes.CDLL, handle: int, sequence: _Sequence) -> list[RecordedStep]:
    recorded = library.arena_recorded(handle, sequence.number)
    sizes, died = (ctypes.c_int64 * recorded)(), (ctypes.c_int64 * recorded)()
    library.arena_recording(handle, sequence.number, sizes, died)
    ends = [*sequence.starts[1:], recorded]
    spans = list(zip(sequence.starts, ends, strict=True))
    of_steps = [tuple(sizes[start:end]) for start, end in spans]
    steps = []
    for number, (start, end) in enumerate(spans):
        count = end - start
        # A death in the next step is one in this step's own circle only where both are the same sequence.
        repeats = of_steps[number] == of_steps[min(number + 1, len(spans) - 1)]
        latest = 2 * count if repeats else count
        deaths = (death - start if death >= 0 else None for death in died[start:end])
        steps.append(
            RecordedStep(of_steps[number], tuple(d if d is not None and d <= latest else None for d in deaths))
        )
    return steps


def _why(told: _Told) -> str:
    asked = format_bytes(told.asked_bytes)
    if told.planned_bytes < 0:
        return f"{asked} where the plan has no more allocations"
    if told.planned_bytes == told.asked_bytes:
        return f"its {asked} are still in use by a tensor that was kept for longer than before"
    return f"{asked} instead of {format_bytes(told.planned_bytes)}"


def _install(library: ctypes.CDLL) -> None:
    if not library.arena_install():
        raise InputError(
            "torch's CPU allocator was replaced by one without a raw deleter; an arena cannot lie above it"
        )


@cache
def _library() -> ctypes.CDLL:
    """The functions of arena.cpp."""
    library = loaded(_SOURCE, "an arena on the CPU")
    handle, number, numbers = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("arena_install", ctypes.c_bool, []),
        ("arena_uninstall", None, []),
        ("arena_open", handle, []),
        ("arena_close", None, [handle]),
        ("arena_reserve", ctypes.c_int, [handle, number]),
        ("arena_add_sequence", number, [handle]),
        ("arena_begin", ctypes.c_bool, [handle, number, ctypes.c_bool]),
        ("arena_end", ctypes.c_bool, [handle, numbers]),
        ("arena_recorded", number, [handle, number]),
        ("arena_recording", None, [handle, number, numbers, numbers]),
        ("arena_forget", None, [handle, number]),
        ("arena_plan", None, [handle, number, number, numbers, numbers]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
