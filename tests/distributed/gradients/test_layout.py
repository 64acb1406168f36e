"""A bucket is cut so that every value has one owner, ranks have equal work, and no segment holds two parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import codecs
from shoal.app import models
from shoal.distributed.comm.message import HEADER_BYTES
from shoal.distributed.comm.traffic import ring_all_reduce_bytes
from shoal.distributed.gradients.layout import STEP_ELEMS, Piece, cut, in_chunks
from shoal.distributed.gradients.segments import message_bytes

pieces_drawn = st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=8).map(
    lambda drawn: tuple(Piece(f"p{number}", elems, encoded) for number, (elems, encoded) in enumerate(drawn))
)


@given(pieces_drawn, st.integers(1, 9), st.sampled_from([64, 256, 1 << 18]))
def test_every_value_has_one_owner_within_its_parameter(pieces: tuple[Piece, ...], ranks: int, part_elems: int) -> None:
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
    pieces: tuple[Piece, ...], ranks: int, part_elems: int, chunk_elems: int
) -> None:
    shards = cut(pieces, ranks, part_elems)
    chunks = in_chunks(shards, chunk_elems)
    for rank, shard in enumerate(shards):
        assert sum((chunk[rank] for chunk in chunks), ()) == shard
    assert len(chunks) == 1 or all(segments for chunk in chunks for segments in chunk)
    assert len(chunks) <= max(1, sum(piece.elems for piece in pieces) // chunk_elems)


@given(pieces_drawn, st.integers(1, 9))
def test_ranks_have_equal_work(pieces: tuple[Piece, ...], ranks: int) -> None:
    shards = cut(pieces, ranks)
    for encoded, slack in ((True, STEP_ELEMS), (False, 0)):
        total = sum(piece.elems for piece in pieces if piece.encoded == encoded)
        for shard in shards:
            elems = sum(segment.elems for segment in shard if segment.encoded == encoded)
            assert abs(elems - total / ranks) <= slack + 1


def test_long_runs_are_cut_at_whole_blocks_of_the_default_codecs() -> None:
    (shard,) = cut([Piece("weight", 1_000_000, True)], 1)
    codec = codecs.get("dynamic_tree")
    assert len(shard) == 4
    assert message_bytes(shard, codec) == codec.payload_bytes(1_000_000)


def ddp_buckets(shapes: list[torch.Size], cap_bytes: int = 25 << 20) -> list[tuple[Piece, ...]]:
    """Cut as DDP does: in reverse order, a bucket ends with the parameter that fills it."""
    buckets: list[list[Piece]] = [[]]
    for number, shape in enumerate(reversed(shapes)):
        if 4 * sum(piece.elems for piece in buckets[-1]) >= cap_bytes:
            buckets.append([])
        buckets[-1].append(Piece(str(number), shape.numel(), len(shape) > 1))
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
