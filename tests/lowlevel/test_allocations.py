"""What an allocator gave out and took back, in order."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.errors import InputError
from shoal.lowlevel import allocations


def test_allocations_come_in_order_and_add_up():
    _, changes = allocations.record(lambda: torch.ones(256).relu())
    assert changes == [1024, 1024, -1024]
    assert allocations.peak_bytes(changes) == 2048
    assert allocations.peak_bytes([]) == 0


def test_the_profiler_of_pytorch_sees_the_same_bytes():
    x, w = torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)

    def run() -> torch.Tensor:
        return torch.conv2d(x, w, padding=1)

    run()
    _, ours = allocations.record(run)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert ours == [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert kept.shape == (2, 8, 16, 16)


def test_a_running_profiler_is_refused_and_left_running():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(InputError):
            allocations.record(lambda: None)
        assert allocations.is_busy()


def test_beside_a_running_profiler_allocations_are_recorded_on_another_thread():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _, changes = allocations.unprofiled(lambda: allocations.record(lambda: torch.ones(256).relu()))
        assert allocations.is_busy()
    assert changes == [1024, 1024, -1024]
    assert "aten::relu" not in {event.key for event in profiler.key_averages()}


def test_without_a_profiler_nothing_moves_to_another_thread():
    assert allocations.unprofiled(threading.get_ident) == threading.get_ident()


def test_what_an_unprofiled_call_raises_is_raised_here():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), pytest.raises(ZeroDivisionError):
        allocations.unprofiled(lambda: 1 // 0)


def test_an_error_stops_the_recording():
    with pytest.raises(ZeroDivisionError):
        allocations.record(lambda: 1 // 0)
    assert not allocations.is_busy()
