"""The threads of a reduction: one sums the chunks that have arrived, one decodes the means.

Both exchanges of all chunks overlap with each other and with the backward pass. Chunks stay in order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from shoal.distributed.gradients.bucket_sum import Mean
from shoal.memory.limit import this_thread_works_for_steps


class Job:
    """One bucket, or a chunk of it, in one step.

    Attributes:
        mean: what is to be done.
        buffer: the whole bucket.
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
        self._encoded = torch.accelerator.current_stream(buffer.device).record_event() if on_cuda else None

    def on_stream(self, streams: dict[torch.device, Any]) -> Any:
        """What a stage runs in: on CUDA a stream of the thread, after what was encoded."""
        if self._encoded is None:
            return nullcontext()
        stream = streams.setdefault(self.buffer.device, torch.Stream(device=self.buffer.device))
        stream.wait_event(self._encoded)
        return stream


class ReductionThreads:
    """
    Args:
        failed: called with an error of any bucket.
        failure: that error, or None: after one, no stage runs.
    """

    def __init__(self, failed: Callable[[BaseException], None], failure: Callable[[], BaseException | None]) -> None:
        self._failed = failed
        self._failure = failure
        stages: tuple[tuple[str, Callable[[Job], None]], ...] = (
            ("sum", lambda job: job.mean.sum()),
            ("decode", lambda job: job.mean.decode()),
        )
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in stages]
        self._threads = [
            Thread(target=self._run, args=(number, stage), name=f"shoal-gradients-{name}", daemon=True)
            for number, (name, stage) in enumerate(stages)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        """Send a chunk on its way."""
        self._queues[0].put(job)

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, stage: Callable[[Job], None]) -> None:
        streams: dict[torch.device, Any] = {}
        done = self._finish if number + 1 == len(self._queues) else self._queues[number + 1].put
        while (job := self._queues[number].get()) is not None:
            self._stage(job, partial(stage, job), streams)
            done(job)
        if number + 1 < len(self._queues):
            self._queues[number + 1].put(None)

    def _finish(self, job: Job) -> None:
        failure = self._failure()
        if job.raises and failure is not None:
            job.future.set_exception(failure)  # type: ignore[arg-type]
        else:
            job.future.set_result(job.buffer)

    def _stage(self, job: Job, stage: Callable[[], None], streams: dict[torch.device, Any]) -> None:
        if self._failure() is not None:
            return
        this_thread_works_for_steps()
        try:
            with torch.no_grad(), job.on_stream(streams):
                stage()
                if job.buffer.device.type == "cuda":
                    torch.accelerator.current_stream(
                        job.buffer.device
                    ).synchronize()  # buffers are lent again, to other streams
        except BaseException as error:
            self._failed(error)
