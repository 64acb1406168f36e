"""An arena serves a repeating step from one block, and what it cannot do it says."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest
import torch

from bench.cpu_arena.arena import Arena
from shoal.errors import InputError
from tests.bench.cpu_arena.training import MiB, addresses_of_a_step, needs_compiler

pytestmark = needs_compiler


def test_each_allocation_gets_the_same_address_in_one_block(arena: Arena) -> None:
    sizes = [100, 5 * MiB, 7, 3 * MiB, 4096]
    for _ in range(2):
        addresses_of_a_step(arena, sizes)
    assert arena.bytes >= arena.highest_live_bytes == sum(sizes)
    first = addresses_of_a_step(arena, sizes)
    clutter = torch.empty(5 * MiB, dtype=torch.uint8)  # what malloc would be moved by
    second = addresses_of_a_step(arena, sizes)
    assert first == second
    assert max(at + size for at, size in zip(first, sizes, strict=True)) - min(first) <= arena.bytes
    assert all(at % 64 == 0 for at in first)
    assert not min(first) <= clutter.data_ptr() < min(first) + arena.bytes
    assert (arena.departures, arena.replayed_steps) == (0, 2)


def test_tensors_that_are_not_in_use_together_share_bytes(arena: Arena) -> None:
    for _ in range(3):
        with arena.step():
            for _ in range(10):
                torch.empty(MiB, dtype=torch.uint8)
    assert arena.bytes == arena.highest_live_bytes == MiB
    assert arena.fragmentation == 1.0
    assert arena.departures == 0


def test_the_block_grows_in_place_under_tensors_that_lie_in_it(arena: Arena) -> None:
    def step(nbytes: int) -> torch.Tensor:
        with arena.step(nbytes):
            made = torch.full((nbytes,), 7, dtype=torch.uint8)
        return made

    for _ in range(2):
        step(MiB)
    held = step(MiB)
    at = held.data_ptr()
    for _ in range(3):
        step(64 * MiB)
    assert held.data_ptr() == at
    assert arena.bytes == 64 * MiB
    assert held.eq(7).all()
    assert arena.departures == 1, "the block that is held lies where the larger one would"


def test_another_thread_may_free_what_a_step_made(arena: Arena) -> None:
    for _ in range(4):
        with arena.step():
            held = [torch.empty(MiB, dtype=torch.uint8) for _ in range(3)]
            freeing = threading.Thread(target=held.clear)
            freeing.start()
            freeing.join()
            torch.empty(3 * MiB, dtype=torch.uint8)
    assert arena.departures == 0
    assert arena.bytes == 3 * MiB


def test_after_close_nothing_is_served_and_a_tensor_may_outlive_its_arena() -> None:
    arena = Arena()
    for _ in range(3):
        with arena.step():
            held = torch.full((MiB,), 5, dtype=torch.uint8)
    assert arena.replayed_steps == 1
    arena.close()
    arena.close()
    other = torch.zeros(MiB, dtype=torch.uint8)
    assert held.eq(5).all() and other.data_ptr() != held.data_ptr()
    with pytest.raises(InputError), arena.step():
        pass
    del held
    with Arena() as again:
        addresses_of_a_step(again, [10])


def test_two_arenas_stand_beside_one_another() -> None:
    with Arena() as one, Arena() as other:
        for _ in range(4):
            with one.step():
                first = torch.full((MiB,), 1, dtype=torch.uint8)
            with other.step():
                second = torch.full((MiB,), 2, dtype=torch.uint8)
            assert first.eq(1).all() and second.eq(2).all()
            del first, second
        assert one.departures == other.departures == 0
        with one.step(), pytest.raises(InputError), other.step():
            pass
        with one.step(), pytest.raises(InputError), one.step():
            pass
        with one.step(), pytest.raises(InputError):
            one.close()


def test_steps_that_never_repeat_are_told_and_left_alone(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        for size in range(1, 9):
            addresses_of_a_step(arena, [size])
    assert "no two of 8 steps made the same allocations" in caplog.text
    assert arena.bytes == arena.replayed_steps == 0


def test_an_arena_that_cannot_be_reserved_is_told_and_steps_go_on(
    arena: Arena, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = arena._library.arena_reserve
    # A terabyte more than is asked for: no machine has the memory.
    monkeypatch.setattr(arena._library, "arena_reserve", lambda handle, nbytes: reserve(handle, nbytes + 2**60))
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(5):
            addresses_of_a_step(arena, [1000])
    assert "no arena of 1.000 KiB can be had" in caplog.text
    assert len(caplog.records) == 1, "it is said once"
    assert arena.replayed_steps == 0
    monkeypatch.undo()
    addresses_of_a_step(arena, [1000])
    assert arena.replayed_steps == 1


@pytest.mark.parametrize("device", ["meta", "xla"])
def test_a_device_without_an_arena_is_refused(device: str) -> None:
    with pytest.raises(InputError):
        Arena(device)


def test_no_compiler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.cpu_arena import arena as module

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(module, "_library", module._library.__wrapped__)
    with pytest.raises(InputError):
        Arena()


def test_a_tensor_in_an_arena_is_freed_in_peace_when_the_process_ends() -> None:
    program = """
import torch
from bench.cpu_arena.arena import Arena
arena = Arena()
for _ in range(4):
    with arena.step():
        torch.held = torch.empty(1000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_step_may_run_in_any_thread(arena: Arena) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(4):
                addresses_of_a_step(arena, [1000, 2000])
        except BaseException as error:
            failed.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    assert not failed
    assert arena.replayed_steps == 2 and arena.departures == 0
