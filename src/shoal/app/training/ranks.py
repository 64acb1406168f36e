"""The processes that train together: who they are, what they exchange between steps, how they end together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shoal.distributed import Exchange
from shoal.distributed.comm.agreement import agree
from shoal.distributed.comm.silent_ranks import lost_in
from shoal.errors import InputError
from shoal.lowlevel import cuda_calls
from shoal.lowlevel.process_groups import add_in_store

_FAILURES = "shoal/failures"
_LONGEST_SECONDS = 9e9  # torch.distributed counts nanoseconds in 63 bits


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; the only one by default.

    Attributes:
        rank: of this process, from 0; rank 0 shows the run and writes its files.
        count: how many there are.
        timeout_seconds: how long one waits for another.
        grouped: whether torch.distributed is initialised for them.
    """

    rank: int = 0
    count: int = 1
    timeout_seconds: float = 600.0
    grouped: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the rank that shows the run and writes its files."""
        return self.rank == 0

    @property
    def several(self) -> int | None:
        """How many there are, None only for one; as `TrainOptions.ranks`."""
        return self.count if self.count > 1 else None

    def agree(self, what: str, settings: Mapping[str, object]) -> None:
        """Return if every rank has these settings; a collective call.

        Raises:
            TransferError: they differ, or a rank is gone.
        """
        if self.count == 1:
            return
        exchange = Exchange(timeout_seconds=self.timeout_seconds)
        agree(exchange, what, **settings)
        exchange.close()

    def all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """What every rank passed, by rank; a collective call.

        >>> Ranks().all_gather([1.0, 2.0])
        [[1.0, 2.0]]
        """
        if self.count == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.count)]
        with lost_ranks_reported(self):
            dist.all_gather(every, mine)
        return [each.tolist() for each in every]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value on rank 0, by rank, and nothing on the others; a collective call."""
        if self.count == 1:
            return [value]
        every = [None] * self.count if self.first else None
        with lost_ranks_reported(self):
            dist.gather_object(value, every)
        return every or []

    def share_buffers(self, model: torch.nn.Module) -> None:
        """Give every rank the buffers of rank 0, such as batch norm's statistics; a collective call."""
        if self.count > 1:
            with lost_ranks_reported(self):
                for buffer in model.buffers():
                    dist.broadcast(buffer, src=0)

    def fails_first(self) -> bool:
        """Note that this rank failed; whether it is the first that did, so that only one reports why."""
        if self.count == 1:
            return True
        try:
            return add_in_store(_FAILURES, 1) == 1
        except RuntimeError:  # the store has gone with the process that kept it
            return True


@contextmanager
def lost_ranks_reported(ranks: Ranks) -> Iterator[None]:
    """What the backend says where another rank has ended or does not answer becomes a TransferError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if ranks.count == 1 or not (isinstance(error, dist.DistError) or "gloo" in text or "Timed out" in text):
            raise
        raise lost_in(
            None,
            f"lost another of the {ranks.count} ranks, or it did not answer within {ranks.timeout_seconds:g} s "
            f"({text[:160]})",
            "see what the others report, then continue with --resume",
        ) from error


def rank_of_torchrun() -> int:
    """Of this process; 0 where torchrun did not start it."""
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() and _started_by_torchrun() else 0


def _started_by_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def joined(device: str = "auto", timeout_seconds: float = 600.0) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined by gloo, on CUDA by NCCL too; without torchrun this process only.

    Args:
        device: as of `TrainOptions`.
        timeout_seconds: how long one waits for another.

    Raises:
        InputError: torchrun's variables are wrong, or the ranks did not meet in time.
    """
    if not 0 < timeout_seconds < _LONGEST_SECONDS:
        raise InputError(f"timeout={timeout_seconds:g}: it must be a number of seconds above 0 and below 9e9")
    if not _started_by_torchrun():
        yield Ranks(timeout_seconds=timeout_seconds)
        return
    on_cuda = device.startswith("cuda") or (device == "auto" and cuda_calls.is_available())
    if on_cuda:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the ranks did not connect within {timeout_seconds:g} s ({str(error).strip().splitlines()[0][:160]}); "
            "start all of them with the same torchrun command"
        ) from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), timeout_seconds, grouped=True)
    finally:
        dist.destroy_process_group()


class Stop:
    """Which signal asked the run to end, 0 for none."""

    signal = 0


@contextmanager
def asked_to_stop() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of obeying them at once; a second one acts as ever."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
