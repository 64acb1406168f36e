"""A function on several ranks: processes on this machine, joined by gloo.

They are forked from one server that has imported torch and shoal already, so that a rank costs a fraction of a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from functools import cache
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import beside_compiling, made_up_machine

_PRELOADED = [
    "pytest",
    "hypothesis",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "shoal.distributed",
    "shoal.engine.api",
    "tests.ranks",
]


_meetings = count()


class RankError(AssertionError):
    """A rank raised or ended."""


def run_on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_seconds: float = 240,
    may_end: Collection[int] = (),
) -> list[Any]:
    """function(*args) on every rank of an initialised gloo group; what each returned, tensors too, by rank.

    Args:
        function: of a module's top level.
        ranks: how many processes.
        args: the same for all; pickled.
        timeout_seconds: then those still running are killed.
        may_end: ranks that may end without a result, which then is None.

    Raises:
        RankError: with the traceback of the first rank that failed, or naming those that hung.
    """
    context = _server()
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = zip(*(context.Pipe(duplex=False) for _ in range(ranks)), strict=True)
        started = [
            context.Process(target=_run, args=(function, rank, ranks, folder, pipe, args), daemon=True)
            for rank, pipe in enumerate(theirs)
        ]
        for process, pipe in zip(started, theirs, strict=True):
            process.start()
            pipe.close()  # so that its end is seen when the process ends
        try:
            return _results(list(mine), timeout_seconds, may_end)
        finally:
            for process in started:
                process.kill()
                process.join()


def forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    """function(*args) in a process, started, of the server that has imported torch and shoal already."""
    process = _server().Process(target=function, args=args)  # may have children of its own: not a daemon
    process.start()
    return process


def meet() -> None:
    """Wait until every rank is here. Nothing of it travels over connections between ranks: one may end right after."""
    store, here = dist.distributed_c10d._get_default_store(), f"here {next(_meetings)}"
    store.add(here, 1)
    while store.add(here, 0) < dist.get_world_size():
        time.sleep(0.01)


def _results(pipes: list[Connection], timeout_seconds: float, may_end: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} still ran after {timeout_seconds} seconds")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                failure, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                if rank not in may_end:
                    raise RankError(f"rank {rank} ended without a result") from None
                failure, results[rank] = None, None
            if failure is not None:
                raise RankError(f"rank {rank}:\n{failure}")
    return [results[rank] for rank in range(len(pipes))]


@cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run(
    function: Callable[..., Any], rank: int, ranks: int, folder: str, pipe: Connection, args: tuple[Any, ...]
) -> None:
    gc.freeze()  # what was imported is garbage to no function
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made_up_machine.put_in_place()
    beside_compiling.leave_out()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        meet()  # a function may end its rank at once, while another still connects
        pipe.send_bytes(pickle.dumps((None, function(*args))))  # tensors as bytes, not as memory of this process
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    # Peers may still read from this rank: it stays until it is killed.
    time.sleep(600)
