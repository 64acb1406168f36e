"""A meter that runs on: the peak between two marks, with what was there before counted once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from shoal.core.joined_step import Interval
from shoal.memory.limit import memory_limit
from shoal.memory.running_meter import RunningMeter
from tests.engine.training_laws import needs_compiler

pytestmark = needs_compiler


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture
def meter() -> Iterator[RunningMeter]:
    made = RunningMeter(torch.device("cpu"))
    yield made
    made.close()


def test_a_mark_tells_the_peak_since_the_last_one_and_what_is_in_use(meter: RunningMeter) -> None:
    old = block(1000)
    meter.start()
    kept = block(30)
    meter.restart_from([old, old[:10], kept])
    meter.mark()
    gone = block(500)
    del gone
    assert meter.mark() == Interval(1530, 1030)
    assert meter.mark() == Interval(1030, 1030)
    del kept
    assert meter.in_use_bytes() == 1000


def test_tensors_that_are_made_of_others_are_counted_without_reading_their_memory(meter: RunningMeter) -> None:
    meter.start()
    meter.restart_from([TwoTensor(torch.ones(100), torch.ones(100))])
    assert meter.in_use_bytes() == 400


def test_asking_what_is_in_use_loses_no_peak(meter: RunningMeter) -> None:
    meter.start()
    gone = block(500)
    del gone
    assert meter.in_use_bytes() == 0
    assert meter.mark() == Interval(500, 0)


def test_what_is_named_later_counts_once_and_what_was_allocated_meanwhile_is_counted_already(
    meter: RunningMeter,
) -> None:
    old = block(1000)
    meter.start()
    new = block(20)
    assert meter.is_fresh(new) and not meter.is_fresh(old)
    assert meter.count([old, new]) == 1000
    assert meter.count([old[5:], new]) == 0
    assert meter.in_use_bytes() == 1020
    meter.restart_from([])
    assert meter.in_use_bytes() == 20


def test_another_counter_beside_it_sees_the_same_and_takes_nothing_away(meter: RunningMeter) -> None:
    meter.start()
    meter.mark()
    with memory_limit(None) as limit:
        before_bytes = limit.live_bytes
        limit.reset_peak()
        gone = block(400)
        del gone
        meter.mark()
        assert limit.peak_bytes - before_bytes == 400
    kept = block(7)
    assert meter.mark() == Interval(7, 7)
    del kept


def test_one_that_does_not_run_counts_nothing(meter: RunningMeter) -> None:
    assert not meter.is_running
    assert (meter.count([block(5)]), meter.in_use_bytes(), meter.mark()) == (0, 0, Interval(0, 0))
