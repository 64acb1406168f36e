"""What a problem is, the bytes that no layout can be below, and every way in which a layout can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError, PlanError
from shoal.memory.layout.problem import Block, Layout, Problem, check_layout
from shoal.memory.layout.search import best_fit
from tests.memory.layout.problems import problems
from tests.raising import raising


@given(problems())
def test_the_most_bytes_in_use_at_once_are_those_of_some_moment(problem: Problem) -> None:
    at = [sum(b.size_bytes for b in problem.blocks if b.lower <= t < b.upper) for t in range(-4, 15)]
    assert problem.highest_live_bytes == max(at)


def test_a_block_may_take_the_place_of_one_that_ends_as_it_begins() -> None:
    problem = Problem((Block("a", 0, 2, 5), Block("b", 2, 4, 5)))
    assert problem.highest_live_bytes == 5
    assert Layout(problem, (0, 0)).fragmentation == 1.0
    assert Layout(problem, (0, 5)).fragmentation == 2.0


def test_no_blocks_take_no_bytes() -> None:
    empty = Layout(Problem(()), ())
    assert (empty.problem.highest_live_bytes, empty.arena_bytes, empty.fragmentation) == (0, 0, 1.0)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ((Block("a", 3, 3, 1),), "'a'"),
        ((Block("a", 0, 1, -4),), "'a'"),
        ((Block("a", 0, 1, 4), Block("a", 1, 2, 4)), "'a'"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(blocks: tuple[Block, ...], said: str) -> None:
    with raising(InputError, said):
        Problem(blocks)


PAIR = Problem((Block("a", 0, 3, 4), Block("b", 2, 5, 4)))


@pytest.mark.parametrize(
    ("offsets", "capacity_bytes", "said"),
    [
        ((0, 3), None, "'a'"),
        ((0, 0), None, ""),
        ((-1, 4), None, "'a'"),
        ((0, 4), 7, "'b'"),
        ((0,), None, ""),
    ],
)
def test_a_wrong_layout_is_refused(offsets: tuple[int, ...], capacity_bytes: int | None, said: str) -> None:
    with raising(PlanError, said):
        check_layout(Layout(PAIR, offsets), capacity_bytes)


def test_a_sound_layout_passes() -> None:
    check_layout(Layout(PAIR, (0, 4)), 8)
    check_layout(Layout(PAIR, (4, 0)), 8)


@given(problems(), st.data())
def test_a_block_moved_onto_another_that_is_in_use_at_the_same_time_is_found(
    problem: Problem, data: st.DataObject
) -> None:
    blocks = problem.blocks
    at_once = [
        (i, j)
        for i, one in enumerate(blocks)
        for j, other in enumerate(blocks)
        if i != j and one.lower < other.upper and other.lower < one.upper and one.size_bytes and other.size_bytes
    ]
    if not at_once:
        return
    moved, onto = data.draw(st.sampled_from(at_once))
    offsets = list(best_fit(problem).offsets)
    offsets[moved] = offsets[onto] + data.draw(st.integers(0, blocks[onto].size_bytes - 1))
    with pytest.raises(PlanError):
        check_layout(Layout(problem, tuple(offsets)))
