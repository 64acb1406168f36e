"""Reordering gives sound layouts, the smallest ones where there is little to order."""

from __future__ import annotations

from hypothesis import given, settings

from bench.cpu_arena.reorder import reorder
from shoal.memory.layout.problem import Block, Problem, check_layout
from shoal.memory.layout.search import best_fit
from tests.memory.layout.problems import problems, smallest_arena_bytes


@given(problems())
def test_a_layout_is_sound_and_within_what_was_enough_if_time_was(problem: Problem) -> None:
    best_bytes = best_fit(problem).arena_bytes
    layout = reorder(problem, enough_bytes=best_bytes, time_limit_seconds=5)
    check_layout(layout)
    assert layout.arena_bytes <= best_bytes


def test_it_ends_in_time_where_enough_is_impossible() -> None:
    problem = Problem((Block("a", 0, 2, 5), Block("b", 1, 3, 4)))
    layout = reorder(problem, enough_bytes=8, time_limit_seconds=0.05)
    check_layout(layout)
    assert layout.arena_bytes == 9


@given(problems(most_blocks=5))
@settings(max_examples=50)
def test_a_few_blocks_find_their_smallest_arena_where_best_fit_does_not_need_to_be_asked(problem: Problem) -> None:
    least = smallest_arena_bytes(problem)
    layout = reorder(problem, enough_bytes=least, time_limit_seconds=0.2)
    assert least <= layout.arena_bytes <= best_fit(problem).arena_bytes
