"""Every rank gets what the others sent for it; whatever goes wrong is a TransferError that names rank and message."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shoal.distributed.comm import message as messages
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.message import HEADER_BYTES, MessageHeader
from shoal.errors import InputError, TransferError
from tests.ranks import meet, run_on_ranks


def part(source: int, target: int, elems: int) -> torch.Tensor:
    return torch.arange(elems).mul(3 + source * 7 + target).to(torch.uint8)


def size(source: int, target: int) -> int:
    return [0, 1, 10_000, 300_000][(source + 2 * target) % 4]


def exchange_all() -> int:
    exchange = Exchange(timeout_seconds=200)
    rank, ranks = exchange.rank, exchange.ranks
    for with_buffers in (False, True):
        sizes = [size(r, rank) for r in range(ranks)]
        out = [torch.empty(n, dtype=torch.uint8) for n in sizes] if with_buffers else None
        mine = [part(rank, r, size(rank, r)) for r in range(ranks)]
        got = exchange.all_to_all(mine, sizes, what="parts", out=out)
        for r in range(ranks):
            torch.testing.assert_close(got[r], part(r, rank, size(r, rank)), rtol=0, atol=0)
            assert out is None or r == rank or got[r] is out[r]
        sizes = [size(r, r) for r in range(ranks)]
        got = exchange.all_gather(part(rank, rank, size(rank, rank)), sizes, what="shards")
        for r in range(ranks):
            torch.testing.assert_close(got[r], part(r, r, size(r, r)), rtol=0, atol=0)
    exchange.close()
    with pytest.raises(InputError):
        exchange.all_gather(torch.empty(0, dtype=torch.uint8), [0] * ranks, what="late")
    return exchange.sent_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_what_was_sent_to_it(ranks: int) -> None:
    sent = run_on_ranks(exchange_all, ranks)
    for r in range(ranks):
        once = sum(size(r, t) + size(r, r) + 2 * HEADER_BYTES for t in range(ranks) if t != r)
        assert sent[r] == 2 * once


def alone() -> str:
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(TransferError) as caught:
        Exchange(timeout_seconds=1)
    return str(caught.value)


def test_an_exchange_that_one_rank_does_not_make_is_an_error_when_its_time_is_up() -> None:
    told, _ = run_on_ranks(alone, 2)
    assert told.startswith("got no exchange with all of the ranks [0, 1] within 1 seconds")
    assert "make it on every rank" in told


def exchange_among_some() -> list[int]:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return []
    exchange = Exchange(group, timeout_seconds=200)
    got = exchange.all_gather(torch.tensor([dist.get_rank()], dtype=torch.uint8), [1, 1], what="ranks")
    return [exchange.rank, exchange.ranks, *torch.cat(got).tolist()]


def test_a_part_of_the_ranks_exchange_among_themselves() -> None:
    assert run_on_ranks(exchange_among_some, 3) == [[0, 2, 0, 2], [], [1, 2, 0, 2]]


def failing(break_it: Callable[[Exchange], None], culprit: int, timeout_seconds: float) -> tuple[str, str]:
    """Two exchanges, the second broken by one rank: what each rank gets from it and from one more."""
    exchange = Exchange(timeout_seconds=200)
    ones = torch.ones(1000, dtype=torch.uint8)
    exchange.all_gather(ones, [1000] * exchange.ranks, what="warm-up")
    meet()
    exchange.timeout_seconds = timeout_seconds
    errors = []
    if exchange.rank == culprit:
        try:
            break_it(exchange)
        except TransferError as error:
            errors.append(str(error))
    for _ in range(2):
        try:
            exchange.all_gather(ones, [1000] * exchange.ranks, what="gradients of bucket 3")
        except TransferError as error:
            errors.append(str(error))
    return errors[0], errors[-1]


def be_killed(_: Exchange) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stall(_: Exchange) -> None:
    time.sleep(2)


def send_more(exchange: Exchange) -> None:
    more = torch.ones(2000, dtype=torch.uint8)
    exchange.all_gather(more, [2000] * exchange.ranks, what="gradients of bucket 3")


def send_another(exchange: Exchange) -> None:
    ones = torch.ones(1000, dtype=torch.uint8)
    exchange.all_gather(ones, [1000] * exchange.ranks, what="gradients of bucket 4")


def send_damaged(exchange: Exchange) -> None:
    real = messages.checksum
    messages.checksum = lambda message: real(message) ^ 1  # as if a byte had changed after it was summed
    try:
        send_exact(exchange)
    finally:
        messages.checksum = real


def send_exact(exchange: Exchange) -> None:
    ones = torch.ones(1000, dtype=torch.uint8)
    exchange.all_gather(ones, [1000] * exchange.ranks, what="gradients of bucket 3")


def send_noise(exchange: Exchange) -> None:
    real = MessageHeader.to_tensor
    MessageHeader.to_tensor = lambda self: real(self).fill_(7)  # type: ignore[method-assign]
    try:
        send_exact(exchange)
    finally:
        MessageHeader.to_tensor = real  # type: ignore[method-assign]


def give_up(exchange: Exchange) -> None:
    exchange.give_up("the disk is full")


@pytest.mark.parametrize(
    ("ranks", "break_it", "says", "timeout_seconds"),
    [
        (2, be_killed, "bucket 3: got a closed connection from rank 1, expected its message 1", 200),
        # The first that fails may close its connection to the other before that has noticed: then its sign leads to 1.
        (3, be_killed, "bucket 3: .*(closed connection|no sign of life) from rank 1", 200),
        (3, stall, "bucket 3: .*nothing from rank 1 for 1 seconds, expected its message 1", 1),
        (
            3,
            send_more,
            r"(?s)from rank 1 .*got: message 1 \(gradients of bucket 3\) of 2000 bytes.*expected: message 1 of 1000",
            200,
        ),
        (2, send_another, r"(?s)from rank 1 .*got: message 1 \(gradients of bucket 4\) of 1000 bytes", 200),
        (3, send_damaged, "(?s)from rank 1 are damaged.*bytes: 1000.*checksum: .*, expected ", 200),
        (2, send_noise, "got bytes from rank 1 that are no header", 200),
        (3, give_up, "bucket 3: rank 1 gave up: the disk is full", 200),
    ],
)
def test_survivors_raise_and_say_who_and_what(
    ranks: int, break_it: Callable[[Exchange], None], says: str, timeout_seconds: float
) -> None:
    may_end = (1,) if break_it is be_killed else ()
    results = run_on_ranks(failing, ranks, break_it, 1, timeout_seconds, may_end=may_end)
    for rank in range(ranks):
        if rank == 1:
            continue
        first, again = results[rank]
        assert re.search(says, first)
        assert again == first  # a spent exchange says so again


def after_one_has_ended() -> str:
    exchange = Exchange(timeout_seconds=200)
    ones = torch.ones(1000, dtype=torch.uint8)
    exchange.all_gather(ones, [1000] * exchange.ranks, what="warm-up")
    meet()
    if exchange.rank == 1:
        os._exit(0)
    time.sleep(0.5)  # by then gloo has seen it, and no message to it starts
    with pytest.raises(TransferError) as caught:
        exchange.all_gather(ones, [1000] * exchange.ranks, what="gradients of bucket 3")
    return str(caught.value)


def test_a_rank_that_had_ended_before_is_named() -> None:
    told, _ = run_on_ranks(after_one_has_ended, 2, may_end=(1,))
    assert "closed connection from rank 1, expected its message 1" in told
