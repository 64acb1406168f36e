"""A step's allocations become blocks that are in use exactly when the step, run again and again, uses them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cpu_arena.recorded_step import ALIGNMENT_BYTES, ELSEWHERE, RecordedStep, arena_problem
from shoal.errors import InputError
from shoal.memory.layout.search import best_fit


@st.composite
def recorded_steps(draw: st.DrawFn) -> RecordedStep:
    count = draw(st.integers(0, 12))
    sizes = tuple(draw(st.integers(1, 300)) for _ in range(count))
    died = (st.one_of(st.none(), st.integers(allocation + 1, 2 * count)) for allocation in range(count))
    return RecordedStep(sizes, tuple(map(draw, died)))


def in_use(step: RecordedStep, moment: int) -> dict[int, int]:
    """Allocation → number of its step, of all that are in use when allocation `moment` of endless repeats was made."""
    count = len(step.sizes_bytes)
    alive = {}
    for number in range(moment // count + 1):
        for allocation, death in enumerate(step.died):
            made = number * count + allocation
            if death is not None and death <= allocation + count and made <= moment < number * count + death:
                assert allocation not in alive, "two of one place at once"
                alive[allocation] = number
    return alive


@given(recorded_steps())
def test_what_is_in_use_at_once_never_shares_a_byte_however_often_the_step_repeats(step: RecordedStep) -> None:
    made = arena_problem([step])
    offsets = made.offsets(best_fit(made.problem).offsets)
    count = len(step.sizes_bytes)
    most = 0
    for moment in range(3 * count):
        taken = sorted((offsets[place], offsets[place] + step.sizes_bytes[place]) for place in in_use(step, moment))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))
        assert all(begin >= 0 and begin % ALIGNMENT_BYTES == 0 for begin, _ in taken)
        most = max(most, sum(end - begin for begin, end in taken))
    assert made.highest_live_bytes >= most


@given(recorded_steps())
def test_a_step_that_frees_all_it_made_is_cut_at_its_end_and_not_rounded_up(step: RecordedStep) -> None:
    count = len(step.sizes_bytes)
    within = RecordedStep(step.sizes_bytes, tuple(count if death is None else min(death, count) for death in step.died))
    made = arena_problem([within])
    assert made.allocations == tuple(range(count))
    most = max((sum(step.sizes_bytes[a] for a in in_use(within, moment)) for moment in range(count)), default=0)
    assert made.highest_live_bytes == most


def test_a_block_is_in_use_as_long_as_in_the_longest_recording() -> None:
    made = arena_problem([RecordedStep((1, 1, 1), (1, 3, 3)), RecordedStep((1, 1, 1), (3, 2, 3))])
    assert [(block.lower, block.upper) for block in made.problem.blocks] == [(0, 3), (1, 3), (2, 3)]


def test_gradients_that_the_next_step_frees_first_cost_no_more_than_those_freed_at_the_end() -> None:
    # Two activations, then two gradients; freed by zero_grad at the beginning of the next step or at the end of this.
    at_the_beginning = arena_problem([RecordedStep((64, 64, 64, 64), (4, 3, 4, 4))])
    after_the_first = arena_problem([RecordedStep((64, 64, 64, 64), (4, 3, 5, 5))])
    assert at_the_beginning.highest_live_bytes == after_the_first.highest_live_bytes == 192


@pytest.mark.parametrize("died", [None, 3, 5], ids=["never", "after its successor", "long after it"])
def test_what_outlives_its_successor_is_left_elsewhere(died: int | None) -> None:
    made = arena_problem([RecordedStep((10, 20), (died, 2))])
    assert made.allocations == (1,)
    assert made.offsets([0]) == [ELSEWHERE, 0]


def test_recordings_of_two_steps_do_not_mix() -> None:
    with pytest.raises(InputError):
        arena_problem([RecordedStep((1,), (1,)), RecordedStep((2,), (1,))])
