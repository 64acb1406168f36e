"""Pool indices with a header: lossless, and nothing that is not an index of this pooling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from shoal import codecs
from shoal.codecs import pool_index
from shoal.errors import CodecError
from tests.pools import Pool, pools
from tests.raising import raising

GEOMETRY = {"input_shape": (2, 3, 8, 8), "kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}


def codec_of(pool: Pool) -> codecs.Codec:
    kernel, stride, padding, dilation = pool.window
    return codecs.get(
        "pool_index", input_shape=pool.x.shape, kernel=kernel, stride=stride, padding=padding, dilation=dilation
    )


@given(pools())
def test_indices_come_back_from_a_byte_each_and_from_a_file(pool: Pool) -> None:
    codec = codec_of(pool)
    encoded = codec.encode(pool.indices)
    assert encoded.nbytes == codec.bytes_for(pool.indices.shape) == pool.indices.numel()
    for decoded in (encoded.decode(), codecs.from_bytes(encoded.to_bytes()).decode()):
        assert torch.equal(decoded, pool.indices)
        assert decoded.dtype == torch.int64
    assert encoded.decode().stride() == pool.indices.stride()


@given(pools())
def test_the_payload_is_what_the_step_rewrites_save(pool: Pool) -> None:
    codes = pool_index.encode(pool.indices, pool.x.shape, *pool.window)
    assert torch.equal(codec_of(pool).encode(pool.indices).payload, codes.as_strided((codes.numel(),), (1,)))


def test_the_same_geometry_is_the_same_codec_whatever_holds_it() -> None:
    assert codecs.get("pool_index", **GEOMETRY) == codecs.get(
        "pool_index", **{option: list(sizes) for option, sizes in GEOMETRY.items()}
    )


def test_an_index_of_another_pooling_is_refused() -> None:
    _, indices = torch.nn.functional.max_pool2d(torch.randn(2, 3, 8, 8), 2, return_indices=True)
    codec = codecs.get("pool_index", **GEOMETRY)
    with pytest.raises(CodecError):
        codec.encode(indices + 30)
    with raising(CodecError, "(2, 3, 5, 4)", "(2, 3, 8, 8)"):
        codec.encode(torch.zeros(2, 3, 5, 4, dtype=torch.int64))
    with raising(CodecError, "(3, 4, 4)"):
        codec.encode(indices[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernel": (16, 16)}, "at most 255 places"),
        ({"kernel": ()}, "input_shape="),
        ({"stride": (0, 1)}, "stride=(0, 1), expected 2 whole numbers from 1 on"),
        ({"stride": (1,)}, "stride=(1,)"),
        ({"padding": (-1, 0)}, "padding=(-1, 0)"),
        ({"dilation": (1.5, 1)}, "dilation=(1.5, 1)"),
        ({"input_shape": (2, 3, 8)}, "input_shape=(2, 3, 8), expected 4"),
        ({"input_shape": (2, 3, 0, 8)}, "expected images of 1"),
        ({"input_shape": (2, 3, 2**31 - 1, 2**31 - 1)}, "expected images of 1"),
    ],
)
def test_a_geometry_that_is_none_is_refused(change: dict, said: str) -> None:
    with pytest.raises(CodecError) as told:
        codecs.get("pool_index", **(GEOMETRY | change))
    assert said in str(told.value)
