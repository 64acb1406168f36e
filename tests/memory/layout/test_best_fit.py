"""First fit and best fit: sound, no worse than said, and what their names promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from examples.minimalloc import first_fit
from shoal.memory.layout.problem import Block, Layout, Problem, check_layout
from shoal.memory.layout.search import best_fit
from tests.memory.layout.problems import problems


@pytest.mark.parametrize("lay_out", [first_fit, best_fit])
@given(problem=problems(most_blocks=30))
def test_every_layout_is_sound_and_at_least_the_bytes_in_use(
    lay_out: Callable[[Problem], Layout], problem: Problem
) -> None:
    layout = lay_out(problem)
    check_layout(layout)
    assert problem.highest_live_bytes <= layout.arena_bytes <= sum(block.size_bytes for block in problem.blocks)


@given(problems(most_blocks=30))
def test_first_fit_gives_what_an_allocator_would_that_knows_nothing_of_the_future(problem: Problem) -> None:
    used: dict[int, Block] = {}  # byte by byte
    layout = first_fit(problem)
    in_order = sorted(zip(problem.blocks, layout.offsets, strict=True), key=lambda pair: pair[0].lower)
    for block, offset in in_order:
        used = {byte: other for byte, other in used.items() if other.upper > block.lower}
        lowest = next(start for start in range(10_000) if not used.keys() & range(start, start + block.size_bytes))
        assert offset == lowest
        used.update(dict.fromkeys(range(offset, offset + block.size_bytes), block))


def test_best_fit_knows_the_future() -> None:
    # In order, the long block lands on top of the short one and the large one finds no room below it.
    problem = Problem((Block("short", 0, 2, 4), Block("long", 1, 6, 2), Block("large", 2, 4, 6)))
    assert (first_fit(problem).arena_bytes, best_fit(problem).arena_bytes) == (12, 8)
