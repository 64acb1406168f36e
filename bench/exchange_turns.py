"""Steps of several contenders on one rank, in turns, with their seconds and the bytes that left the rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bench import lab_rank
from bench.gradient_contenders import Installed


@dataclass
class Runner:
    """One contender.

    Attributes:
        prepare: before each step, outside of its time.
        work: what is timed.
        sent_bytes: of the interface by step; on the loopback, on average over the ranks that share it.
        told_bytes: by step, by the contender's own count.
    """

    name: str
    prepare: Callable[[], object]
    work: Callable[[], object]
    installed: Installed
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    told_bytes: list[int | None] = field(default_factory=list)

    def step(self) -> None:
        """Every rank starts at a barrier, and the bytes are those up to another."""
        self.prepare()
        dist.barrier()
        told, sent = self.installed.sent_bytes(), lab_rank.sent_bytes()
        start = time.perf_counter()
        self.work()
        self.seconds.append(time.perf_counter() - start)
        dist.barrier()
        self.sent_bytes.append((lab_rank.sent_bytes() - sent) // lab_rank.sharing())
        after = self.installed.sent_bytes()
        self.told_bytes.append(None if told is None or after is None else after - told)

    def warm_up(self) -> None:
        """Until the contender does what it does from then on; nothing is counted."""
        for _ in range(self.installed.warm_ups):
            self.step()
        self.seconds.clear()
        self.sent_bytes.clear()
        self.told_bytes.clear()

    def row(self, result: Iterable[torch.Tensor]) -> dict[str, Any]:
        """The figures, and whether `result` is bit for bit that of every other rank. A collective call."""
        return {
            "seconds": self.seconds,
            "sent_bytes": self.sent_bytes,
            "told_bytes": self.told_bytes,
            "same_on_all_ranks": same_on_all_ranks(result),
            "reason": self.installed.reason(),
        }


def in_turns(runners: Sequence[Runner], rounds: int) -> None:
    """Each round starts with the next contender."""
    for turn in range(rounds):
        first = turn % max(1, len(runners))
        for runner in [*runners[first:], *runners[:first]]:
            runner.step()


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every rank holds the same bits. A collective call."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1
