"""The CUDA link waits for what it must, whatever order the device's streams run in.

Without a GPU its streams are stood in for by lists of work that run in any order the events allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import TransferError
from shoal.offload.links import cuda_link, host
from shoal.offload.links.cuda_link import CudaLink, StreamCopy

CPU = torch.device("cpu")
Choose = Callable[[int], int]


class Device:
    """Streams that run when they are told to: one piece of work at a time, of any stream that may go on."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.streams: list[Stream] = []
        self.compute = Stream(self)

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            ready = [stream for stream in self.streams if stream.may_go_on]
            assert ready, "the streams wait for each other"
            ready[self.choose(len(ready))].go_on()


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: list[Event | Callable[[], None]] = []
        device.streams.append(self)

    @property
    def may_go_on(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], Event) or self.work[0].reached)

    def go_on(self) -> None:
        first = self.work.pop(0)
        if not isinstance(first, Event):
            first()

    def wait_event(self, event: Event) -> None:
        self.work.append(event)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.device.run_until(lambda: not self.work)


class Event:
    def __init__(self, device: Device, enable_timing: bool = False) -> None:
        self.device, self.reached = device, False

    def record(self, stream: Stream) -> None:
        def reach() -> None:
            self.reached = True

        stream.work.append(reach)

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.device.run_until(lambda: self.reached)

    def elapsed_time(self, other: Event) -> float:
        assert self.reached and other.reached
        return 3.0


@contextmanager
def simulated(choose: Choose) -> Iterator[tuple[Device, CudaLink]]:
    device = Device(choose)
    with pytest.MonkeyPatch.context() as patch:
        of_device = device
        patch.setattr(torch, "Stream", lambda device: Stream(of_device))
        patch.setattr(torch, "Event", lambda device, enable_timing=False: Event(of_device, enable_timing))
        patch.setattr(torch.accelerator, "current_stream", lambda _: device.compute)
        patch.setattr(cuda_link, "_copy_on", lambda stream, to, source: stream.work.append(lambda: to.copy_(source)))
        patch.setattr(host, "_pin", lambda *_: None)
        patch.setattr(host, "_unpin", lambda *_: None)
        link = CudaLink(CPU, None)
        yield device, link
        link.close()
        assert not device.streams[1].work and not device.streams[2].work, "closed with copies under way"


@given(
    st.lists(
        st.sampled_from(["whole", "fetched at once", "no fetch", "fetch not finished", "offload not finished"]),
        max_size=4,
    ),
    st.integers(0, 2**32),
)
def test_every_byte_comes_back_in_any_order_of_the_streams(steps: list[str], seed: int) -> None:
    with simulated(random.Random(seed).randrange) as (device, link):
        wrong: list[tuple[str, int]] = []

        def work(what: str, bytes_: torch.Tensor, value: int) -> None:
            """Have the compute stream fill bytes, or look whether they are as expected."""
            if what == "write":
                device.compute.work.append(lambda: bytes_.fill_(value))
            else:
                device.compute.work.append(lambda: wrong.extend((what, b) for b in bytes_.tolist() if b != value))

        for value, ends in enumerate(["whole", *steps, "whole"]):
            device.compute = Stream(device)  # the slab is all that steps on different streams have in common
            lease = link.pool.lease(3 * 4096)
            link.begin_step()
            offloads, left_over = [], []
            for slot in range(3):
                sent = torch.full((5,), 255, dtype=torch.uint8)
                work("write", sent, 10 * value + slot)
                offloads.append(link.offload(sent.untyped_storage(), lease.slab, slot * 4096))
                if ends == "offload not finished":
                    left_over.append(sent)
                elif ends == "fetched at once":
                    back = torch.full((5,), 255, dtype=torch.uint8)
                    fetch = link.fetch(back.untyped_storage(), lease.slab, slot * 4096, offloads[slot])
                    fetch.wait()
                    work("fetched", back, 10 * value + slot)
                    offloads[-1].wait()
                else:
                    offloads[-1].wait()
                    work("write", sent, 254)  # by the next owner of these bytes
            for slot in (2, 1, 0) if ends in ("whole", "fetch not finished") else ():
                back = torch.full((5,), 255, dtype=torch.uint8)
                work("write", back, 253)  # by the owner before
                fetch = link.fetch(back.untyped_storage(), lease.slab, slot * 4096, offloads[slot])
                if ends == "whole":
                    fetch.wait()
                    work("fetched", back, 10 * value + slot)
                    work("write", back, 252)
                    assert fetch.stalled_seconds() == pytest.approx(3e-3)
                else:
                    left_over.append(back)
            del lease
            assert link.pool.leased == 0
            for bytes_ in left_over:
                work("write", bytes_, 251)
                work("next owner's", bytes_, 251)
        for stream in device.streams:
            stream.synchronize()
        assert not wrong
        assert link.pool.held_bytes == 3 * 4096


def test_a_copy_lets_go_when_it_is_waited_for_and_not_before() -> None:
    with simulated(lambda _: 0) as (device, link):
        lease = link.pool.lease(4096)
        copy = link.offload(torch.ones(5).untyped_storage(), lease.slab, 0)
        assert isinstance(copy, StreamCopy)
        assert copy._storage is not None and not copy.is_over
        copy.wait()
        assert copy._storage is None and not copy.is_over, "the host did not wait"
        device.compute.synchronize()
        assert copy.is_over and not lease.slab.running


def test_an_abandoned_copy_is_waited_for_by_the_host_before_its_bytes_go() -> None:
    with simulated(lambda _: 0) as (_, link):
        lease = link.pool.lease(4096)
        copy = link.offload(torch.ones(5).untyped_storage(), lease.slab, 0)
        lease.abandon()
        assert isinstance(copy, StreamCopy) and copy._storage is None and copy.is_over
        with pytest.raises(TransferError):
            copy.wait()


def test_an_error_while_a_copy_is_asked_for_leaves_none_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    with simulated(lambda _: 0) as (device, link):
        lease = link.pool.lease(4096)
        with monkeypatch.context() as patch:
            patch.setattr(cuda_link, "_copy_on", fail)
            with pytest.raises(RuntimeError, match="CUDA error"):
                link.offload(torch.ones(5).untyped_storage(), lease.slab, 0)
        assert not lease.slab.running and not device.streams[1].work
        link.offload(torch.ones(5).untyped_storage(), lease.slab, 0).wait()


def test_a_closed_link_moves_nothing() -> None:
    with simulated(lambda _: 0) as (_, link):
        lease = link.pool.lease(4096)
        link.close()
        with pytest.raises(TransferError):
            link.offload(torch.ones(5).untyped_storage(), lease.slab, 0)
