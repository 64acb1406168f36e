"""Ops are timed in turns, so that others move the operands of one out of the caches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.in_turns import InTurns, Timing

MIB = 1 << 20


class Caches:
    """Knows how much went through the cache since each op ran last."""

    shared_bytes = 32 * MIB

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.evicted: list[bool] = []

    def evict(self, *, shared: bool) -> None:
        self.evicted.append(shared)
        self.moved_bytes += self.shared_bytes if shared else 0


class Op:
    def __init__(self, caches: Caches, moved_bytes: int, seconds: Sequence[float]) -> None:
        self.caches, self.left = caches, list(seconds)
        self.between: list[int] = []  # bytes that others moved between two runs
        self.timing = Timing(self.run, [], workspace_bytes=0, moved_bytes=moved_bytes)
        self.ended = self._moved()

    def _moved(self) -> int:
        self.caches.moved_bytes += self.timing.moved_bytes
        return self.caches.moved_bytes

    def run(self) -> float:
        self.between.append(self.caches.moved_bytes - self.ended)
        self.ended = self._moved()
        return self.left.pop(0)


sizes = st.lists(st.integers(0, 48).map(lambda mebibytes: mebibytes * MIB), min_size=1, max_size=12)


@given(sizes, st.sampled_from([1e-3, 0.1]))
def test_every_op_is_complete_and_none_that_is_large_finds_its_operands_in_the_shared_cache(
    moved: list[int], seconds: float
) -> None:
    caches = Caches()
    turns = InTurns(caches)
    ops: dict[str, Op] = {}
    complete = []
    for number, size in enumerate(moved):
        ops[str(number)] = Op(caches, size, [seconds] * 2)
        complete += [key for key, _ in turns.add(str(number), ops[str(number)].timing)]
    complete += [key for key, _ in turns.rest()]
    assert sorted(complete) == sorted(ops)
    for op in ops.values():
        assert op.timing.is_complete and not op.left[1:]
        if op.timing.leaves_core and seconds < 0.02:
            assert all(between >= caches.shared_bytes for between in op.between)


def test_while_others_move_enough_nothing_else_is_read() -> None:
    caches = Caches()
    turns = InTurns(caches)
    for number in range(20):
        list(turns.add(str(number), Op(caches, 16 * MIB, [1e-3] * 3).timing))
    assert not caches.evicted
    list(turns.rest())
    assert len(caches.evicted) <= 2


def test_what_waits_holds_about_the_bytes_of_the_cache() -> None:
    caches = Caches()
    turns = InTurns(caches)
    left = 0
    for number in range(40):
        left += 1
        left -= len(list(turns.add(str(number), Op(caches, 4 * MIB, [1e-3] * 3).timing)))
        assert left * 4 * MIB <= 2 * caches.shared_bytes


def test_a_small_op_is_complete_at_once_and_only_the_caches_of_cores_are_emptied() -> None:
    caches = Caches()
    found = list(InTurns(caches).add("small", Op(caches, 4096, [2e-5, 1e-5, 1e-5]).timing))
    assert [key for key, _ in found] == ["small"]
    assert caches.evicted == [False] * 3


def test_an_op_that_fails_in_a_later_run_is_told_and_the_others_go_on() -> None:
    caches = Caches()
    turns = InTurns(caches)

    def fail() -> float:
        raise RuntimeError("out of memory")

    found = list(turns.add("large", Op(caches, 8 * MIB, [1e-3] * 3).timing))
    found += turns.add("fails", Timing(fail, [], workspace_bytes=0))
    found += turns.rest()
    assert [key for key, _ in found] == ["fails", "large"]
    assert isinstance(found[0][1], RuntimeError)


@pytest.mark.parametrize(
    ("times", "complete"),
    [
        ([1.0], True),
        ([1e-3], False),
        ([1e-3, 1.02e-3], True),
        ([1e-3, 1.5e-3], False),
        ([1e-3, 1.5e-3, 2e-3], True),
        ([1e-5, 2e-5, 3e-5], False),
        ([1e-5] + [2e-5] * 29, True),
    ],
)
def test_an_op_is_complete_once_a_second_run_confirms_the_fastest_or_enough_were_made(
    times: list[float], complete: bool
) -> None:
    assert Timing(lambda: 0.0, times, workspace_bytes=0).is_complete is complete
