"""A bucket is cut so that every value has one owner, ranks have equal work, and no segment holds two parameters.

A message holds what the codec makes of each segment only, and raw values as they are.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import networks as models
from shoal import codecs
from shoal.codecs.float_codec import FloatCodec
from shoal.distributed.comm.message import HEADER_BYTES
from shoal.distributed.comm.traffic import ring_all_reduce_bytes
from shoal.distributed.gradients.bucket_segments import (
    STEP_ELEMS,
    ParameterGrad,
    add,
    cut,
    in_chunks,
    message_bytes,
    pack,
    unpack,
)
from shoal.errors import CodecError
from tests.raising import raising

pieces_drawn = st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=8).map(
    lambda drawn: tuple(ParameterGrad(f"p{number}", elems, encoded) for number, (elems, encoded) in enumerate(drawn))
)


@given(pieces_drawn, st.integers(1, 9), st.sampled_from([64, 256, 1 << 18]))
def test_every_value_has_one_owner_within_its_parameter(
    pieces: tuple[ParameterGrad, ...], ranks: int, part_elems: int
) -> None:
    shards = cut(pieces, ranks, part_elems)
    assert len(shards) == ranks
    firsts = {}
    first = 0
    for piece in pieces:
        firsts[piece.name] = first
        first += piece.elems
    sizes = {piece.name: piece for piece in pieces}
    seen: list[int] = []
    for shard in shards:
        assert list(shard) == sorted(shard, key=lambda segment: segment.first)
        for segment in shard:
            piece = sizes[segment.name]
            assert 0 < segment.elems <= (part_elems if piece.encoded else piece.elems)
            assert 0 <= segment.start <= segment.start + segment.elems <= piece.elems
            assert segment.first == firsts[segment.name] + segment.start
            assert segment.encoded == piece.encoded
            assert not piece.encoded or segment.start % STEP_ELEMS == 0
            seen += range(segment.first, segment.first + segment.elems)
    assert sorted(seen) == list(range(first))


@given(pieces_drawn, st.integers(1, 9), st.sampled_from([64, 1 << 18]), st.integers(1, 5000))
def test_chunks_hold_all_segments_in_order_and_no_rank_is_without_one_in_a_chunk(
    pieces: tuple[ParameterGrad, ...], ranks: int, part_elems: int, chunk_elems: int
) -> None:
    shards = cut(pieces, ranks, part_elems)
    chunks = in_chunks(shards, chunk_elems)
    for rank, shard in enumerate(shards):
        assert sum((chunk[rank] for chunk in chunks), ()) == shard
    assert len(chunks) == 1 or all(segments for chunk in chunks for segments in chunk)
    assert len(chunks) <= max(1, sum(piece.elems for piece in pieces) // chunk_elems)


@given(pieces_drawn, st.integers(1, 9))
def test_ranks_have_equal_work(pieces: tuple[ParameterGrad, ...], ranks: int) -> None:
    shards = cut(pieces, ranks)
    for encoded, slack in ((True, STEP_ELEMS), (False, 0)):
        total = sum(piece.elems for piece in pieces if piece.encoded == encoded)
        for shard in shards:
            elems = sum(segment.elems for segment in shard if segment.encoded == encoded)
            assert abs(elems - total / ranks) <= slack + 1


def test_long_runs_are_cut_at_whole_blocks_of_the_default_codecs() -> None:
    (shard,) = cut([ParameterGrad("weight", 1_000_000, True)], 1)
    codec = codecs.get("dynamic_tree")
    assert len(shard) == 4
    assert message_bytes(shard, codec) == codec.payload_bytes(1_000_000)


def ddp_buckets(shapes: list[torch.Size], cap_bytes: int = 25 << 20) -> list[tuple[ParameterGrad, ...]]:
    """Cut as DDP does: in reverse order, a bucket ends with the parameter that fills it."""
    buckets: list[list[ParameterGrad]] = [[]]
    for number, shape in enumerate(reversed(shapes)):
        if 4 * sum(piece.elems for piece in buckets[-1]) >= cap_bytes:
            buckets.append([])
        buckets[-1].append(ParameterGrad(str(number), shape.numel(), len(shape) > 1))
    return [tuple(bucket) for bucket in buckets]


@pytest.mark.parametrize("name", ["resnet18", "vgg16", "alexnet", "densenet121"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
def test_a_step_sends_at_most_26_percent_of_a_ring_of_float32(name: str, ranks: int) -> None:
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in models.build(name).parameters()]
    codec = codecs.get("dynamic_tree")
    sent, raw = [0] * ranks, 0
    for bucket in ddp_buckets(shapes):
        sizes = [message_bytes(shard, codec) for shard in cut(bucket, ranks)]
        for r in range(ranks):
            sent[r] += sum(sizes) - sizes[r] + (ranks - 1) * (sizes[r] + 2 * HEADER_BYTES)
        raw += ring_all_reduce_bytes(4 * sum(piece.elems for piece in bucket), ranks)
    assert max(sent) <= 0.26 * raw


FLOAT_CODECS = [name for name in codecs.names() if name not in ("sign_mask", "pool_index")]
_pieces = st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=5)


def test_the_codecs_of_gradients_are_all_that_take_floats() -> None:
    assert all(isinstance(codecs.get(name), FloatCodec) for name in FLOAT_CODECS)
    assert len(FLOAT_CODECS) == 14


@pytest.mark.parametrize("name", FLOAT_CODECS)
@settings(max_examples=15)
@given(_pieces, st.integers(1, 4), st.data())
def test_what_is_unpacked_is_what_the_codec_gives_of_each_segment(
    name: str, drawn: list[tuple[int, bool]], ranks: int, data: st.DataObject
) -> None:
    codec = codecs.get(name)
    pieces = [ParameterGrad(str(number), elems, encoded) for number, (elems, encoded) in enumerate(drawn)]
    values = torch.randn(sum(elems for elems, _ in drawn))
    shard = data.draw(st.sampled_from(cut(pieces, ranks)))
    message = torch.full((message_bytes(shard, codec),), 255, dtype=torch.uint8)
    pack(values, shard, codec, message)
    untouched = torch.full_like(values, 7.0)
    expected = untouched.clone()
    for segment in shard:
        alone = values[segment.values]
        expected[segment.values] = codec.decode(codec.encode(alone)) if segment.encoded else alone
    got = untouched.clone()
    unpack(message, shard, codec, got)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    total = torch.full_like(values, 7.0)
    add(message, shard, codec, total)
    torch.testing.assert_close(total, torch.where(expected == 7.0, expected, expected + 7.0), rtol=0, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    codec = codecs.get("dynamic_tree")
    (shard,) = cut([ParameterGrad("weight", 100, True)], 1)
    with raising(CodecError, "message", "103", "104"):
        pack(torch.ones(100), shard, codec, torch.empty(103, dtype=torch.uint8))
    with raising(CodecError, "torch.float64", "(100,)", "float32"):
        unpack(torch.empty(104, dtype=torch.uint8), shard, codec, torch.ones(100, dtype=torch.float64))
