"""Codecs by name: what there is, what it may be asked for, and one of one's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import shoal
from shoal.codecs import Codec, Kind, from_bytes, get, names, register, registry
from shoal.codecs.truncation import TruncateCodec
from shoal.errors import CodecError
from tests.codecs.every_codec import CODECS, POOL, name_of
from tests.raising import raising


def test_the_codecs_and_their_numbers_stay_as_they_were_written_to_files() -> None:
    assert {codec.name: codec.wire_id for codec in CODECS} == {
        "dynamic_tree": 1,
        "dynamic_tree_even": 2,
        "static_tree": 3,
        "mantissa": 4,
        "linear": 5,
        "one_bit": 6,
        "truncate1": 7,
        "truncate2": 8,
        "truncate3": 9,
        "round1": 10,
        "round2": 11,
        "round3": 12,
        "bf16": 13,
        "fp16": 14,
        "sign_mask": 15,
        "pool_index": 16,
    }
    assert set(names()) == {codec.name for codec in CODECS}


def test_the_registry_is_a_public_name() -> None:
    x = torch.randn(10)
    codec = shoal.codecs.get("dynamic_tree")
    y = codec.decode(codec.encode(x))
    assert (y - x).abs().max() < 0.05 * x.abs().max()


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_its_options_make_a_codec_again(codec: Codec) -> None:
    again = get(codec.name, **codec.options)
    assert again == codec
    assert hash(again) == hash(codec)


def test_only_the_8_bit_types_have_a_table() -> None:
    with_tables = set()
    for codec in CODECS:
        try:
            assert len(codec.table().magnitudes) == 128
            with_tables.add(codec.name)
        except CodecError as error:
            assert str(error) == f"{codec.name} has no table; the 8-bit types have, such as dynamic_tree"
    assert with_tables == {"dynamic_tree", "dynamic_tree_even", "static_tree", "mantissa", "linear"}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dynamic_three", {}, "unknown codec 'dynamic_three': did you mean 'dynamic_tree'?"),
        ("zip", {}, "dynamic_tree, "),
        ("bf16", {"block": 8}, "bf16: got option 'block', expected one of: none"),
        ("linear", {"exponent_offset": 1}, "linear: got option 'exponent_offset', expected one of: block, scale"),
        ("linear", {"blocks": 1}, "expected one of: block, scale"),
        ("linear", {"block": 0}, "got block=0, expected a number of values, at least 1"),
        ("linear", {"block": 2.5}, "got block=2.5, expected a number of values"),
        ("linear", {"block": True}, "got block=True"),
        ("linear", {"scale": "max"}, "got scale='max', expected a number"),
        ("linear", {"scale": 0}, "got a scale of 0"),
        ("linear", {"scale": -1.0}, "got a scale of -1"),
        ("linear", {"scale": float("nan")}, "got a scale of nan"),
        ("linear", {"scale": float("inf")}, "got a scale of inf"),
        ("static_tree", {"exponent_offset": 40}, "got exponent_offset=40, expected a whole number from -30 to 30"),
        ("static_tree", {"exponent_offset": 1.5}, "got exponent_offset=1.5"),
        ("mantissa", {"exponent_offset": 1, "scale": 2.0}, "got both scale and exponent_offset"),
        ("pool_index", {}, "pool_index: got no input_shape, kernel, stride, padding, dilation"),
        ("pool_index", {"kernel": (2, 2)}, "pool_index: got no input_shape, stride, padding, dilation, which it needs"),
    ],
)
def test_a_mistake_says_what_was_got_and_what_is_expected(name: str, options: dict, said: str) -> None:
    with pytest.raises(CodecError) as told:
        get(name, **options)
    assert said in str(told.value)


@pytest.fixture
def own() -> Iterator[Kind]:
    codec = TruncateCodec("top_byte", 1024, 1, False)
    kind = Kind("top_byte", 1024, lambda: codec, (), lambda options: codec)
    register(kind)
    yield kind
    del registry._kinds["top_byte"]


def test_a_codec_of_ones_own_is_like_the_others(own: Kind) -> None:
    x = torch.tensor([2.0, -8.0])
    encoded = get("top_byte").encode(x)
    assert torch.equal(from_bytes(encoded.to_bytes()).decode(), x)
    assert names()[-1] == "top_byte"


def test_a_name_or_number_is_given_once(own: Kind) -> None:
    for name, number in (("top_byte", 2000), ("another", 1024), ("another", 5)):
        with raising(CodecError, name, number):
            register(Kind(name, number, own.make, (), own.read))


def test_pool_geometry_is_an_option_like_another() -> None:
    assert get("pool_index", **POOL).options == POOL
