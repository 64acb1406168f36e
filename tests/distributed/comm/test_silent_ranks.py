"""A rank that is stopped is named by every other, also by one whose connection to a rank that runs was closed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.silent_ranks import lost_in
from shoal.errors import TransferError
from shoal.lowlevel.process_groups import add_in_store, store_read, store_write
from tests.ranks import meet, run_on_ranks

ONES = torch.ones(1000, dtype=torch.uint8)
STOPPED = 2


def in_an_exchange() -> Callable[[], object]:
    """Rank 1 comes when rank 0 has waited in vain, whereupon gloo closed the connection between the two."""
    exchange = Exchange(timeout_seconds=200)
    exchange.all_gather(ONES, [1000] * exchange.ranks, what="warm-up")
    exchange.timeout_seconds = 1

    def call() -> None:
        time.sleep(1.5 if exchange.rank == 1 else 0)
        exchange.all_gather(ONES, [1000] * exchange.ranks, what="gradients of bucket 3")

    return call


def in_a_collective_of_torch() -> Callable[[], object]:
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(torch.ones(1000), group=group)

    def call() -> None:
        try:
            dist.all_reduce(torch.ones(1000), group=group)
        except RuntimeError as error:
            raise lost_in(group, "the all-reduce failed", "start again") from error

    return call


def blamed(prepare: Callable[[], Callable[[], object]]) -> tuple[tuple[int, ...], str]:
    call = prepare()
    if dist.get_rank() == STOPPED:
        store_write("stopped", str(os.getpid()))
        meet()
        os.kill(os.getpid(), signal.SIGSTOP)
    stopped = int(store_read("stopped"))
    meet()
    try:
        with pytest.raises(TransferError) as caught:
            call()
    finally:
        if add_in_store("failed", 1) == 2:
            os.kill(stopped, signal.SIGKILL)
    return caught.value.silent_ranks, str(caught.value)


@pytest.mark.parametrize("prepare", [in_an_exchange, in_a_collective_of_torch])
def test_a_stopped_rank_is_named_by_every_rank_that_runs(prepare: Callable[[], Callable[[], object]]) -> None:
    of_0, of_1, _ = run_on_ranks(blamed, 3, prepare, may_end=(STOPPED,))
    assert of_0[0] == of_1[0] == (STOPPED,), (of_0, of_1)


def late() -> tuple[int, ...]:
    """Rank 1 comes when rank 0 has given it up."""
    exchange = Exchange(timeout_seconds=200)
    exchange.all_gather(ONES, [1000] * exchange.ranks, what="warm-up")
    exchange.timeout_seconds = 1
    meet()
    time.sleep(1.5 if exchange.rank == 1 else 0)
    with pytest.raises(TransferError) as caught:
        exchange.all_gather(ONES, [1000] * exchange.ranks, what="gradients of bucket 3")
    return caught.value.silent_ranks


def test_nobody_is_silent_if_the_late_rank_gives_up_as_well() -> None:
    assert run_on_ranks(late, 2) == [(), ()]
