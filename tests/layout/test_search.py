"""The search finds a layout where there is one and proves it where there is none, natively and in Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given

from shoal import native
from shoal.data.location import data_dir
from shoal.layout import search as searching
from shoal.layout.check import check
from shoal.layout.problem import Block, Problem
from shoal.layout.search import search, smallest
from shoal.layout.table import read_problem
from tests.layout.problems import problems, smallest_arena_bytes
from tests.random_steps import unhurried

WAYS = pytest.mark.parametrize("way", ["native", "python"])


@contextmanager
def by(way: str) -> Iterator[None]:
    if way == "native" and native.library() is None:
        pytest.skip("the native library is not built")
    with pytest.MonkeyPatch.context() as patch:
        if way == "python":
            patch.setattr(native, "library", lambda: None)
        yield


@WAYS
@unhurried
@given(problem=problems(most_blocks=6))
def test_it_finds_the_smallest_arena_there_is_and_proves_that_none_is_smaller(way: str, problem: Problem) -> None:
    least_bytes = smallest_arena_bytes(problem)
    with by(way):
        found, none, best = search(problem, least_bytes), search(problem, least_bytes - 1), smallest(problem)
    assert found.layout is not None
    check(found.layout, least_bytes)
    assert (none.layout, none.proven) == (None, True)
    assert best.layout is not None
    assert (best.layout.arena_bytes, best.proven) == (least_bytes, True)


@WAYS
@unhurried
@given(problem=problems(most_blocks=14, most_bytes=30))
def test_what_it_finds_is_sound(way: str, problem: Problem) -> None:
    with by(way):
        found = search(problem, int(1.1 * problem.highest_live_bytes), time_limit_seconds=1)
    if found.layout is not None:
        check(found.layout, int(1.1 * problem.highest_live_bytes))


TIGHT = Problem(tuple(Block(f"{i}", i * 7 % 31, i * 7 % 31 + 5 + i * 13 % 17, 3 + i * 11 % 23) for i in range(150)))


def test_when_the_time_is_over_it_says_that_nothing_is_proven() -> None:
    answer = search(TIGHT, TIGHT.highest_live_bytes, time_limit_seconds=0)
    assert (answer.layout, answer.proven) == (None, False)
    best = smallest(TIGHT, time_limit_seconds=0)
    assert best.layout is not None
    check(best.layout)
    assert best.proven == (best.layout.arena_bytes == TIGHT.highest_live_bytes)


@WAYS
def test_an_attempt_ends_when_its_nodes_or_seconds_are_spent(way: str) -> None:
    with by(way):
        attempt = searching._natively if way == "native" else searching._in_python
        for nodes, seconds in ((3, 60.0), (10**9, 0.0)):
            outcome, _ = attempt(TIGHT.blocks, TIGHT.highest_live_bytes, nodes, seconds)
            assert outcome == searching._GAVE_UP


def test_an_interruption_stops_the_library_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def shoal_layout_search(self, *arguments: Any) -> int:
            while not arguments[-2]._obj.value:
                time.sleep(0.01)
            return searching._GAVE_UP

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            super().join(timeout)
            if timeout is not None:
                raise KeyboardInterrupt

    monkeypatch.setattr(native, "library", Endless)
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(TIGHT, TIGHT.highest_live_bytes)
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal layout search"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_minimallocs_problems_fit_their_capacity(name: str) -> None:
    path = data_dir() / "minimalloc" / f"{name}.1048576.csv"
    if not path.exists():
        pytest.skip(f"{path} is not here; set SHOAL_DATA")
    if native.library() is None:
        pytest.skip("without the native library this takes minutes")
    answer = search(read_problem(path), 1048576, time_limit_seconds=600)
    assert answer.layout is not None
    check(answer.layout, 1048576)
