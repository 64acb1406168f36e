"""The bytes of some segments of a flat tensor: each encoded segment's payload, scales inline, and raw ones as they are.

Every segment begins at a multiple of four bytes, so that scales and raw values are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from shoal.codecs.codec import Codec, Encoded
from shoal.codecs.float_codec import FloatCodec
from shoal.distributed.gradients.layout import Segment
from shoal.errors import CodecError

_FLOAT_BYTES = 4
Segments = tuple[Segment, ...]


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


def pack(values: torch.Tensor, segments: Segments, codec: Codec, out: torch.Tensor) -> None:
    """Write the message of these segments.

    Args:
        values: (n,) float32, dense: what the segments count in.
        segments: of it.
        codec: of floats.
        out: (message_bytes(segments, codec),) uint8, dense, at a multiple of four bytes; written.

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
        pack_one(values[segment.values], segment, codec, out[place])


def pack_one(values: torch.Tensor, segment: Segment, codec: Codec, out: torch.Tensor) -> None:
    """Write one segment's bytes from its own values."""
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
    came = torch.empty(longest, device=into.device)
    for segment, place in zip(segments, places(segments, codec), strict=True):
        unpack_one(message[place], segment, codec, came[: segment.elems])
        into[segment.values].add_(came[: segment.elems])


def mean_one(
    values: torch.Tensor,
    theirs: Sequence[torch.Tensor],
    segment: Segment,
    codec: FloatCodec,
    ranks: int,
    out: torch.Tensor,
) -> None:
    """The mean of one segment's own values and of the others' bytes: as bytes, and decoded in the values' place."""
    if segment.encoded:
        size = codec.payload_bytes(segment.elems)
        codec.mean(values, [data[:size] for data in theirs], ranks, out[:size])
        if size < out.numel():
            out[size:] = 0
        return
    for data in theirs:
        values.add_(data.view(torch.float32))
    pack_one(values.div_(ranks), segment, codec, out)


def _check(values: torch.Tensor, segments: Segments, codec: Codec, message: torch.Tensor) -> None:
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        got = f"{values.dtype} of shape {tuple(values.shape)}"
        raise CodecError(f"got {got}, expected dense float32 of one dimension; flatten it")
    expected = message_bytes(segments, codec)
    if message.dtype != torch.uint8 or message.numel() != expected:
        got = f"{message.numel()} {message.dtype}"
        raise CodecError(f"got a message of {got}, expected {expected} bytes of uint8; ask message_bytes")
