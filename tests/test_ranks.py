"""Ranks run the function, give back what it returned, and never outlive the test."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.raising import raising
from tests.ranks import RankError, meet, run_on_ranks


def add_ranks(offset: int) -> tuple[int, torch.Tensor]:
    mine = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(mine)
    return os.getpid(), mine


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank's own trouble")


def end_one() -> str:
    if dist.get_rank() == 1:
        os._exit(3)
    return "alive"


def hang() -> None:
    time.sleep(100)


def test_each_rank_returns_its_own() -> None:
    (a, first), (b, second) = run_on_ranks(add_ranks, 2, 10)
    assert a != b
    assert first.tolist() == second.tolist() == [21]


def test_a_rank_s_traceback_is_raised() -> None:
    with pytest.raises(RankError):
        run_on_ranks(fail_on_one, 2)


def meet_and_leave() -> str:
    for _ in range(3):
        meet()
    if dist.get_rank() != 2:
        os._exit(0)
    return "all were here"


def test_ranks_that_have_met_may_end() -> None:
    assert run_on_ranks(meet_and_leave, 3, may_end=(0, 1)) == [None, None, "all were here"]


def test_a_rank_may_end_where_it_is_said() -> None:
    assert run_on_ranks(end_one, 2, may_end=(1,)) == ["alive", None]
    with pytest.raises(RankError):
        run_on_ranks(end_one, 2)


def test_ranks_that_hang_are_killed() -> None:
    with raising(RankError, "[0, 1]"):
        run_on_ranks(hang, 2, timeout_seconds=1)
