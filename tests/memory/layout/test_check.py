"""The check finds every way in which a layout can be wrong, and says where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.memory.layout.best_fit import best_fit
from shoal.memory.layout.check import check
from shoal.memory.layout.problem import Block, Layout, Problem
from tests.memory.layout.problems import problems

PAIR = Problem((Block("a", 0, 3, 4), Block("b", 2, 5, 4)))


@pytest.mark.parametrize(
    ("offsets", "capacity_bytes", "said"),
    [
        ((0, 3), None, "'a' at 0 and 'b' at 3 share bytes between 2 and 3"),
        ((0, 0), None, "share bytes"),
        ((-1, 4), None, "'a' begins at -1"),
        ((0, 4), 7, "'b' ends at 8, past the capacity of 7"),
        ((0,), None, "1 offsets for 2 blocks"),
    ],
)
def test_a_wrong_layout_is_refused(offsets: tuple[int, ...], capacity_bytes: int | None, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check(Layout(PAIR, offsets), capacity_bytes)


def test_a_sound_layout_passes() -> None:
    check(Layout(PAIR, (0, 4)), 8)
    check(Layout(PAIR, (4, 0)), 8)


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
    with pytest.raises(PlanError, match="share bytes"):
        check(Layout(problem, tuple(offsets)))
