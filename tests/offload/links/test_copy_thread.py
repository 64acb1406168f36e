"""A copy thread moves bytes in order, lets go of them before it says so, and can be stopped at any point."""

from __future__ import annotations

import errno
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.errors import TransferError
from shoal.offload.links import copy_thread as module
from shoal.offload.links.copy_thread import CopyThread, Pace, ThreadCopy
from shoal.offload.links.host import HostSlab
from shoal.offload.links.slab import Slab
from tests.offload.links.slabs import RehearsedHost, our_threads
from tests.raising import raising

PAGE = 4096


def write(slab: Slab, offset: int, address: int, nbytes: int) -> None:
    slab.write(offset, address, nbytes)


def random_storage(nbytes: int) -> torch.UntypedStorage:
    return torch.randint(256, (nbytes,), dtype=torch.uint8).untyped_storage()


def copied(storage: torch.UntypedStorage, slab: Slab, offset: int = 0, after: ThreadCopy | None = None) -> ThreadCopy:
    copy = ThreadCopy("offloading", storage, slab, offset, after)
    slab.running.add(copy)
    return copy


@pytest.mark.parametrize("nbytes", [0, 1, 8191, 8192, 8193, 40_000])
def test_all_bytes_arrive_in_parts(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST_PART_BYTES", 8192)
    slab, storage, thread = HostSlab(20 * PAGE), random_storage(nbytes), CopyThread("shoal-test", write, Pace())
    copy = copied(storage, slab, 2 * PAGE)
    thread.submit(copy)
    copy.wait()
    assert slab.bytes[2 * PAGE :][:nbytes].tolist() == storage.tolist()
    assert slab.bytes.count_nonzero() == slab.bytes[2 * PAGE :][:nbytes].count_nonzero()
    assert slab.running == set()
    thread.close()


def test_the_bytes_are_free_when_the_waiter_goes_on() -> None:
    host = RehearsedHost()
    slab, storage, thread = host.slab(PAGE), random_storage(10), CopyThread("shoal-test", write, Pace())
    alive = StorageWeakRef(storage)
    host.gate.clear()
    copy = copied(storage, slab)
    thread.submit(copy)
    del storage
    host.at_gate.wait()
    assert not alive.expired() and not copy.is_over
    host.gate.set()
    copy.wait()
    assert alive.expired() and copy.is_over
    thread.close()


@pytest.mark.parametrize("full", [False, True])
def test_a_copy_waits_for_the_one_it_follows_and_fails_with_it(full: bool) -> None:
    host = RehearsedHost()
    slab = host.slab(PAGE)
    first_thread, second_thread = (CopyThread("shoal-test", write, Pace()) for _ in range(2))
    first = copied(random_storage(10), slab)
    storage = random_storage(10)
    second = copied(storage, slab, after=first)
    second_thread.submit(second)
    host.full = full
    first_thread.submit(first)
    second.settle()
    assert first.is_over
    if full:
        for copy in (first, second):
            with raising(TransferError, "10") as caught:
                copy.wait()
            cause = caught.value.__cause__
            assert isinstance(cause, OSError) and cause.errno == errno.ENOSPC
            assert cause.__traceback__ is None, "its frames would hold the slab for as long as someone holds the error"
    else:
        second.wait()
        assert slab.bytes[:10].tolist() == storage.tolist()
    first_thread.close()
    second_thread.close()


def test_what_was_abandoned_before_its_turn_never_moves_and_is_let_go_at_once() -> None:
    host = RehearsedHost()
    slab, thread = host.slab(2 * PAGE), CopyThread("shoal-test", write, Pace())
    host.gate.clear()
    running, queued = copied(random_storage(10), slab), copied(random_storage(10), slab, PAGE)
    held = StorageWeakRef(queued._storage)
    thread.submit(running)
    thread.submit(queued)
    queued.abandon()
    assert queued.is_over and held.expired()
    with pytest.raises(TransferError):
        queued.wait()
    host.gate.set()
    running.wait()
    thread.close()
    assert not slab.bytes[PAGE:].any()


def test_a_copy_that_was_never_submitted_settles_once_abandoned() -> None:
    copy = copied(random_storage(10), HostSlab(PAGE))
    copy.abandon()
    copy.settle()
    assert copy.is_over


def test_a_copy_that_is_abandoned_under_way_stops_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST_PART_BYTES", PAGE)
    host = RehearsedHost()
    slab, thread = host.slab(3 * PAGE), CopyThread("shoal-test", write, Pace())
    host.gate.clear()
    copy = copied(torch.ones(3 * PAGE, dtype=torch.uint8).untyped_storage(), slab)
    thread.submit(copy)
    host.at_gate.wait()
    copy.abandon()
    assert not copy.is_over, "its bytes may still be moving"
    host.gate.set()
    copy.settle()
    assert slab.bytes[:PAGE].all() and not slab.bytes[PAGE:].any()
    thread.close()


def test_what_is_abandoned_as_its_copy_ends_is_freed() -> None:
    storage = torch.zeros(8).untyped_storage()
    held = StorageWeakRef(storage)
    slab: Any = SimpleNamespace(running=SimpleNamespace(discard=lambda copy: copy.abandon()))  # before its last step
    copy = ThreadCopy("copying", storage, slab, 0)
    del storage
    copy.run(lambda *where: None, Pace(), threading.Event())
    assert copy.is_over and held.expired()


def test_closing_fails_what_is_not_over_and_ends_the_thread() -> None:
    thread = CopyThread("shoal-test", write, Pace(bytes_per_second=1e-3))
    slab = HostSlab(4 * PAGE)
    copies = [copied(random_storage(2 * PAGE), slab, offset) for offset in (0, 2 * PAGE)]
    for copy in copies:
        thread.submit(copy)
    assert our_threads() == ["shoal-test"]
    thread.close()
    thread.close()
    assert our_threads() == []
    for copy in copies:
        with pytest.raises(TransferError):
            copy.wait()
    late = copied(random_storage(1), slab)
    with pytest.raises(TransferError):
        thread.submit(late)
    assert late.is_over


def test_a_copy_thread_that_nobody_used_has_no_thread() -> None:
    thread = CopyThread("shoal-test", write, Pace())
    assert our_threads() == []
    thread.close()


def test_a_thread_that_cannot_start_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = CopyThread("shoal-test", write, Pace())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransferError):
            thread.submit(copied(random_storage(1), HostSlab(PAGE)))
    copy = copied(random_storage(1), HostSlab(PAGE))
    thread.submit(copy)
    copy.wait()
    thread.close()


class Clock:
    """Time that passes when someone waits, and a little with every part that is moved."""

    def __init__(self, moving_seconds: float) -> None:
        self.now = 100.0
        self.moving_seconds = moving_seconds

    def perf_counter(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def move(self, *_: object) -> None:
        self.now += self.moving_seconds


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 3)), min_size=1, max_size=5),
    st.sampled_from([1e3, 1e5, 1e8]),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from([0.0, 1e-4]),
)
def test_a_rehearsed_link_takes_its_latency_and_its_bytes_per_second(
    requests: list[tuple[int, float]], bytes_per_second: float, latency: float, moving: float
) -> None:
    clock = Clock(moving)
    pace, slab, free_at = Pace(bytes_per_second, latency), HostSlab(PAGE), 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        for nbytes, pause in requests:
            clock.now += pause
            asked = clock.now
            copy = copied(torch.UntypedStorage(nbytes), slab)
            copy.run(clock.move, pace, clock)  # type: ignore[arg-type]
            assert copy.error is None
            parts = -(-nbytes // pace.part_bytes)
            soonest = max(asked, free_at) + latency + nbytes / bytes_per_second
            assert soonest - 1e-6 <= clock.now <= soonest + parts * moving + 1e-6
            free_at = clock.now


def test_a_thread_between_two_copies_holds_neither() -> None:
    slab, thread = HostSlab(PAGE), CopyThread("shoal-test", write, Pace())
    for _ in range(2):
        copy = copied(random_storage(1), slab)
        thread.submit(copy)
        copy.wait()
    del copy
    gc.collect()
    assert not any(type(thing) is ThreadCopy for thing in gc.get_objects())
    thread.close()
