"""The search finds a layout or proves that there is none; without the native library best fit serves."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from examples.data import data_dir
from examples.minimalloc import read_problem, smallest
from shoal.lowlevel import native
from shoal.memory.layout import search as searching
from shoal.memory.layout.problem import Block, Problem, check_layout
from shoal.memory.layout.search import ALL_RULES, Answer, Rules, SearchOutcome, best_fit, search
from tests.memory.layout.problems import crowded_problems, fits, problems, smallest_arena_bytes

needs_library = pytest.mark.skipif(native.library() is None, reason="the native library is not built")


@needs_library
@given(problem=problems(most_blocks=6))
def test_it_finds_the_smallest_arena_there_is_and_proves_that_none_is_smaller(problem: Problem) -> None:
    least_bytes = smallest_arena_bytes(problem)
    found, none, best = search(problem, least_bytes), search(problem, least_bytes - 1), smallest(problem)
    assert found.layout is not None
    check_layout(found.layout, least_bytes)
    assert (none.layout, none.proven) == (None, True)
    assert best.layout is not None
    assert (best.layout.arena_bytes, best.proven) == (least_bytes, True)


# No layout is as small as the 6 bytes in use, and no two blocks by themselves are why.
AT_ODDS = Problem(
    tuple(
        Block(name, lower, upper, size_bytes)
        for name, lower, upper, size_bytes in [
            *(("low", 0, 3, 1), ("middle", 1, 4, 1), ("high", 2, 5, 2), ("large", 3, 4, 3)),
            *(("t0", 0, 1, 5), ("t1", 1, 2, 4), ("t2", 2, 3, 2), ("t4", 4, 5, 4)),
        ]
    )
)


@needs_library
@given(problem=crowded_problems(), rules=st.integers(0, ALL_RULES).map(Rules))
@example(problem=AT_ODDS, rules=ALL_RULES)
@example(problem=AT_ODDS, rules=Rules(0))
def test_it_is_exact_with_any_of_its_rules(problem: Problem, rules: Rules) -> None:
    for capacity_bytes in (problem.highest_live_bytes, problem.highest_live_bytes + 1):
        answer = search(problem, capacity_bytes, rules=rules)
        assert (answer.layout is not None) == fits(problem, capacity_bytes)
        assert answer.proven
        if answer.layout is not None:
            check_layout(answer.layout, capacity_bytes)


@needs_library
def test_a_part_without_a_layout_is_not_tried_again_for_each_layout_of_another() -> None:
    many_ways = [Block(f"{i}", 10 + i % 3, 15 + i % 2, 1) for i in range(6)]
    blocks = (*AT_ODDS.blocks, *many_ways)
    outcome, _ = searching._attempt(blocks, 6, ALL_RULES, 40, 60.0, [0] * len(blocks))
    assert outcome == SearchOutcome.IMPOSSIBLE


@needs_library
def test_blocks_without_end_need_no_stack_without_end() -> None:
    stairs = Problem(tuple(Block(f"{i}", i, i + 2, 1 + i % 3) for i in range(700)))
    answer = search(stairs, stairs.highest_live_bytes)
    assert answer.layout is not None
    check_layout(answer.layout, stairs.highest_live_bytes)


@needs_library
@given(problem=problems(most_blocks=14, most_bytes=30))
def test_what_it_finds_is_sound(problem: Problem) -> None:
    found = search(problem, int(1.1 * problem.highest_live_bytes), time_limit_seconds=1)
    if found.layout is not None:
        check_layout(found.layout, int(1.1 * problem.highest_live_bytes))


TIGHT = Problem(tuple(Block(f"{i}", i * 7 % 31, i * 7 % 31 + 5 + i * 13 % 17, 3 + i * 11 % 23) for i in range(150)))


@given(problem=problems(most_blocks=30), spare_bytes=st.integers(-2, 10))
def test_without_the_library_best_fit_serves_and_proves_nothing_else(problem: Problem, spare_bytes: int) -> None:
    fit = best_fit(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        found, best = search(problem, fit.arena_bytes + spare_bytes), smallest(problem)
    needed_bytes, capacity_bytes = problem.highest_live_bytes, fit.arena_bytes + spare_bytes
    assert best == Answer(fit, fit.arena_bytes == needed_bytes)
    assert found == (Answer(fit, True) if spare_bytes >= 0 else Answer(None, capacity_bytes < needed_bytes))


def test_when_the_time_is_over_it_says_that_nothing_is_proven() -> None:
    answer = search(TIGHT, TIGHT.highest_live_bytes, time_limit_seconds=0)
    assert (answer.layout, answer.proven) == (None, False)
    best = smallest(TIGHT, time_limit_seconds=0)
    assert best.layout is not None
    check_layout(best.layout)
    assert best.proven == (best.layout.arena_bytes == TIGHT.highest_live_bytes)


@needs_library
def test_an_attempt_ends_when_its_nodes_or_seconds_are_spent() -> None:
    for nodes, seconds in ((3, 60.0), (10**9, 0.0)):
        failures = [0] * len(TIGHT.blocks)
        outcome, _ = searching._attempt(TIGHT.blocks, TIGHT.highest_live_bytes, ALL_RULES, nodes, seconds, failures)
        assert outcome == SearchOutcome.GAVE_UP


@needs_library
def test_without_parts_a_section_whose_blocks_all_lie_is_passed_over_however_often_it_failed() -> None:
    blocks = tuple(Block(f"{i}", i, i + 1, 4) for i in range(3))
    rules = ALL_RULES & ~Rules.PARTS
    outcome, offsets = searching._attempt(blocks, 8, rules, 1000, 60.0, [0, 100, 0])
    assert (outcome, offsets) == (SearchOutcome.FOUND, [0, 0, 0])


@pytest.mark.parametrize("seconds", [1e12, float("inf")])
@needs_library
def test_an_attempt_may_go_on_for_ever(seconds: float) -> None:
    blocks = (Block("first", 0, 2, 4), Block("second", 1, 3, 4))
    outcome, offsets = searching._attempt(blocks, 8, ALL_RULES, 1000, seconds, [0, 0])
    assert (outcome, sorted(offsets)) == (SearchOutcome.FOUND, [0, 4])


def test_most_attempts_are_short_and_some_are_long() -> None:
    of_few, of_many = searching._nodes(10), searching._nodes(1000)
    assert [next(of_few) // 300 for _ in range(15)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]
    assert next(of_many) >= 1000


def test_an_interruption_stops_the_library_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*arguments: Any) -> int:
        while not arguments[-3]._obj.value:
            time.sleep(0.01)
        return SearchOutcome.GAVE_UP

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            if timeout is not None:
                raise KeyboardInterrupt

    monkeypatch.setattr(native, "library", object)
    monkeypatch.setattr(native, "function", lambda name: endless)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(TIGHT, TIGHT.highest_live_bytes)
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal layout search"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B", "C", "D", "E"])
def test_minimallocs_problems_fit_their_capacity(name: str) -> None:
    path = data_dir() / "minimalloc" / f"{name}.1048576.csv"
    if not path.exists():
        pytest.skip(f"{path} is not here; set SHOAL_DATA")
    if native.library() is None:
        pytest.skip("without the native library this takes minutes")
    answer = search(read_problem(path), 1048576, time_limit_seconds=600)
    assert answer.layout is not None
    check_layout(answer.layout, 1048576)
