"""Exchanges between threads of one process, in place of those between ranks, and one bucket's mean over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import torch

from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients.bucket_sum import ShardedMean


class Board:
    """Where the messages of `ranks` threads lie."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = Barrier(ranks, timeout=30)
        self.messages: dict[tuple[int, int], torch.Tensor] = {}


class InMemoryExchange:
    """Stands in for `Exchange` in the thread of one rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank

    def expect(
        self, sizes_bytes: Sequence[int], *, what: str, out: Sequence[torch.Tensor], device: torch.device
    ) -> InMemoryExpected:
        return InMemoryExpected(self, list(sizes_bytes), list(out))


class InMemoryExpected:
    """Stands in for `Expected`: all ranks send, then all receive."""

    def __init__(self, exchange: InMemoryExchange, sizes_bytes: list[int], out: list[torch.Tensor]) -> None:
        self._board, self._rank = exchange.board, exchange.rank
        self._sizes_bytes, self._out = sizes_bytes, out

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        for r, part in enumerate(parts):
            self._board.messages[self._rank, r] = part.clone()

    def receive(self) -> list[torch.Tensor]:
        self._board.barrier.wait()
        received = [self._board.messages[r, self._rank] for r in range(self._board.ranks)]
        self._board.barrier.wait()
        for r, message in enumerate(received):
            assert message.numel() == self._sizes_bytes[r]
            if r != self._rank:
                self._out[r].copy_(message)
        return self._out


def run_means(make: Callable[[int, Exchange, Exchange], ShardedMean], ranks: int) -> None:
    """All stages of one bucket's mean on every rank."""
    boards = Board(ranks), Board(ranks)

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        scatter, gather = (cast(Exchange, InMemoryExchange(board, rank)) for board in boards)
        mean = make(rank, scatter, gather)
        mean.encode()
        mean.sum()
        mean.decode()

    with ThreadPoolExecutor(ranks) as pool:
        results: list[Any] = [pool.submit(run, rank) for rank in range(ranks)]
        for result in results:
            result.result()
