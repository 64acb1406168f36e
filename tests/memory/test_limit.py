"""A memory limit counts what torch allocates, byte for byte, and refuses what goes past it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shoal.errors import InputError
from shoal.memory.limit import memory_limit, no_memory_limit, this_thread_works_for_steps

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)
MiB = 2**20


def floats(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32)


def a_training_step() -> Callable[[], None]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4096, 10),
    )
    images = torch.randn(4, 3, 32, 32)

    def step() -> None:
        model(images).square().sum().backward()
        model.zero_grad()

    return step


def profiled_peak_bytes(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step()
    live = peak = 0
    for event in sorted(run.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@needs_compiler
def test_a_step_peaks_at_what_the_profiler_reports() -> None:
    step = a_training_step()
    step()
    with memory_limit(None) as w:
        step()
        w.reset_peak()
        before = w.live_bytes
        step()
        counted = w.peak_bytes - before
        profiled_within_the_limit = profiled_peak_bytes(step)
    assert counted == profiled_within_the_limit == profiled_peak_bytes(step)


@needs_compiler
@given(st.lists(st.integers(0, 100_000), max_size=8))
def test_live_bytes_are_the_sum_of_what_is_held(sizes: list[int]) -> None:
    with memory_limit(None) as w:
        before = w.live_bytes
        held = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        assert w.live_bytes - before == sum(sizes)
        assert w.peak_bytes - before == sum(sizes)
        del held
        assert w.live_bytes == before


@needs_compiler
def test_what_goes_past_the_limit_is_refused_and_what_reaches_it_is_not() -> None:
    with memory_limit(None) as w:
        w.limit_bytes = w.live_bytes + 4000
        held = floats(1000)
        with pytest.raises(
            torch.OutOfMemoryError, match=f"1 bytes requested while {w.live_bytes} are in use and the li"
        ):
            torch.empty(1, dtype=torch.uint8)
        assert w.peak_bytes == w.limit_bytes
        del held
        floats(1000)


@needs_compiler
def test_training_goes_on_after_a_refused_step() -> None:
    step = a_training_step()
    with memory_limit(None) as w:
        step()
        w.reset_peak()
        before = w.live_bytes
        step()
        need = w.peak_bytes - before
        w.limit_bytes = w.live_bytes + need - 1
        with pytest.raises(torch.OutOfMemoryError):
            step()
        w.limit_bytes = w.live_bytes + need
        step()


@needs_compiler
def test_a_tensor_may_outlive_its_limit_and_an_older_one_is_not_counted() -> None:
    older = floats(1000)
    with memory_limit(None) as w:
        before = w.live_bytes
        w.limit_bytes = before + MiB
        del older
        assert w.live_bytes == before
        younger = floats(2000)
        assert w.live_bytes == before + 8000
    younger.resize_(4000)
    floats(10 * MiB)
    del younger
    with memory_limit(None) as w:
        assert w.live_bytes == before


@needs_compiler
def test_what_is_left_of_an_earlier_limit_takes_no_room_of_this_one() -> None:
    with memory_limit(None) as w:
        left = floats(1000)
        assert w.live_bytes == 4000
    with memory_limit(6000) as w:
        assert w.live_bytes == 0
        with memory_limit(None) as inner:
            held = floats(1500)
            assert inner.live_bytes == 6000
        del left  # which makes no room either
        assert w.live_bytes == w.peak_bytes == 6000
        with pytest.raises(torch.OutOfMemoryError):
            floats(1)
        del held
        assert w.live_bytes == 0


@needs_compiler
def test_threads_are_counted_together() -> None:
    refused: list[Exception] = []

    def churn() -> None:
        try:
            for size in range(1, 400):
                held = [floats(size) for _ in range(5)]
                del held
        except torch.OutOfMemoryError as error:
            refused.append(error)

    with memory_limit(None) as w:
        before = w.live_bytes
        w.limit_bytes = before + 4 * 5 * 400 * 4
        threads = [threading.Thread(target=churn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not refused
        assert w.live_bytes == before
        assert before + 4 * 399 <= w.peak_bytes <= w.limit_bytes


def in_a_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@needs_compiler
def test_what_other_threads_allocate_is_not_fresh_to_the_one_that_counts() -> None:
    def allocate() -> None:
        held.append(torch.empty(1000))

    def work_for_steps() -> None:
        this_thread_works_for_steps()
        allocate()

    def count_and_allocate() -> None:
        limit.count_this_thread()
        allocate()

    held: list[torch.Tensor] = []
    with memory_limit(None) as limit:
        limit.start_fresh(this_thread=True)
        allocate()
        in_a_thread(allocate)  # it loads data, or trains a model of its own
        in_a_thread(work_for_steps)
        assert [limit.is_fresh(one) for one in held] == [True, False, True]
        in_a_thread(count_and_allocate)  # a backward pass in another thread
        allocate()
        assert [limit.is_fresh(one) for one in held[3:]] == [True, False]
        assert limit.fresh_peak_bytes == 12000
        limit.start_fresh()  # all count
        in_a_thread(allocate)
        assert limit.fresh_peak_bytes == 4000


@needs_compiler
def test_a_block_is_freed_of_the_count_that_it_was_in() -> None:
    with memory_limit(None) as limit:
        limit.start_fresh(this_thread=True)
        held = [torch.empty(1000)]
        for _ in range(64):  # as many counts as are told apart
            limit.start_fresh(this_thread=True)
        assert limit.fresh_bytes == 0
        held.append(torch.empty(500))
        del held[0]
        assert limit.fresh_bytes == 2000
        held.clear()
        assert limit.fresh_bytes == 0


@needs_compiler
def test_of_nested_limits_the_lowest_holds() -> None:
    with memory_limit(None) as outer:
        base = outer.live_bytes
        outer.limit_bytes = base + 64 * MiB
        with memory_limit(base + MiB) as inner:
            with pytest.raises(torch.OutOfMemoryError):
                floats(MiB)
            inner.limit_bytes = base + 2**30
            floats(MiB)
            with pytest.raises(torch.OutOfMemoryError):
                floats(32 * MiB)
            assert inner.peak_bytes == base + 4 * MiB
        assert outer.peak_bytes == base + 4 * MiB
        floats(8 * MiB)
        assert outer.peak_bytes == base + 32 * MiB


@needs_compiler
def test_a_suspended_limit_bounds_nothing_and_counts_no_peak() -> None:
    with memory_limit(None) as w:
        before = w.peak_bytes
        w.limit_bytes = before + MiB
        with no_memory_limit(), no_memory_limit():
            floats(MiB)
        assert w.peak_bytes == before
        with pytest.raises(torch.OutOfMemoryError):
            floats(MiB)
        with no_memory_limit():
            kept = floats(1000)
        assert w.peak_bytes == before + kept.nbytes


@needs_compiler
def test_a_suspended_limit_counts_no_peak_of_what_is_fresh_either() -> None:
    with memory_limit(None) as w:
        w.start_fresh()
        early = floats(300)
        early_bytes = early.nbytes
        del early
        with no_memory_limit():
            floats(MiB)
        assert w.fresh_peak_bytes == early_bytes
        with no_memory_limit():
            kept = floats(1000)
        assert w.fresh_peak_bytes == kept.nbytes
        w.reset_fresh_peak()
        assert w.fresh_peak_bytes == kept.nbytes, "it is still in use"


def test_suspending_without_a_limit_does_nothing() -> None:
    with no_memory_limit():
        floats(10)


@needs_compiler
def test_a_tensor_that_is_held_until_the_process_ends_is_freed_in_peace() -> None:
    program = """
import torch
from shoal.memory.limit import memory_limit
with memory_limit("1MiB"):
    torch.held = torch.empty(1000)
stack = memory_limit(None)
stack.__enter__()
torch.held_too = torch.empty(1000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("limit", "device"), [("lots", "cpu"), (-1, "cpu"), ("1MiB", "meta")])
def test_an_impossible_limit_is_refused(limit: int | str, device: str) -> None:
    with pytest.raises(InputError), memory_limit(limit, device):
        pass


@pytest.mark.gpu
def test_a_limit_on_cuda_refuses_and_is_gone_afterwards() -> None:
    before = torch.cuda.get_per_process_memory_fraction()
    with memory_limit("256MiB", "cuda") as w:
        held = torch.empty(64 * MiB, dtype=torch.uint8, device="cuda")
        assert w.live_bytes >= held.nbytes
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
        with no_memory_limit():
            torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
        assert w.peak_bytes < 256 * MiB
    assert torch.cuda.get_per_process_memory_fraction() == before
