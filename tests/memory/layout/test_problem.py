"""What a problem is, and the bytes that no layout can be below."""

from __future__ import annotations

import pytest
from hypothesis import given

from shoal.errors import InputError
from shoal.memory.layout.problem import Block, Layout, Problem
from tests.memory.layout.problems import problems


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
        ((Block("a", 3, 3, 1),), "'a' is in use from 3 to 3"),
        ((Block("a", 0, 1, -4),), "'a' has -4 bytes"),
        ((Block("a", 0, 1, 4), Block("a", 1, 2, 4)), "two blocks are called 'a'"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(blocks: tuple[Block, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Problem(blocks)
