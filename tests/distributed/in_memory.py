"""Exchanges between threads of one process, in place of those between ranks, and one bucket's mean over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, cast

import torch

from shoal.distributed.bucket_sum import Mean
from shoal.distributed.exchange import Exchange


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

    def all_to_all(
        self, parts: Sequence[torch.Tensor], sizes_bytes: Sequence[int], *, what: str, out: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        board = self.board
        for r, part in enumerate(parts):
            board.messages[self.rank, r] = part.clone()
        board.barrier.wait()
        received = [board.messages[r, self.rank] for r in range(board.ranks)]
        board.barrier.wait()
        for r, message in enumerate(received):
            assert message.numel() == sizes_bytes[r]
            if r != self.rank:
                out[r].copy_(message)
        return list(out)

    def all_gather(
        self, part: torch.Tensor, sizes_bytes: Sequence[int], *, what: str, out: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        return self.all_to_all([part] * self.board.ranks, sizes_bytes, what=what, out=out)


def run_means(make: Callable[[int], Mean], ranks: int) -> None:
    """All stages of one bucket's mean on every rank."""
    board = Board(ranks)

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        mean = make(rank)
        exchange = cast(Exchange, InMemoryExchange(board, rank))
        mean.encode()
        mean.scatter(exchange)
        mean.sum()
        mean.gather(exchange)
        mean.decode()

    with ThreadPoolExecutor(ranks) as pool:
        results: list[Any] = [pool.submit(run, rank) for rank in range(ranks)]
        for result in results:
            result.result()
