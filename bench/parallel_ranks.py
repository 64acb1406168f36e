"""Ranks of a benchmark as processes of this machine, joined by gloo; results come back one by one, as they are made."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankFailed(RuntimeError):
    """A rank raised; its text is the traceback."""


def results(function: Callable[..., Iterator[Any]], ranks: int, *arguments: Any) -> Iterator[Any]:
    """What `function(*arguments)`, a generator, yields on rank 0 of an initialised gloo group; the others must keep up.

    Raises:
        RankFailed: a rank raised, or ended early.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, started = {}, []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            started.append(
                context.Process(target=_run, args=(function, rank, ranks, folder, theirs, arguments), daemon=True)
            )
            pipes[mine] = rank
            started[-1].start()
            theirs.close()
        try:
            left = dict(pipes)
            while left:
                for pipe in wait(list(left)):
                    try:
                        kind, value = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        raise RankFailed(f"rank {left[pipe]} ended early") from None  # type: ignore[index]
                    if kind == "failed":
                        raise RankFailed(f"rank {left[pipe]}:\n{value}")  # type: ignore[index]
                    if kind == "done":
                        del left[pipe]  # type: ignore[arg-type]
                    elif left[pipe] == 0:  # type: ignore[index]
                        yield value
        finally:
            for process in started:
                process.kill()
                process.join()


def _run(function: Any, rank: int, ranks: int, folder: str, pipe: Any, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        for result in function(*arguments):
            if rank == 0:
                pipe.send(("result", result))
        dist.barrier()
        pipe.send(("done", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
