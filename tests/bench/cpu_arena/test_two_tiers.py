"""Two tiers lay out soundly, and lose no more than what the small blocks need."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from bench.cpu_arena.two_tiers import PAGE_BYTES, two_tiers
from examples.minimalloc import first_fit, smallest
from shoal.memory.layout.problem import Problem, check_layout
from shoal.memory.layout.search import best_fit
from tests.memory.layout.problems import problems

HALF = PAGE_BYTES // 2


@given(problems())
def test_a_layout_is_sound_and_wastes_less_than_the_small_blocks(problem: Problem) -> None:
    # Sizes of 0 to 9 half pages: those of 0 and 1 are small.
    problem = Problem(tuple(replace(block, size_bytes=HALF * block.size_bytes) for block in problem.blocks))
    layout = two_tiers(problem, time_limit_seconds=10)
    check_layout(layout)
    large = Problem(tuple(block for block in problem.blocks if block.size_bytes >= PAGE_BYTES))
    small = Problem(tuple(block for block in problem.blocks if block.size_bytes < PAGE_BYTES))
    assert layout.arena_bytes <= best_fit(large).arena_bytes + first_fit(small).arena_bytes
    best = smallest(large)
    assert best.layout is not None and best.proven
    assert layout.arena_bytes <= 1.01 * best.layout.arena_bytes + first_fit(small).arena_bytes
