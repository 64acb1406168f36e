"""Buckets on their way: one thread for the first exchange, one for the second, in the order they became ready.

While one bucket's mean is gathered, the next one's gradients are under way, and the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from shoal.distributed.bucket_sum import Mean
from shoal.distributed.exchange import Exchange


class Job:
    """One bucket in one step.

    Attributes:
        mean: what is to be done.
        buffer: the bucket.
        raises: whether the future gets an error, if there was one.
        future: gets the buffer when all is done.
    """

    def __init__(self, mean: Mean, buffer: torch.Tensor, raises: bool) -> None:
        self.mean = mean
        self.buffer = buffer
        self.raises = raises
        mean.encode()
        on_cuda = buffer.device.type == "cuda"
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if on_cuda else []
        )
        self._encoded = torch.cuda.current_stream(buffer.device).record_event() if on_cuda else None

    def on_stream(self, streams: dict[torch.device, Any]) -> Any:
        """What a stage runs in: on CUDA a stream of the thread, after what was encoded."""
        if self._encoded is None:
            return nullcontext()
        stream = streams.setdefault(self.buffer.device, torch.cuda.Stream(self.buffer.device))
        stream.wait_event(self._encoded)
        return torch.cuda.stream(stream)


class ReductionThreads:
    """
    Args:
        scatter, gather: each used by one thread alone.
        failed: called with an error of any bucket.
        failure: that error, or None: after one, no stage runs.
    """

    def __init__(
        self,
        scatter: Exchange,
        gather: Exchange,
        failed: Callable[[BaseException], None],
        failure: Callable[[], BaseException | None],
    ) -> None:
        self._failed = failed
        self._failure = failure
        self._scattering: SimpleQueue[Job | None] = SimpleQueue()
        self._gathering: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run_scatter, args=(scatter,), name="shoal-gradients-scatter", daemon=True),
            Thread(target=self._run_gather, args=(gather,), name="shoal-gradients-gather", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Send a bucket on its way."""
        self._scattering.put(job)

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        self._scattering.put(None)
        for thread in self._threads:
            thread.join()

    def _run_scatter(self, exchange: Exchange) -> None:
        streams: dict[torch.device, Any] = {}
        while (job := self._scattering.get()) is not None:
            self._stage(job, job.mean.scatter, exchange, streams)
            self._gathering.put(job)
        self._gathering.put(None)

    def _run_gather(self, exchange: Exchange) -> None:
        streams: dict[torch.device, Any] = {}
        while (job := self._gathering.get()) is not None:
            self._stage(job, job.mean.gather, exchange, streams)
            failure = self._failure()
            if job.raises and failure is not None:
                job.future.set_exception(failure)  # type: ignore[arg-type]
            else:
                job.future.set_result(job.buffer)

    def _stage(
        self, job: Job, stage: Callable[[Exchange], None], exchange: Exchange, streams: dict[torch.device, Any]
    ) -> None:
        if self._failure() is not None:
            return
        try:
            with torch.no_grad(), job.on_stream(streams):
                stage(exchange)
                if job.buffer.device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # buffers are lent again, to other streams
        except BaseException as error:
            self._failed(error)
