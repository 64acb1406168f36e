"""The reduction of each bucket of DDP: its codec, its way through the threads, and its errors.

DDP compares a hook's annotations with the types themselves, so this module does not postpone their evaluation.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import copy
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from shoal.codecs.codec import Codec
from shoal.codecs.float_codec import FloatCodec
from shoal.distributed.comm.agreement import agree, described, short_hash
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.comm.silent_ranks import lost_in
from shoal.distributed.comm.traffic import Traffic, ring_all_reduce_bytes
from shoal.distributed.gradients.bucket_segments import ParameterGrad, Segment, cut, in_chunks
from shoal.distributed.gradients.bucket_sum import Buffers, CodedBucket, ShardedMean
from shoal.distributed.gradients.choose_codec import Decision
from shoal.distributed.gradients.error_feedback import ErrorFeedback
from shoal.errors import ShoalError, TransferError
from shoal.lowlevel.torch_state import backward_pass, call_at_end_of_backward
from shoal.memory.limit import this_thread_works_for_steps

DEFAULT_BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20  # DDP's default, so that the first all-reduce starts early
Chunks = tuple[CodedBucket, ...]
# How gradients are sent: the decision, and its codec or None for a plain all-reduce of the bucket.
Decide = Callable[[tuple[ParameterGrad, ...], torch.dtype], tuple[Decision, Codec | None]]


class DdpReducer:
    """
    Args:
        group: of the model.
        names: of parameters, by `id`.
        decide: how a bucket of that many values and this dtype is sent; the same on every rank.
        feedback: residuals, or None to keep none.
        scatter, gather: used by nothing else from now on.
        traffic: what is sent is counted in.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: dict[int, str],
        decide: Decide,
        feedback: ErrorFeedback | None,
        scatter: Exchange,
        gather: Exchange,
        traffic: Traffic,
    ) -> None:
        self.decisions: dict[int, Decision] = {}
        self._group = group
        self._names = names
        self._decide = decide
        self._feedback = feedback
        self._exchanges = scatter, gather
        self._traffic = traffic
        self._ranks: int = dist.get_world_size(group)
        self._rank: int = dist.get_rank(group)
        self._buckets: dict[tuple[str, ...], tuple[Decision, Chunks | None]] = {}
        self._buffers = Buffers()
        self._lock = Lock()
        self._failure: BaseException | None = None
        self._backward = -1  # the number of the pass whose end is watched
        self._raw_bytes = self._plain_bytes = 0
        self._counted_bytes = self._sent_bytes()  # what measured and agreed is no gradients
        self._last: torch.futures.Future[torch.Tensor] | None = None  # of the bucket before
        self._threads: ReductionThreads | None = None
        self._closed = False

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The bucket's mean over the ranks: DDP's communication hook, whose state is the reducer.

        An error is raised when the backward pass ends: DDP would not report it.
        """
        buffer = bucket.buffer()
        in_backward = self._watch_backward()
        if self._failure is not None:
            return _done(buffer) if in_backward else _failed(self._failure)
        try:
            decision, chunks = self._of(bucket)
        except BaseException as error:
            self._fail(error)
            return _done(buffer) if in_backward else _failed(error)
        self.decisions[bucket.index()] = decision
        raw_bytes = ring_all_reduce_bytes(buffer.nbytes, self._ranks)
        self._raw_bytes += raw_bytes
        if chunks is None or self._closed:
            self._plain_bytes += raw_bytes
            return self._all_reduce(buffer, bucket.index())
        if self._threads is None:
            self._threads = ReductionThreads(failed=self._fail, failure=lambda: self._failure)
        try:
            for chunk in chunks:  # each leaves while the next is encoded
                job = Job(ShardedMean(chunk, buffer, self._buffers, *self._exchanges), buffer, raises=not in_backward)
                self._threads.put(job)
        except BaseException as error:
            self._fail(error)
            return _done(buffer)
        self._last = job.future  # chunks are done in order
        return job.future

    def raise_failure(self) -> None:
        """Raise what went wrong in an earlier bucket, if anything did."""
        if isinstance(self._failure, ShoalError):
            raise copy(self._failure) from self._failure
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """From now on all-reduce every bucket uncompressed."""
        self._closed = True
        if self._threads is not None:
            self._threads.close()
            self._threads = None
        for exchange in self._exchanges:
            exchange.close()

    def _of(self, bucket: GradBucket) -> tuple[Decision, Chunks | None]:
        parameters = bucket.parameters()
        names = tuple(self._names.get(id(parameter), f"parameter {id(parameter)}") for parameter in parameters)
        found = self._buckets.get(names)
        if found is None:
            gradients = tuple(map(ParameterGrad.of, names, parameters))
            found = self._planned(bucket, gradients)
            self._agree_on(bucket, gradients, found[0])
            self._buckets[names] = found
        return found

    def _agree_on(self, bucket: GradBucket, gradients: tuple[ParameterGrad, ...], decision: Decision) -> None:
        """A bucket that DDP has not filled before, at first and after it cut its buckets again."""
        if self._closed:
            return
        if self._last is not None:
            self._last.wait()  # NCCL takes messages only in one order
        self._counted_bytes += agree(
            self._exchanges[0],
            f"gradients of bucket {bucket.index()}",
            parameters=f"{len(gradients)} of {sum(gradient.elems for gradient in gradients)} values, "
            f"hash {short_hash([(gradient.name, gradient.elems) for gradient in gradients])}",
            dtype=bucket.buffer().dtype,
            codec=described(decision.codec),
        )

    def _planned(self, bucket: GradBucket, gradients: tuple[ParameterGrad, ...]) -> tuple[Decision, Chunks | None]:
        decision, codec = self._decide(gradients, bucket.buffer().dtype)
        if codec is None:
            return decision, None
        assert isinstance(codec, FloatCodec)  # compress_gradients takes no other
        shards = cut(gradients, self._ranks)
        unflushed: set[Segment] = set()
        if self._feedback is not None:
            unflushed = self._feedback.add(gradients, shards[self._rank], bucket.buffer().device)
        what = f"gradients of bucket {bucket.index()}"
        # One of another dtype is summed in a float32 copy: in one.
        parts = in_chunks(shards) if bucket.buffer().dtype == torch.float32 else (shards,)
        chunks = []
        for number, part in enumerate(parts):
            flushing = unflushed & set(part[self._rank])
            name = what if len(parts) == 1 else f"{what}, part {number + 1} of {len(parts)}"
            chunks.append(CodedBucket(name, part, codec, self._rank, self._ranks, self._feedback, flushing))
        return decision, tuple(chunks)

    def _all_reduce(self, buffer: torch.Tensor, number: int) -> torch.futures.Future[torch.Tensor]:
        """What DDP does without a hook."""

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                future.value()
            except RuntimeError as error:
                self._fail(self._lost(number, error))
            return buffer

        buffer.div_(self._ranks)
        try:
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            assert work is not None
            return work.get_future().then(done)
        except RuntimeError as error:
            self._fail(self._lost(number, error))
            return _done(buffer)

    def _lost(self, number: int, error: RuntimeError) -> TransferError:
        reason = str(error).splitlines()[0]
        message = f"gradients of bucket {number}, uncompressed: got an error of torch.distributed: {reason}"
        return lost_in(self._group, message, "see the other ranks' logs, then start all from the last checkpoint")

    def _watch_backward(self) -> bool:
        """Whether this is within a backward pass; if so, `_end` is called after DDP's own end of it."""
        number = backward_pass()
        if number is None:  # a rank that ran out of batches follows the others: DistributedDataParallel.join
            return False
        if number != self._backward:
            self._backward = number
            # DDP's end is called after what is put there now and before what is put there then.
            call_at_end_of_backward(lambda: call_at_end_of_backward(self._end))
        return True

    def _end(self) -> None:
        sent_bytes = self._sent_bytes()
        self._traffic.add("gradients", sent_bytes - self._counted_bytes + self._plain_bytes, self._raw_bytes)
        self._traffic.end_step()
        self._counted_bytes = sent_bytes
        self._raw_bytes = self._plain_bytes = 0
        self.raise_failure()

    def _sent_bytes(self) -> int:
        return sum(exchange.sent_bytes for exchange in self._exchanges)

    def _fail(self, error: BaseException) -> None:
        """Any thread: no bucket is reduced from now on, and the other ranks are notified."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
        for exchange in self._exchanges:
            exchange.give_up(str(error) or type(error).__name__)


def _future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return torch.futures.Future(devices=[buffer.device] if buffer.device.type == "cuda" else [])


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future = _future_of(buffer)
    future.set_result(buffer)
    return future


def _failed(error: BaseException) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_exception(error)  # type: ignore[arg-type]
    return future


def expected_buckets(
    parameters: Iterable[tuple[int, bool]], cap_bytes: int, first_cap_bytes: int = FIRST_BUCKET_BYTES
) -> list[tuple[int, int]]:
    """The buckets after DDP's first step, which fills them in the order in which gradients come.

    Args:
        parameters: in the order in which the model has them: how many float32 values, and whether they may be encoded.
        cap_bytes: a bucket that reaches it is full: `bucket_cap_mb` of DDP.
        first_cap_bytes: the same of the first.

    Returns:
        Of each bucket, the values that may be encoded and those that may not.

    >>> expected_buckets([(1000, True), (10, False), (3000, True)], cap_bytes=8000, first_cap_bytes=4000)
    [(3000, 0), (1000, 10)]
    """
    buckets: list[tuple[int, int]] = []
    coded = raw = 0
    for elems, encoded in reversed(list(parameters)):
        coded, raw = (coded + elems, raw) if encoded else (coded, raw + elems)
        if 4 * (coded + raw) >= (cap_bytes if buckets else first_cap_bytes):
            buckets.append((coded, raw))
            coded = raw = 0
    return [*buckets, (coded, raw)] if coded or raw else buckets


class Job:
    """One bucket, or a chunk of it, in one step.

    Attributes:
        mean: what is to be done.
        buffer: the whole bucket.
        raises: whether the future gets an error, if there was one.
        future: gets the buffer when all is done.
    """

    def __init__(self, mean: ShardedMean, buffer: torch.Tensor, raises: bool) -> None:
        self.mean = mean
        self.buffer = buffer
        self.raises = raises
        mean.encode()
        self.future = _future_of(buffer)
        on_cuda = buffer.device.type == "cuda"
        self._encoded = torch.accelerator.current_stream(buffer.device).record_event() if on_cuda else None

    def on_stream(self, streams: dict[torch.device, Any]) -> Any:
        """What a stage runs in: on CUDA a stream of the thread, after what was encoded."""
        if self._encoded is None:
            return nullcontext()
        stream = streams.setdefault(self.buffer.device, torch.Stream(device=self.buffer.device))
        stream.wait_event(self._encoded)
        return stream


class ReductionThreads:
    """The threads of a reduction: one sums the chunks that have arrived, one decodes the means.

    Both exchanges of all chunks overlap with each other and with the backward pass. Chunks stay in order.

    Args:
        failed: called with an error of any bucket.
        failure: that error, or None: after one, no stage runs.
    """

    def __init__(self, failed: Callable[[BaseException], None], failure: Callable[[], BaseException | None]) -> None:
        self._failed = failed
        self._failure = failure
        stages = ("sum", ShardedMean.sum), ("decode", ShardedMean.decode)
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

    def _run(self, number: int, stage: Callable[[ShardedMean], None]) -> None:
        streams: dict[torch.device, Any] = {}
        done = self._finish if number + 1 == len(self._queues) else self._queues[number + 1].put
        while (job := self._queues[number].get()) is not None:
            self._stage(job, stage, streams)
            done(job)
        if number + 1 < len(self._queues):
            self._queues[number + 1].put(None)

    def _finish(self, job: Job) -> None:
        failure = self._failure()
        if job.raises and failure is not None:
            job.future.set_exception(failure)  # type: ignore[arg-type]
        else:
            job.future.set_result(job.buffer)

    def _stage(self, job: Job, stage: Callable[[ShardedMean], None], streams: dict[torch.device, Any]) -> None:
        if self._failure() is not None:
            return
        this_thread_works_for_steps()
        try:
            with torch.no_grad(), job.on_stream(streams):
                stage(job.mean)
                if job.buffer.device.type == "cuda":  # buffers are lent again, to other streams
                    torch.accelerator.current_stream(job.buffer.device).synchronize()
        except BaseException as error:
            self._failed(error)
