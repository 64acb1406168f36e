"""A training in an arena has the same losses, and the memory that a profiler and a memory limit see is the same."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bench.cpu_arena.arena import Arena
from shoal.memory.limit import memory_limit
from tests.bench.cpu_arena.training import Training, batches, needs_compiler

pytestmark = needs_compiler


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


def test_a_limit_inside_an_arena_counts_and_refuses_as_without_one() -> None:
    steps = batches([8] * 6)

    def peaks(arena: Arena | None) -> list[int]:
        training = Training()
        found = []
        with memory_limit(None) as w:
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
        return found

    with Arena() as arena:
        inside = peaks(arena)
        assert arena.departures == 0
        assert arena.replayed_steps >= 3
    assert inside == peaks(None)
