"""Whatever a step does instead of what is planned, nothing is overwritten."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cpu_arena.arena import Arena
from tests.bench.cpu_arena.training import Training, batches, needs_compiler

pytestmark = needs_compiler


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
    assert "made again" in caplog.text


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
@settings(max_examples=150)
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
