"""A rank that dies, stalls, damages a message or asks for something else: every survivor's backward pass says so."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.distributed.comm import message as messages
from shoal.distributed.comm.message import checksum
from shoal.distributed.gradients.compress_gradients import compress_gradients
from shoal.errors import TransferError
from tests.distributed.reused_weights import batch, loss_of, network
from tests.ranks import meet, run_on_ranks


def fail_in_mid_step(break_it: Callable[[], None], timeout_seconds: float) -> list[str]:
    """What two steps raise on each rank after rank 1 breaks the first one's backward."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
    gradients = compress_gradients(ddp, "dynamic_tree", timeout_seconds=timeout_seconds)
    loss_of(ddp, batch(0, dist.get_rank())).backward()
    errors = []
    for step in (1, 2):
        try:
            output = loss_of(ddp, batch(step, dist.get_rank()))
        except TransferError as error:  # the step after
            errors.append(str(error))
            break
        if step == 1 and dist.get_rank() == 1:
            ddp.module.twice.weight.register_post_accumulate_grad_hook(lambda _: break_it())
        try:
            output.backward()
        except TransferError as error:
            errors.append(str(error))
    assert gradients.traffic.steps == 2
    return errors


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    time.sleep(5)


def damage() -> None:
    messages.checksum = lambda message: checksum(message) ^ 1


@pytest.mark.parametrize(
    ("ranks", "break_it", "says", "timeout_seconds"),
    [
        (2, be_killed, "of bucket .: .*closed connection from rank 1", 200),
        (3, be_killed, "of bucket .: .*closed connection from rank 1", 200),
        (3, stall, "of bucket .: .*nothing from rank 1 for 3 seconds", 3),
        (2, damage, "of bucket .: bytes from rank 1 are damaged", 200),
    ],
)
def test_every_survivor_raises_from_backward_and_does_not_hang(
    ranks: int, break_it: Callable[[], None], says: str, timeout_seconds: float
) -> None:
    may_end = (1,) if break_it is be_killed else ()
    results: list[Any] = run_on_ranks(fail_in_mid_step, ranks, break_it, timeout_seconds, may_end=may_end)
    for rank in range(ranks):
        if rank == 1:
            continue
        errors = results[rank]
        assert len(errors) == 2  # the step, and the next one
        assert re.search(says, errors[0])
        assert errors[1] == errors[0]


def loses_a_plain_bucket() -> str:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), bucket_cap_mb=0.00001)
    compress_gradients(ddp, "dynamic_tree", timeout_seconds=200)
    ddp(torch.randn(3, 4)).mean().backward()
    output = ddp(torch.randn(3, 4)).mean()
    meet()
    if dist.get_rank() == 1:
        be_killed()
    with pytest.raises(TransferError) as caught:
        output.backward()
    return str(caught.value)


def test_a_bucket_that_travels_as_it_is_fails_as_the_others_do() -> None:
    first, _ = run_on_ranks(loses_a_plain_bucket, 2, may_end=(1,))
    assert "gradients of bucket" in first
