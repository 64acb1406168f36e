"""The mean of one bucket of gradients over all ranks, on codes: what one rank computes between its exchanges.

`ShardedMean`: each rank sums one shard and encodes the mean for all, so that all decode the same bytes.
`LocalExactMean`: 8 bits for what arrives, 32 for the local part, the data parallelism of Dettmers 2016.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from shoal.codecs.codec import Codec
from shoal.distributed.buffers import Buffers
from shoal.distributed.exchange import Exchange
from shoal.distributed.feedback import Feedback
from shoal.distributed.layout import Segment
from shoal.distributed.segments import Segments, add, message_bytes, pack, unpack


@dataclass(frozen=True)
class CodedBucket:
    """What is the same in every step.

    Attributes:
        what: it is, for errors: "gradients of bucket 3".
        shards: of each rank; of `LocalExactMean`, one for all.
        codec: of the encoded segments.
        rank: of this process.
        ranks: how many.
        feedback: what is owed, or None to owe nothing.
        unsettled: what is owed of the rank's own shard, to be added once.
    """

    what: str
    shards: tuple[Segments, ...]
    codec: Codec
    rank: int
    ranks: int
    feedback: Feedback | None = None
    unsettled: set[Segment] = field(default_factory=set)


class Mean(Protocol):
    """The stages of one bucket's mean, in this order, each in a thread of its own."""

    def encode(self) -> None:
        """What the other ranks need of this one's gradients."""

    def scatter(self, exchange: Exchange) -> None:
        """The first exchange."""

    def sum(self) -> None:
        """The mean of what this rank sums, and what the other ranks need of it."""

    def gather(self, exchange: Exchange) -> None:
        """The second exchange."""

    def decode(self) -> None:
        """The mean in the bucket."""


class ShardedMean:
    """Encode, all-to-all, sum in float32, encode the mean, all-gather, decode.

    The rank's own part of its shard is not encoded on the way to the sum. All ranks, the shard's owner too, take what
    the encoded mean decodes to: they hold the same bits.
    """

    def __init__(self, bucket: CodedBucket, buffer: torch.Tensor, buffers: Buffers) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self._values = buffer.float()  # itself, where it is float32
        self._buffers = buffers
        self._sizes = [message_bytes(shard, bucket.codec) for shard in bucket.shards]
        self._sending: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []
        self._means: list[torch.Tensor] = []

    def encode(self) -> None:
        bucket = self._bucket
        for r, shard in enumerate(bucket.shards):
            part = self._take(0 if r == bucket.rank else self._sizes[r])
            self._sending.append(part)
            if r != bucket.rank and bucket.feedback is not None:
                bucket.feedback.pack_gradients(self._values, shard, bucket.codec, part)
            elif r != bucket.rank:
                pack(self._values, shard, bucket.codec, part)

    def scatter(self, exchange: Exchange) -> None:
        rank = self._bucket.rank
        sizes = [0 if r == rank else self._sizes[rank] for r in range(self._bucket.ranks)]
        self._received = [self._take(size) for size in sizes]
        exchange.all_to_all(self._sending, sizes, what=self._bucket.what, out=self._received)
        self._give(self._sending)

    def sum(self) -> None:
        bucket, values = self._bucket, self._values
        own = bucket.shards[bucket.rank]
        if bucket.feedback is not None:
            bucket.feedback.settle(values, bucket.unsettled)
        for r, message in enumerate(self._received):
            if r != bucket.rank:
                add(message, own, bucket.codec, values)
        self._give(self._received)
        for segment in own:
            values[segment.values].div_(bucket.ranks)
        means = self._means = [self._take(size) for size in self._sizes]
        if bucket.feedback is not None:
            bucket.feedback.pack_means(values, own, bucket.codec, means[bucket.rank])
        else:
            pack(values, own, bucket.codec, means[bucket.rank])

    def gather(self, exchange: Exchange) -> None:
        own = self._means[self._bucket.rank]
        exchange.all_gather(own, self._sizes, what=f"mean of the {self._bucket.what}", out=self._means)

    def decode(self) -> None:
        values = self._values
        for shard, message in zip(self._bucket.shards, self._means, strict=True):
            unpack(message, shard, self._bucket.codec, values)
        self._give(self._means)
        if values is not self._buffer:
            self._buffer.copy_(values)

    def _take(self, size_bytes: int) -> torch.Tensor:
        return self._buffers.take(size_bytes, self._buffer.device)

    def _give(self, lent: list[torch.Tensor]) -> None:
        for buffer in lent:
            self._buffers.give(buffer)
        lent.clear()


class LocalExactMean:
    """Every rank sends all of its encoded gradients to every other and adds its own as they are.

    A rank takes its own gradients exactly and the others' rounded: ranks get different means, up to the codec's error.
    """

    def __init__(self, bucket: CodedBucket, buffer: torch.Tensor, buffers: Buffers) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self._values = buffer.float()
        self._buffers = buffers
        self._segments = bucket.shards[0]
        self._messages = [
            buffers.take(message_bytes(self._segments, bucket.codec), buffer.device) for _ in range(bucket.ranks)
        ]

    def encode(self) -> None:
        bucket, message = self._bucket, self._messages[self._bucket.rank]
        if bucket.feedback is not None:
            bucket.feedback.pack_gradients(self._values, self._segments, bucket.codec, message)
        else:
            pack(self._values, self._segments, bucket.codec, message)

    def scatter(self, exchange: Exchange) -> None:
        return

    def sum(self) -> None:
        return

    def gather(self, exchange: Exchange) -> None:
        bucket = self._bucket
        sizes = [message.numel() for message in self._messages]
        exchange.all_gather(self._messages[bucket.rank], sizes, what=bucket.what, out=self._messages)

    def decode(self) -> None:
        bucket, values = self._bucket, self._values
        own = values.clone()
        values.zero_()
        # In the order of ranks, so that what travels raw has the same mean everywhere.
        for r, message in enumerate(self._messages):
            if r == bucket.rank:
                values.add_(own)
            else:
                add(message, self._segments, bucket.codec, values)
            self._buffers.give(message)
        values.div_(bucket.ranks)
        if values is not self._buffer:
            self._buffer.copy_(values)
