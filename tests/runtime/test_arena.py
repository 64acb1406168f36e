"""An arena serves a repeating step from one block, and whatever a step does instead, nothing is overwritten."""

from __future__ import annotations

import gc
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal.errors import InputError
from shoal.runtime.arena import Arena
from shoal.runtime.wall import wall

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the CPU's arena needs a C++ compiler"
)
MiB = 2**20
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena() as opened:
        yield opened


def batches(sizes: list[int]) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 3, 16, 16, generator=draw), torch.randint(10, (n,), generator=draw)) for n in sizes]


class Training:
    """A small network with batch norm, dropout and momentum; the same numbers each time it is made."""

    def __init__(self, compiled: bool = False, budget: int | None = None) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if compiled:
            self.model = shoal.compile(self.model, budget=budget, optimizer=self.optimizer)
        self.steps = 0

    def step(self, batch: Batch) -> torch.Tensor:
        """The loss."""
        torch.manual_seed(self.steps)  # so that two trainings may take turns
        self.steps += 1
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, steps: list[Batch], arena: Arena | None = None, keyed: bool = False) -> list[float]:
        losses = []
        for batch in steps:
            with arena.step(len(batch[0]) if keyed else None) if arena else nullcontext():
                loss = self.step(batch)
            losses.append(loss.item())
        return losses


def addresses_of_a_step(arena: Arena, sizes: list[int]) -> list[int]:
    with arena.step():
        return [tensor.data_ptr() for tensor in [torch.empty(size, dtype=torch.uint8) for size in sizes]]


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


def test_a_training_has_the_same_losses_and_no_departures(arena: Arena) -> None:
    steps = batches([8] * 8)
    assert Training().run(steps, arena) == Training().run(steps)
    assert arena.departures == arena.departed_steps == 0
    assert arena.replayed_steps >= 5
    assert 1.0 <= arena.fragmentation < 1.05


def test_a_training_that_clears_gradients_first_has_them_in_the_arena_too(arena: Arena) -> None:
    training, plain = Training(), Training()
    seen = []
    for batch in batches([8] * 7):
        with arena.step():
            training.optimizer.zero_grad()
            torch.manual_seed(plain.steps)
            loss = F.cross_entropy(training.model(batch[0]), batch[1])
            loss.backward()
            training.optimizer.step()
        seen.append([p.grad.data_ptr() for p in training.model.parameters() if p.grad is not None])
        assert loss.item() == plain.step(batch).item()
    assert arena.departures == 0
    assert seen[-1] == seen[-2] == seen[-3]
    assert max(max(at) for at in seen[-3:]) - min(min(at) for at in seen[-3:]) <= arena.bytes


@pytest.mark.parametrize("budget", [None, 1_000_000], ids=["kept", "recomputed"])
def test_a_compiled_model_trains_in_an_arena(arena: Arena, budget: int | None) -> None:
    steps = batches([8] * 9)
    training = Training(compiled=True, budget=budget)
    assert training.run(steps, arena) == Training().run(steps)
    assert (budget is None) == (training.model.shoal.plan.recomputed == ())
    assert arena.departures == 0
    assert arena.replayed_steps >= 4


def test_the_profiler_sees_the_same_memory(arena: Arena) -> None:
    def events(training: Training) -> list[int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            training.step(batch)
        found = sorted(run.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        return [event.nbytes() for event in found if event.name() == "[memory]"]

    batch = batches([8])[0]
    training, plain = Training(), Training()
    training.run([batch] * 5, arena)
    plain.run([batch] * 5)
    with arena.step():
        seen = events(training)
    assert seen == events(plain)
    assert arena.departures == 0


def test_a_short_last_batch_departs_and_the_next_epoch_is_served_again(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    steps = batches([8, 8, 8, 8, 5] * 3)
    with caplog.at_level(logging.WARNING, "shoal"):
        assert Training().run(steps, arena) == Training().run(steps)
    assert arena.departed_steps == 3
    assert arena.departures > 3
    assert "departed from the arena's plan" in caplog.text
    assert len(caplog.records) == 1, "it is said once"
    before = arena.departures
    Training().run(batches([8]), arena)
    assert arena.departures == before + 14, "a first step makes momentum for 14 parameters, and goes on as planned"


def test_a_key_gives_a_short_last_batch_a_plan_of_its_own(arena: Arena) -> None:
    steps = batches([5, 8, 8, 8, 8, 5, 5] * 2)
    assert Training().run(steps, arena, keyed=True) == Training().run(steps)
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


def test_a_tensor_that_is_kept_is_not_overwritten(arena: Arena) -> None:
    training, plain = Training(), Training()
    batch = batches([8])[0]
    for _ in range(4):
        with arena.step():
            training.step(batch)
        plain.step(batch)
    kept: list[torch.Tensor] = []
    hook = training.model[2].register_forward_hook(lambda module, given, made: kept.append(made))
    with arena.step():
        training.step(batch)
    hook.remove()
    plain.step(batch)
    as_it_was = kept[0].clone()
    before = arena.departures
    for _ in range(2):
        with arena.step():
            loss = training.step(batch)
        assert loss.item() == plain.step(batch).item()
    assert arena.departures >= before + 2
    assert torch.equal(kept[0], as_it_was)
    kept.clear()
    before = arena.departures
    with arena.step():
        assert training.step(batch).item() == plain.step(batch).item()
    assert arena.departures == before


def test_three_departing_steps_in_a_row_are_recorded_anew(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    steps = batches([8] * 4 + [4] * 7)
    with caplog.at_level(logging.WARNING, "shoal"):
        assert Training().run(steps, arena) == Training().run(steps)
    assert arena.departed_steps == 3
    assert arena.replayed_steps == 1 + 3 + 2  # a first step makes momentum: the second and third are alike
    assert "made anew" in caplog.text


@pytest.mark.parametrize("at", [1, 4], ids=["while recorded", "while replayed"])
def test_an_exception_in_a_step_leaves_the_next_ones_right(arena: Arena, at: int) -> None:
    training, plain = Training(), Training()
    for number, batch in enumerate(batches([8] * 8)):
        if number == at:
            with pytest.raises(ZeroDivisionError), arena.step():
                held = training.model[0](batch[0])
                raise ZeroDivisionError
        with arena.step():
            loss = training.step(batch)
        assert loss.item() == plain.step(batch).item()
    assert held.isfinite().all()
    assert arena.replayed_steps >= 4
    if at == 1:
        assert arena.departures == 0


def test_evaluation_between_steps_is_not_part_of_them(arena: Arena) -> None:
    training, plain = Training(), Training()
    for number, batch in enumerate(batches([8] * 8)):
        with arena.step():
            loss = training.step(batch)
        assert loss.item() == plain.step(batch).item()
        if number % 2:
            answers = []
            for each in (training, plain):
                each.model.eval()
                with torch.no_grad():
                    answers.append(each.model(batch[0]))
                each.model.train()
            assert torch.equal(*answers)
    assert arena.departures == 0


def test_other_threads_neither_disturb_the_sequence_nor_are_served(arena: Arena) -> None:
    over = threading.Event()
    wrong: list[str] = []

    def load() -> None:
        number = 0
        while not over.is_set():
            number += 1
            held = [torch.full((size,), number, dtype=torch.int32) for size in (3, 1000, 50_000)]
            if not all((each == number).all() for each in held):
                wrong.append("overwritten")

    loader = threading.Thread(target=load)
    loader.start()
    try:
        steps = batches([8] * 10)
        assert Training().run(steps, arena) == Training().run(steps)
    finally:
        over.set()
        loader.join()
    assert not wrong
    assert arena.departures == 0


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


@pytest.mark.parametrize("first", ["wall", "arena"])
@pytest.mark.parametrize("gone_first", ["wall", "arena"])
def test_a_wall_counts_and_refuses_as_without_an_arena(first: str, gone_first: str) -> None:
    steps = batches([8] * 6)

    def peaks(with_arena: bool) -> list[int]:
        training = Training()
        found = []
        opened = {}
        for name in (first, "arena" if first == "wall" else "wall"):
            if name == "wall":
                standing = wall(None)
                w = standing.__enter__()
            elif with_arena:
                opened["arena"] = Arena()
        arena = opened.get("arena")
        training.run(steps[:1])  # momentum is made once and stays
        live = w.live_bytes
        for batch in steps[1:]:
            w.reset_peak()
            training.run([batch], arena)
            found.append(w.peak_bytes - live)
        assert w.live_bytes == live
        w.limit_bytes = live + found[-1] - 1
        with pytest.raises(torch.OutOfMemoryError, match="limit is"):
            training.run(steps[:1], arena)
        training.optimizer.zero_grad()
        gc.collect()
        w.limit_bytes = None
        if arena:
            assert arena.departures == 0
            assert arena.replayed_steps >= 3
        for name in (gone_first, "arena" if gone_first == "wall" else "wall"):
            if name == "wall":
                standing.__exit__(None, None, None)
            elif arena:
                arena.close()
        return found

    assert peaks(with_arena=True) == peaks(with_arena=False)


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
    with pytest.raises(InputError, match="closed"), arena.step():
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
        with one.step(), pytest.raises(InputError, match="inside one another"), other.step():
            pass
        with one.step(), pytest.raises(InputError, match="inside one another"), one.step():
            pass
        with one.step(), pytest.raises(InputError, match="leave the step first"):
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


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Allocations of a step: bytes, and how many allocations later it is freed."""
    sizes = st.sampled_from([0, 1, 64, 65, 1000, 4096, 5000, 100_000])
    return draw(st.lists(st.tuples(sizes, st.integers(1, 20)), min_size=1, max_size=10))


@st.composite
def departing(draw: st.DrawFn, program: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The program with allocations changed, left out, put in, or held for longer."""
    departed = list(program)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(departed)))
        change = draw(st.sampled_from(["replace", "leave out", "put in", "hold"]))
        if change == "put in":
            departed.insert(at, (draw(st.sampled_from([1, 64, 1000, 4096])), draw(st.integers(1, 30))))
        elif at < len(departed):
            size, life = departed[at]
            if change == "leave out":
                del departed[at]
            else:
                departed[at] = (size * 2 + 1, life) if change == "replace" else (size, life + 15)
    return departed


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_a_step_does_no_two_live_tensors_overlap_and_their_contents_survive(data: st.DataObject) -> None:
    program = data.draw(programs())
    steps = [program] * 3 + data.draw(st.lists(st.one_of(st.just(program), departing(program)), max_size=6))
    held: list[tuple[int, int, torch.Tensor]] = []  # when it is freed, its mark, itself
    now = 0

    def free(until: int) -> None:
        assert all((tensor == mark).all() for due, mark, tensor in held if due <= until)
        held[:] = [each for each in held if each[0] > until]

    with Arena() as arena:
        for step in steps:
            with arena.step():
                for size, life in step:
                    free(now)
                    mark = now % 251
                    held.append((now + life, mark, torch.empty(size, dtype=torch.uint8).fill_(mark)))
                    now += 1
                    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for _, _, t in held if t.nbytes)
                    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert arena.departed_steps <= arena.replayed_steps
        if steps == [program] * len(steps):
            kept_alike = all(life <= len(program) for _, life in program)
            assert not kept_alike or arena.departures == 0
    free(now + 1000)


@pytest.mark.parametrize("device", ["meta", "xla"])
def test_a_device_without_an_arena_is_refused(device: str) -> None:
    with pytest.raises(InputError, match="no arena can be made on"):
        Arena(device)


def test_no_compiler_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.runtime import arena as module

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(module, "_library", module._library.__wrapped__)
    with pytest.raises(InputError, match=r"an arena on the CPU needs a C\+\+ compiler") as caught:
        Arena()
    assert "\n" not in str(caught.value)


def test_a_tensor_in_an_arena_is_freed_in_peace_when_the_process_ends() -> None:
    program = """
import torch
from shoal.runtime.arena import Arena
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
