"""A message holds what the codec makes of each segment alone, and raw values as they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import codecs
from shoal.codecs.float_codec import FloatCodec
from shoal.distributed.gradients.layout import Piece, cut
from shoal.distributed.gradients.segments import add, message_bytes, pack, unpack
from shoal.errors import CodecError

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
    pieces = [Piece(str(number), elems, encoded) for number, (elems, encoded) in enumerate(drawn)]
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
    (shard,) = cut([Piece("weight", 100, True)], 1)
    with pytest.raises(CodecError, match="got a message of 103 torch.uint8, expected 104 bytes"):
        pack(torch.ones(100), shard, codec, torch.empty(103, dtype=torch.uint8))
    with pytest.raises(CodecError, match=r"got torch.float64 of shape \(100,\), expected dense float32"):
        unpack(torch.empty(104, dtype=torch.uint8), shard, codec, torch.ones(100, dtype=torch.float64))
