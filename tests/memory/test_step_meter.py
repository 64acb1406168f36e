"""The peak of each part of a step, to the byte, whichever way it is counted; what goes wrong leaves no trace."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import InputError
from shoal.lowlevel import allocations
from shoal.memory import limit as limit_module
from shoal.memory import running_meter
from shoal.memory.limit import memory_limit
from shoal.memory.step_meter import Measured, StepMeter
from shoal.memory.storage_bytes import WeakStorage

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)
COUNTERS = [pytest.param("allocator", marks=needs_compiler), "profiler"]


def no_limit(*_: Any) -> Any:
    raise InputError("there is no compiler")


@pytest.fixture(params=COUNTERS)
def counter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "profiler":
        monkeypatch.setattr(running_meter, "memory_limit", no_limit)
    yield request.param
    assert not allocations.is_busy()
    assert not limit_module._active


def bytes_of(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def test_each_part_has_its_own_peak_on_top_of_what_was_there(counter: str) -> None:
    meter, there = StepMeter(CPU), bytes_of(100)
    assert meter.begin([there, there[:10]])
    kept = bytes_of(1000)
    bytes_of(5000)
    meter.pause()
    bytes_of(700)
    meter.resume([there, kept])
    bytes_of(20)
    del kept
    bytes_of(300)
    of_the_loss, then = (100 + 1000 + 700, 100 + 1000) if counter == "allocator" else (0, 0)
    measured = meter.end()
    assert measured == Measured(100 + 1000 + 5000, of_the_loss, 100 + 1000 + 20, then)
    assert measured.peak_bytes == 6100


@given(*[st.integers(0, 9)] * 3)
def test_the_peak_is_the_highest_of_the_three_parts(forward: int, loss: int, backward: int) -> None:
    assert Measured(forward, loss, backward).peak_bytes == sorted((forward, loss, backward))[-1]


def test_a_meter_meters_step_after_step(counter: str) -> None:
    meter = StepMeter(CPU)
    for size in (300, 100, 200):
        meter.begin([])
        held = bytes_of(size)
        meter.pause()
        meter.resume([held])
        measured = meter.end()
        del held
        assert measured is not None
        assert (measured.forward_bytes, measured.backward_bytes) == (size, size)


@needs_compiler
def test_what_an_earlier_step_left_behind_does_not_lower_the_peak_of_the_next_when_it_goes() -> None:
    meter, model = StepMeter(CPU), bytes_of(1000)
    meter.begin([model])
    logits = bytes_of(300)
    meter.pause()
    meter.resume([model, logits])
    meter.end()
    meter.begin([model])  # as in a training loop, whose names still hold the results of the last step
    fresh = bytes_of(300)
    meter.pause()
    logits = fresh
    meter.resume([model, logits])
    bytes_of(500)
    measured = meter.end()
    assert measured is not None
    assert measured.backward_bytes == 1000 + 300 + 500


def test_a_step_of_several_passes_is_metered_as_one(counter: str) -> None:
    meter, there = StepMeter(CPU), bytes_of(100)
    meter.begin([there])
    first = bytes_of(1000)
    meter.pause()
    meter.go_on([there, first])
    second = bytes_of(200)
    bytes_of(50)
    meter.pause()
    meter.resume([there, first, second])
    bytes_of(400)
    del second
    meter.pause()
    meter.resume([there, first])
    bytes_of(550)
    measured = meter.end()
    assert measured is not None
    assert measured.forward_bytes == 100 + 1000 + 200 + 50
    assert measured.backward_bytes == 100 + 1000 + max(200 + 400, 550)


@needs_compiler
def test_what_passes_counts_in_the_parts_that_it_lives_to_see_and_a_late_batch_from_then_on() -> None:
    meter, there, old, batch = StepMeter(CPU), bytes_of(100), bytes_of(3000), bytes_of(70)
    meter.begin([there], [WeakStorage(old), WeakStorage(there)])
    saved = bytes_of(1000)
    meter.pause()
    del old
    meter.go_on([there, batch])
    meter.pause()
    meter.resume([there, batch, saved])
    assert meter.end() == Measured(100 + 3000 + 1000, 100 + 70 + 1000, 100 + 70 + 1000, 100 + 70 + 1000)


def test_what_stands_for_memory_to_come_counts_once(counter: str) -> None:
    meter, there = StepMeter(CPU), bytes_of(100)
    meter.begin([there, torch.empty(1000, dtype=torch.uint8, device="meta")])
    meter.pause()
    meter.resume([there, torch.empty(1000, dtype=torch.uint8, device="meta")])
    measured = meter.end()
    assert measured is not None
    assert measured.peak_bytes == measured.backward_bytes == 100 + 1000


@needs_compiler
def test_both_counters_agree_on_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x = torch.randn(2, 3, 16, 16)

    def measure() -> Measured:
        meter = StepMeter(CPU)
        resident = [*model.parameters(), *model.buffers(), x]
        meter.begin(resident)
        result = model(x)
        meter.pause()
        saved: list[torch.Tensor] = []
        wanted = [result.grad_fn]
        while wanted:
            node = wanted.pop()
            wanted += [before for before, _ in node.next_functions if before is not None]
            saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        gradient = torch.ones_like(result)
        meter.resume([*resident, result, gradient, *(t for t in saved if isinstance(t, torch.Tensor))])
        result.backward(gradient)
        model.zero_grad()
        measured = meter.end()
        assert measured is not None
        return measured

    measure()  # kernels that are chosen once
    counted = measure()
    monkeypatch.setattr(running_meter, "memory_limit", no_limit)
    listed = measure()
    assert (counted.forward_bytes, counted.backward_bytes) == (listed.forward_bytes, listed.backward_bytes)
    assert listed.loss_bytes == 0 < counted.loss_bytes


def test_what_was_allocated_between_two_parts_counts_until_it_is_freed(counter: str) -> None:
    meter = StepMeter(CPU)
    meter.begin([])
    saved, other = bytes_of(3000), bytes_of(500)
    meter.pause()
    tangents = [bytes_of(5000), bytes_of(400)]
    meter.resume([saved, other, *tangents, tangents[0][:10]])
    first = bytes_of(100)
    tangents.clear()
    del saved, other
    second = bytes_of(2000)
    measured = meter.end()
    assert measured is not None
    assert measured.backward_bytes == 3000 + 500 + 5000 + 400 + 100
    del first, second


def test_a_peak_after_a_gradient_of_a_result_is_freed_is_without_it(counter: str) -> None:
    meter = StepMeter(CPU)
    meter.begin([])
    saved = bytes_of(300)
    meter.pause()
    tangent = bytes_of(5000)
    meter.resume([saved, tangent])
    first = bytes_of(4000)
    del tangent
    second = bytes_of(5500)
    del saved
    third = bytes_of(200)
    measured = meter.end()
    assert measured is not None
    assert measured.backward_bytes == 300 + 4000 + 5500
    del first, second, third


def after_begin(meter: StepMeter) -> None:
    meter.begin([])


def after_pause(meter: StepMeter) -> None:
    meter.begin([])
    meter.pause()


def after_resume(meter: StepMeter) -> None:
    meter.begin([])
    meter.pause()
    meter.resume([])


@pytest.mark.parametrize("stage", [after_begin, after_pause, after_resume])
def test_an_error_in_a_metered_part_is_forgotten(counter: str, stage: Callable[[StepMeter], None]) -> None:
    meter = StepMeter(CPU)
    with pytest.raises(ZeroDivisionError):
        stage(meter)
        try:
            bytes_of(10**6)
            print(1 // 0)
        except BaseException:
            meter.abandon()
            raise
    assert not allocations.is_busy()
    assert not limit_module._active
    assert meter.end() is None
    meter.begin([])
    bytes_of(10)
    meter.pause()
    meter.resume([])
    measured = meter.end()
    assert measured is not None
    assert measured.peak_bytes == 10


@pytest.mark.parametrize("stage", [after_begin, after_pause, after_resume])
def test_an_unfinished_step_is_dropped_when_the_next_begins(counter: str, stage: Callable[[StepMeter], None]) -> None:
    meter = StepMeter(CPU)
    stage(meter)
    bytes_of(10**6)
    after_resume(meter)
    measured = meter.end()
    assert measured is not None
    assert measured.peak_bytes == 0


def test_a_step_that_has_no_backward_pass_is_not_measured(counter: str) -> None:
    meter = StepMeter(CPU)
    after_pause(meter)
    assert meter.end() is None


def test_what_was_never_begun_is_not_measured() -> None:
    meter = StepMeter(CPU)
    meter.pause()
    meter.resume([])
    assert meter.end() is None


def test_where_a_profiler_is_in_the_way_of_the_profiler_the_step_is_not_metered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_meter, "memory_limit", no_limit)
    meter = StepMeter(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not meter.begin([])
        meter.pause()
        meter.resume([])
        assert meter.end() is None
        assert allocations.is_busy()


@needs_compiler
def test_within_a_wall_the_meter_counts_what_is_resident_once() -> None:
    with memory_limit(None):
        there = bytes_of(1000)
        meter = StepMeter(CPU)
        meter.begin([there])
        held = bytes_of(50)
        meter.pause()
        meter.resume([there, held])
        measured = meter.end()
    assert measured == Measured(1050, 1050, 1050, 1050)


@pytest.mark.gpu
def test_on_cuda_the_peak_is_the_allocators() -> None:
    torch.cuda.synchronize()
    meter = StepMeter(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    meter.begin([])
    held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    meter.pause()
    meter.resume([held])
    measured = meter.end()
    assert measured is not None
    assert measured.peak_bytes == before + (1 << 20)
