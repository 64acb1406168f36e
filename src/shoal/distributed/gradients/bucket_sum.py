"""The mean of one bucket of gradients over all ranks, on codes: what one rank computes between its exchanges.

Each rank sums one shard and encodes the mean for all, so that all decode the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import torch

from shoal.codecs.float_codec import FloatCodec
from shoal.distributed.comm.exchange import Exchange
from shoal.distributed.gradients.bucket_segments import (
    Segment,
    Segments,
    mean_one,
    message_bytes,
    pack,
    places,
    unpack,
)
from shoal.distributed.gradients.error_feedback import ErrorFeedback


class Buffers:
    """Lends buffers to any thread; those given back are lent again.

    The system would clear a new buffer for every message.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def take(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """(size_bytes,) uint8, with anything in it.

        >>> buffers = Buffers()
        >>> first = buffers.take(100, torch.device("cpu"))
        >>> address = first.data_ptr()
        >>> buffers.give(first)
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == address
        True
        """
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=device)
        with self._lock:
            here = [place for place, free in enumerate(self._free) if free.device == device]
            fits = [place for place in here if self._free[place].numel() >= size_bytes]
            if fits:
                whole = self._free.pop(min(fits, key=lambda place: self._free[place].numel()))
            else:
                if here:  # a larger one takes the place of the largest
                    self._free.pop(max(here, key=lambda place: self._free[place].numel()))
                whole = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            self._lent[whole.data_ptr()] = whole
            return whole[:size_bytes]

    def give(self, lent: torch.Tensor) -> None:
        """Take back what `take` lent; it is not to be used any more."""
        with self._lock:
            if lent.numel():
                self._free.append(self._lent.pop(lent.data_ptr()))


@dataclass(frozen=True)
class CodedBucket:
    """What is the same in every step.

    Attributes:
        what: it is, for errors: "gradients of bucket 3".
        shards: of each rank.
        codec: of the encoded segments.
        rank: of this process.
        ranks: how many.
        feedback: residuals, or None to keep none.
        unflushed: segments of the rank's own shard whose residuals are still to be added.
    """

    what: str
    shards: tuple[Segments, ...]
    codec: FloatCodec
    rank: int
    ranks: int
    feedback: ErrorFeedback | None = None
    unflushed: set[Segment] = field(default_factory=set)


class ShardedMean:
    """Encode, all-to-all, sum in float32, encode the mean, all-gather, decode: three stages, each in its own thread.

    The rank's own part of its shard is not encoded on the way to the sum. All ranks, the shard's owner too, take what
    the encoded mean decodes to: they hold the same bits.
    """

    def __init__(
        self, bucket: CodedBucket, buffer: torch.Tensor, buffers: Buffers, scatter: Exchange, gather: Exchange
    ) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self._values = buffer.float()  # itself, where it is float32
        self._buffers = buffers
        self._sizes = [message_bytes(shard, bucket.codec) for shard in bucket.shards]
        # All is expected at once: the peers' messages must not wait until this rank gets to it.
        own_bytes = self._sizes[bucket.rank]
        coming = [0 if r == bucket.rank else own_bytes for r in range(bucket.ranks)]
        self._received = [self._take(size_bytes) for size_bytes in coming]
        self._means = [self._take(size_bytes) for size_bytes in self._sizes]
        device = buffer.device
        self._scatter = scatter.expect(coming, what=bucket.what, out=self._received, device=device)
        what = f"mean of the {bucket.what}"
        self._gather = gather.expect(self._sizes, what=what, out=self._means, device=device)
        self._sending: list[torch.Tensor] = []

    def encode(self) -> None:
        """Send what the other ranks need of this one's gradients."""
        bucket = self._bucket
        residual_of = None if bucket.feedback is None else bucket.feedback.of_gradient
        for r, shard in enumerate(bucket.shards):
            part = self._take(0 if r == bucket.rank else self._sizes[r])
            self._sending.append(part)
            if r != bucket.rank:
                pack(self._values, shard, bucket.codec, part, residual_of)
        self._scatter.send(self._sending)

    def sum(self) -> None:
        """The mean of what this rank sums, when it is complete; send what the other ranks need of it."""
        bucket, values = self._bucket, self._values
        self._scatter.receive()
        self._give(self._sending)
        own = bucket.shards[bucket.rank]
        if bucket.feedback is not None:
            bucket.feedback.flush(values, bucket.unflushed)
        others = [message for r, message in enumerate(self._received) if r != bucket.rank]
        mean = self._means[bucket.rank]
        # One segment after the other, while its values are in the caches.
        for segment, place in zip(own, places(own, bucket.codec), strict=True):
            theirs = [message[place] for message in others]
            residual = None if bucket.feedback is None else bucket.feedback.of_mean(segment, values.device)
            mean_one(values[segment.values], theirs, segment, bucket.codec, bucket.ranks, mean[place], residual)
        self._give(self._received)
        self._gather.send([mean] * bucket.ranks)

    def decode(self) -> None:
        """The mean in the bucket, when it is complete."""
        bucket, values = self._bucket, self._values
        self._gather.receive()
        for r, (shard, message) in enumerate(zip(bucket.shards, self._means, strict=True)):
            if r != bucket.rank:
                unpack(message, shard, bucket.codec, values)
        self._give(self._means)
        if values is not self._buffer:
            self._buffer.copy_(values)

    def _take(self, size_bytes: int) -> torch.Tensor:
        return self._buffers.take(size_bytes, self._buffer.device)

    def _give(self, lent: list[torch.Tensor]) -> None:
        for buffer in lent:
            self._buffers.give(buffer)
        lent.clear()
