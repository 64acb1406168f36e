"""How a bucket of gradients is cut into segments, and the bytes of a message that holds some of them.

Each rank sums one shard of the bucket: a run of segments. A message holds each encoded segment's payload, scales
inline, and raw values as they are. Every segment begins at a multiple of four bytes, so that scales and raw values are
read where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

from shoal.codecs.checks import check_flat, check_length
from shoal.codecs.codec import Codec, Encoded
from shoal.codecs.float_codec import FloatCodec

_FLOAT_BYTES = 4
_FIRST_VALUES = 64
STEP_ELEMS = 64  # shards begin at a multiple of that many values of their parameter
# Long runs of values are encoded in parts of that many, whose scratch stays in the caches; whole blocks of any codec.
PART_ELEMS = 1 << 18
# An exchange takes 1.6 ms of a CPU on gloo. At 1 Gbit/s chunks of 2**20 make ResNet-18's steps 2 % shorter, but one in
# ten 200 ms longer, and 1.9 * 2**20 no shorter.
CHUNK_ELEMS = 3 << 20


@dataclass(frozen=True)
class ParameterGrad:
    """A parameter's values in a bucket.

    Attributes:
        name: of the parameter.
        elems: how many values; they follow those of the gradient before.
        encoded: whether they may be sent encoded.
    """

    name: str
    elems: int
    encoded: bool

    def of_all(self, ranks: int) -> ParameterGrad:
        """The whole, of which this is one rank's equal share."""
        return replace(self, elems=ranks * self.elems)

    @staticmethod
    def of(name: str, parameter: torch.Tensor) -> ParameterGrad:
        """All of a parameter's: those of two dimensions or more may be encoded."""
        return ParameterGrad(name, parameter.numel(), encoded=parameter.dim() > 1)


@dataclass(frozen=True)
class Segment:
    """Neighbouring values of one parameter that are sent together: a codec's blocks begin again in each segment.

    Attributes:
        name: of the parameter.
        start: the first value, counted in the parameter.
        first: the same, counted in the bucket.
        elems: how many.
        encoded: whether they are sent encoded, else raw.
    """

    name: str
    start: int
    first: int
    elems: int
    encoded: bool

    @property
    def values(self) -> slice:
        """Where they lie in the bucket.

        >>> Segment("weight", 0, 64, 100, True).values
        slice(64, 164, None)
        """
        return slice(self.first, self.first + self.elems)


Segments = tuple[Segment, ...]


def cut(
    gradients: Sequence[ParameterGrad], ranks: int, part_elems: int = PART_ELEMS
) -> tuple[tuple[Segment, ...], ...]:
    """The shard of each rank: its segments, in the order of the bucket.

    Encoded values and raw ones are each cut into `ranks` runs of equal length, up to STEP_ELEMS for the encoded ones,
    so that every rank encodes, sums, sends and receives the same. No segment holds values of two parameters.

    >>> a, b = cut([ParameterGrad("weight", 1000, True), ParameterGrad("bias", 3, False)], 2)
    >>> a  # doctest: +NORMALIZE_WHITESPACE
    (Segment(name='weight', start=0, first=0, elems=512, encoded=True),
     Segment(name='bias', start=0, first=1000, elems=1, encoded=False))
    >>> b  # doctest: +NORMALIZE_WHITESPACE
    (Segment(name='weight', start=512, first=512, elems=488, encoded=True),
     Segment(name='bias', start=1, first=1001, elems=2, encoded=False))
    """
    shards: list[list[Segment]] = [[] for _ in range(ranks)]
    for encoded, step in ((True, STEP_ELEMS), (False, 1)):
        total = sum(gradient.elems for gradient in gradients if gradient.encoded == encoded)
        before = first = 0  # values of this kind; values of both
        for gradient in gradients:
            if gradient.encoded == encoded:
                # A bound belongs to the parameter it falls into, at the nearest step of it.
                bounds = [_bound(rank * total // ranks - before, gradient.elems, step) for rank in range(ranks + 1)]
                for shard, (low, high) in zip(shards, pairwise(bounds), strict=True):
                    shard += parts_of(gradient, low, high, first + low, part_elems)
                before += gradient.elems
            first += gradient.elems
    return tuple(tuple(sorted(shard, key=lambda segment: segment.first)) for shard in shards)


def parts_of(
    gradient: ParameterGrad, low: int, high: int, first: int, part_elems: int = PART_ELEMS
) -> Iterator[Segment]:
    """Values of a gradient, from `low` to `high`, as segments: encoded ones in parts, raw ones in one.

    Args:
        gradient: whose.
        low, high: counted in the parameter.
        first: where the first of them lies in what is sent.
        part_elems: of an encoded part.
    """
    size = part_elems if gradient.encoded else max(high - low, 1)
    for start in range(low, high, size):
        yield Segment(gradient.name, start, first + start - low, min(size, high - start), gradient.encoded)


def in_chunks(
    shards: Sequence[tuple[Segment, ...]], chunk_elems: int = CHUNK_ELEMS
) -> tuple[tuple[tuple[Segment, ...], ...], ...]:
    """The shards in runs of whole segments, of about `chunk_elems` values over all ranks: one message each.

    While one chunk is on the link the next is encoded and the one before decoded. Segments stay as they are, so the
    bits do not depend on the chunks.

    Returns:
        Of each chunk, each rank's segments.

    >>> shards = cut([ParameterGrad("weight", 1000, True)], 2, part_elems=128)
    >>> [[len(segments) for segments in chunk] for chunk in in_chunks(shards, 500)]
    [[2, 2], [2, 2]]
    """
    total = sum(segment.elems for shard in shards for segment in shard)
    count = max(1, min(total // chunk_elems, *(len(shard) for shard in shards)))
    bounds = [[round(chunk * len(shard) / count) for chunk in range(count + 1)] for shard in shards]
    return tuple(
        tuple(shard[at[chunk] : at[chunk + 1]] for shard, at in zip(shards, bounds, strict=True))
        for chunk in range(count)
    )


def _bound(wanted: int, elems: int, step: int) -> int:
    """The place in a gradient of `elems` values nearest to a wanted one, that is a multiple of `step` or its end."""
    if wanted <= 0 or wanted >= elems:
        return min(max(wanted, 0), elems)
    return min((wanted + step // 2) // step * step, elems)


def message_bytes(segments: Segments, codec: Codec) -> int:
    """How long the message of these segments is, exactly.

    >>> from shoal.codecs import get
    >>> message_bytes((Segment("a", 0, 0, 5001, True), Segment("b", 0, 5001, 10, False)), get("dynamic_tree"))
    5052
    """
    return places(segments, codec)[-1].stop if segments else 0


@lru_cache(maxsize=1024)
def places(segments: Segments, codec: Codec) -> tuple[slice, ...]:
    """Where each segment lies in the message, with what fills it up to a multiple of four bytes."""
    found = []
    at = 0
    for segment in segments:
        size = codec.payload_bytes(segment.elems) if segment.encoded else _FLOAT_BYTES * segment.elems
        size += -size % _FLOAT_BYTES
        found.append(slice(at, at + size))
        at += size
    return tuple(found)


def pack(
    values: torch.Tensor,
    segments: Segments,
    codec: Codec,
    out: torch.Tensor,
    residual_of: Callable[[Segment], torch.Tensor | None] | None = None,
) -> None:
    """Write the message of these segments.

    Args:
        values: (n,) float32, dense: what the segments count in.
        segments: of it.
        codec: of floats.
        out: (message_bytes(segments, codec),) uint8, dense, at a multiple of four bytes; written.
        residual_of: the residual of each segment, as `pack_one` takes it; None: there are none.

    Raises:
        CodecError: `values` or `out` is not so.

    >>> from shoal.codecs import get
    >>> out = torch.empty(8, dtype=torch.uint8)
    >>> segments = Segment("a", 0, 0, 2, True), Segment("b", 0, 2, 1, False)
    >>> pack(torch.tensor([0.5, -1.0, 3.0]), segments, get("bf16"), out)
    >>> out.tolist()
    [0, 63, 128, 191, 0, 0, 64, 64]
    """
    _check(values, segments, codec, out)
    for segment, place in zip(segments, places(segments, codec), strict=True):
        residual = None if residual_of is None else residual_of(segment)
        pack_one(values[segment.values], segment, codec, out[place], residual)


def pack_one(
    values: torch.Tensor, segment: Segment, codec: Codec, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """Write one segment's bytes from its own values.

    Args:
        values: (n,) float32, dense.
        segment: of n values.
        codec: of floats.
        out: written.
        residual: (n,) float32: added to the values, then overwritten with what their encoding loses. Values that are
            zero throughout are sent as zero and leave it as it is.
    """
    if residual is not None and any_nonzero(values):
        residual.add_(values)
        pack_one(residual, segment, codec, out)
        decoded = torch.empty_like(residual)
        unpack_one(out, segment, codec, decoded)
        # A NaN or an infinity was sent as such; in the residual it would spoil every later step.
        residual.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)
        return
    if not segment.encoded:
        out.view(torch.float32).copy_(values)
        return
    size = codec.payload_bytes(segment.elems)
    codec.encode(values, out=out[:size])
    if size < out.numel():
        out[size:] = 0


def unpack(message: torch.Tensor, segments: Segments, codec: Codec, into: torch.Tensor) -> None:
    """The inverse of `pack`: write the values of these segments to where they lie in `into`, (n,) float32."""
    _check(into, segments, codec, message)
    for segment, place in zip(segments, places(segments, codec), strict=True):
        unpack_one(message[place], segment, codec, into[segment.values])


def unpack_one(data: torch.Tensor, segment: Segment, codec: Codec, into: torch.Tensor) -> None:
    """Write one segment's values from its bytes."""
    if not segment.encoded:
        into.copy_(data.view(torch.float32))
        return
    payload = data[: codec.payload_bytes(segment.elems)]
    codec.decode(Encoded(codec, torch.float32, (segment.elems,), (1,), payload), out=into)


def add(message: torch.Tensor, segments: Segments, codec: Codec, into: torch.Tensor) -> None:
    """Add the values of these segments, in float32, to what lies in `into`."""
    _check(into, segments, codec, message)
    longest = max((segment.elems for segment in segments), default=0)
    decoded = torch.empty(longest, device=into.device)
    for segment, place in zip(segments, places(segments, codec), strict=True):
        unpack_one(message[place], segment, codec, decoded[: segment.elems])
        into[segment.values].add_(decoded[: segment.elems])


def any_nonzero(values: torch.Tensor) -> bool:
    """Whether one is not zero; the first ones mostly decide."""
    return bool(values[:_FIRST_VALUES].any()) or bool(values.any())


def mean_one(
    values: torch.Tensor,
    theirs: Sequence[torch.Tensor],
    segment: Segment,
    codec: FloatCodec,
    ranks: int,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """The mean of one segment's own values and of the others' bytes: as bytes, and decoded in the values' place."""
    if segment.encoded and residual is None:
        size = codec.payload_bytes(segment.elems)
        codec.mean(values, [data[:size] for data in theirs], ranks, out[:size])
        if size < out.numel():
            out[size:] = 0
        return
    came = torch.empty_like(values)
    for data in theirs:
        unpack_one(data, segment, codec, came)
        values.add_(came)
    pack_one(values.div_(ranks), segment, codec, out, residual)
    if segment.encoded:
        unpack_one(out, segment, codec, values)


def _check(values: torch.Tensor, segments: Segments, codec: Codec, message: torch.Tensor) -> None:
    check_flat("values", values, torch.float32)
    check_flat("message", message, torch.uint8)
    check_length("message", message, message_bytes(segments, codec))
