"""What an allocator gave out and took back, in order."""

from __future__ import annotations

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
        with pytest.raises(InputError, match="while a profiler runs"):
            allocations.record(lambda: None)
        assert allocations.is_busy()


def test_an_error_stops_the_recording():
    with pytest.raises(ZeroDivisionError):
        allocations.record(lambda: 1 // 0)
    assert not allocations.is_busy()
