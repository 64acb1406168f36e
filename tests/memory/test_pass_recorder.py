"""The peak of each pass of a step, to the byte, whichever way it is counted; what goes wrong leaves no trace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import InputError
from shoal.lowlevel import allocations
from shoal.memory import limit as limit_module
from shoal.memory import running_meter
from shoal.memory.running_meter import RunningMeter
from shoal.memory.storage_bytes import WeakStorage
from tests.raising import raising

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


def first_pass(there: Sequence[torch.Tensor], passing: Sequence[WeakStorage] = ()) -> RunningMeter:
    """A meter in the first pass of a step."""
    meter = RunningMeter(CPU)
    meter.start(or_records=True)
    meter.restart_from(there, passing)
    next_pass(meter, there)
    return meter


def next_pass(meter: RunningMeter, in_use: Sequence[torch.Tensor]) -> int:
    """The peak of what came before it, after which the next pass begins."""
    between_bytes = meter.mark(passed=True).peak_bytes
    meter.go_on(in_use)
    return between_bytes


def end_of_pass(meter: RunningMeter) -> int:
    return meter.mark().peak_bytes


def test_each_pass_has_its_own_peak_on_top_of_what_was_there(counter: str) -> None:
    there = bytes_of(100)
    meter = first_pass([there, there[:10]])
    kept = bytes_of(1000)
    bytes_of(5000)
    assert end_of_pass(meter) == 100 + 1000 + 5000
    bytes_of(700)
    assert next_pass(meter, [there, kept]) == (100 + 1000 + 700 if counter == "allocator" else 0)
    bytes_of(20)
    del kept
    bytes_of(300)
    assert end_of_pass(meter) == 100 + 1000 + 20
    meter.close()


def test_one_pass_after_another_is_metered(counter: str) -> None:
    there = bytes_of(100)
    meter = first_pass([there])
    first = bytes_of(1000)
    assert end_of_pass(meter) == 1100
    next_pass(meter, [there, first])
    second = bytes_of(200)
    bytes_of(50)
    assert end_of_pass(meter) == 100 + 1000 + 200 + 50
    next_pass(meter, [there, first, second])
    bytes_of(400)
    del second
    assert end_of_pass(meter) == 100 + 1000 + 200 + 400
    next_pass(meter, [there, first])
    bytes_of(550)
    assert end_of_pass(meter) == 100 + 1000 + 550
    meter.close()


def test_what_passes_counts_as_long_as_it_is_alive(counter: str) -> None:
    there, old = bytes_of(100), bytes_of(3000)
    meter = first_pass([there], [WeakStorage(old), WeakStorage(there)])
    saved = bytes_of(1000)
    assert end_of_pass(meter) == 100 + 3000 + 1000
    del old
    next_pass(meter, [there, saved])
    assert end_of_pass(meter) == 100 + 1000
    meter.close()


def test_what_stands_for_memory_to_come_counts_once(counter: str) -> None:
    def in_use() -> list[torch.Tensor]:
        return [there, torch.empty(1000, dtype=torch.uint8, device="meta")]

    there = bytes_of(100)
    meter = first_pass(in_use())
    assert end_of_pass(meter) == 100 + 1000
    next_pass(meter, in_use())
    assert end_of_pass(meter) == 100 + 1000
    meter.close()


@needs_compiler
def test_both_counters_agree_on_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    x = torch.randn(2, 3, 16, 16)

    def measure() -> tuple[int, int]:
        resident = [*model.parameters(), *model.buffers(), x]
        meter = first_pass(resident)
        result = model(x)
        forward_bytes = end_of_pass(meter)
        saved: list[torch.Tensor] = []
        wanted = [result.grad_fn]
        while wanted:
            node = wanted.pop()
            wanted += [before for before, _ in node.next_functions if before is not None]
            saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        gradient = torch.ones_like(result)
        next_pass(meter, [*resident, result, gradient, *(t for t in saved if isinstance(t, torch.Tensor))])
        result.backward(gradient)
        model.zero_grad()
        backward_bytes = end_of_pass(meter)
        meter.close()
        return forward_bytes, backward_bytes

    measure()  # kernels that are chosen once
    counted = measure()
    monkeypatch.setattr(running_meter, "memory_limit", no_limit)
    assert measure() == counted


def test_what_was_allocated_between_two_passes_counts_until_it_is_freed(counter: str) -> None:
    meter = first_pass([])
    saved, other = bytes_of(3000), bytes_of(500)
    end_of_pass(meter)
    tangents = [bytes_of(5000), bytes_of(400)]
    next_pass(meter, [saved, other, *tangents, tangents[0][:10]])
    first = bytes_of(100)
    tangents.clear()
    del saved, other
    second = bytes_of(2000)
    assert end_of_pass(meter) == 3000 + 500 + 5000 + 400 + 100
    meter.close()
    del first, second


def test_a_peak_after_a_gradient_of_a_result_is_freed_is_without_it(counter: str) -> None:
    meter = first_pass([])
    saved = bytes_of(300)
    end_of_pass(meter)
    tangent = bytes_of(5000)
    next_pass(meter, [saved, tangent])
    first = bytes_of(4000)
    del tangent
    second = bytes_of(5500)
    del saved
    third = bytes_of(200)
    assert end_of_pass(meter) == 300 + 4000 + 5500
    meter.close()
    del first, second, third


def test_a_meter_that_is_closed_in_a_pass_leaves_no_trace(counter: str) -> None:
    meter = first_pass([])
    held = bytes_of(10**6)
    meter.close()
    assert not allocations.is_busy()
    assert not limit_module._active
    assert meter.mark().peak_bytes == 0
    meter.start(or_records=True)
    meter.restart_from([])
    next_pass(meter, [])
    bytes_of(10)
    assert end_of_pass(meter) == 10
    meter.close()
    del held


def test_where_a_profiler_is_in_the_way_of_the_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_meter, "memory_limit", no_limit)
    meter = RunningMeter(CPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with raising(InputError):
            meter.start(or_records=True)
        assert allocations.is_busy()
        assert meter.mark().peak_bytes == 0
