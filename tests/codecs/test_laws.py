"""Every codec keeps what its sheet says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codecs import Codec, Encoded, get
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.one_bit import OneBitCodec
from shoal.codecs.table_codec import TableCodec
from shoal.errors import CodecError
from tests.codecs.every_codec import CODECS, FLOAT_CODECS, TABLE_CODECS, name_of

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-1e6, 1e6, width=32).map(lambda value: value if abs(value) > 1e-6 else 0.0)
VALUES = st.lists(MODERATE, min_size=1, max_size=40)
every_float_codec = pytest.mark.parametrize("codec", FLOAT_CODECS, ids=name_of)
every_table_codec = pytest.mark.parametrize("codec", TABLE_CODECS, ids=name_of)
every_codec_of_values = pytest.mark.parametrize("codec", [c for c in CODECS if c.name != "pool_index"], ids=name_of)
few = settings(max_examples=20)


def round_trip(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x))


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).flatten().tolist()


def blocks(codec: Codec, elems: int) -> list[slice]:
    size = getattr(codec, "block", None) or max(elems, 1)
    return [slice(first, first + size) for first in range(0, elems, size)]


@every_float_codec
@few
@given(values=VALUES)
def test_zero_decodes_to_zero(codec: FloatCodec, values: list[float]) -> None:
    x = torch.tensor([0.0, *values, -0.0])
    decoded = round_trip(codec, x)
    assert codec.properties.zero == (not isinstance(codec, OneBitCodec))
    if codec.properties.zero:
        assert (decoded[x == 0] == 0).all()
        assert not round_trip(codec, torch.zeros(9)).any()


@every_float_codec
@few
@given(values=VALUES)
def test_the_negative_decodes_to_the_negative(codec: FloatCodec, values: list[float]) -> None:
    assert codec.properties.odd == (not isinstance(codec, OneBitCodec))
    if codec.properties.odd:
        x = torch.tensor(values)
        assert bits(round_trip(codec, -x)) == bits(-round_trip(codec, x))


@every_float_codec
@few
@given(values=VALUES)
def test_the_greater_never_decodes_to_less(codec: FloatCodec, values: list[float]) -> None:
    assert codec.properties.monotone
    x = torch.tensor(values)
    decoded = round_trip(codec, x)
    for block in blocks(codec, len(values)):
        order = x[block].argsort()
        assert (decoded[block][order][1:] >= decoded[block][order][:-1]).all()


@every_float_codec
@few
@given(values=VALUES)
def test_encoding_what_was_decoded_changes_nothing(codec: FloatCodec, values: list[float]) -> None:
    if codec.properties.idempotent:
        encoded = codec.encode(torch.tensor(values))
        again = codec.encode(encoded.decode())
        assert again.payload.tolist() == encoded.payload.tolist()


def test_which_do_not_promise_that() -> None:
    without = {codec.name for codec in FLOAT_CODECS if not codec.properties.idempotent}
    assert without == {"dynamic_tree", "dynamic_tree_even", "static_tree"}


@every_float_codec
@few
@given(values=st.lists(FINITE, min_size=1, max_size=40))
def test_no_error_passes_its_bound(codec: FloatCodec, values: list[float]) -> None:
    x = torch.tensor(values)
    bound = codec.error_bound(x)
    assert not bound.isnan().any()
    error = (round_trip(codec, x).double() - x.double()).abs()
    # Where the bound is infinite, so may the error be, or NaN.
    assert ((error <= bound) | bound.isinf()).all(), (error / bound).max()


@every_float_codec
def test_no_error_passes_the_shares_of_the_sheet_and_some_reach_them(codec: FloatCodec) -> None:
    sheet = codec.properties
    scale = getattr(codec, "fixed_scale", None) or 1.0
    x = torch.linspace(-scale, scale, 400_001)
    if isinstance(codec, (TableCodec, OneBitCodec)):  # one block, whatever its size: a scale of its own would be exact
        codec = replace(codec, block=None)
    error = (round_trip(codec, x).double() - x.double()).abs()
    assert error.max() <= sheet.absolute_error * scale
    large = x.abs() >= scale / 10
    shares = (error / x.abs())[large]
    if sheet.relative_error is not None:
        assert shares.max() <= sheet.relative_error
        assert shares.max() >= 0.95 * sheet.relative_error
    if isinstance(codec, TableCodec):
        assert error.max() >= 0.99 * sheet.absolute_error * scale


@every_float_codec
@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_mean_has_the_bits_of_its_steps(codec: FloatCodec, others: int) -> None:
    draw = torch.Generator().manual_seed(others)
    own = torch.randn(9001, generator=draw)
    payloads = [codec.encode(torch.randn(9001, generator=draw)).payload for _ in range(others)]
    expected, encoded, out = own.clone(), *torch.empty(2, codec.payload_bytes(9001), dtype=torch.uint8)
    FloatCodec.mean(codec, expected, payloads, others + 1, encoded)
    assert codec.mean(own, payloads, others + 1, out) is own
    assert bits(own) == bits(expected) and torch.equal(out, encoded)
    assert bits(own) == bits(codec.decode(codec._encoded(own, out)))
    with pytest.raises(CodecError):
        codec.mean(own, [torch.empty(7, dtype=torch.uint8)], 2, out)


@every_table_codec
@pytest.mark.parametrize("exponent", [-60, 0, 60])
def test_every_code_of_an_8_bit_type_comes_back(codec: TableCodec, exponent: int) -> None:
    fixed = replace(codec, block=None, scale=1.5 * 2.0**exponent, exponent_offset=None)
    payload = fixed.encode(torch.zeros(256)).payload.clone()
    payload[4:] = torch.arange(256)
    decoded = fixed.decode(Encoded(fixed, torch.float32, (256,), (1,), payload))
    assert len(set(bits(decoded))) == 256
    assert fixed.encode(decoded).payload[4:].tolist() == list(range(256))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_every_code_of_a_cast_comes_back(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    codec, numbers = get(name), every[every.view(dtype).isfinite()]
    payload = numbers.view(torch.uint8)
    decoded = codec.decode(Encoded(codec, torch.float32, (len(numbers),), (1,), payload))
    assert torch.equal(codec.encode(decoded).payload, payload)


@few
@given(bits=st.lists(st.booleans(), min_size=2, max_size=40), means=st.tuples(FINITE, FINITE).map(sorted))
def test_every_pattern_of_one_bit_comes_back_with_its_means(bits: list[bool], means: list[float]) -> None:
    negative, other = -abs(means[0]) - 1, abs(means[1])
    bits = [True, False, *bits]  # a side of no values has a mean of 0
    x = torch.tensor([negative if bit else other for bit in bits])
    encoded = get("one_bit", block=None).encode(x)
    assert torch.equal(encoded.decode(), x)


# What becomes of a NaN, by the properties of the codec: of it, and of the rest of its block.
FATES: dict[str, Callable[[torch.Tensor, torch.Tensor, int], bool]] = {
    "NaN": lambda came, expected, at: bool(came[at].isnan()) and torch.equal(others(came, at), others(expected, at)),
    "itself": lambda came, expected, at: bool(came[at].isinf()) and torch.equal(others(came, at), others(expected, at)),
    "block": lambda came, expected, at: bool(came.isnan().all()),
    "side": lambda came, expected, at: bool((came[expected.sign() == came[at].sign()] == came[at]).all()),
}


def others(x: torch.Tensor, at: int) -> torch.Tensor:
    return torch.cat([x[:at], x[at + 1 :]])


@every_float_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_no_number_meets_the_fate_of_the_sheet(codec: FloatCodec, bad: float, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0, 6.0, 7.0, -8.0, 1.0, 2.0], dtype=dtype)
    expected = round_trip(codec, x)
    at = 3 if bad > 0 else 4
    x[at] = bad
    came = round_trip(codec, x)
    fate = codec.properties.nan if bad != bad else codec.properties.infinity
    for block in blocks(codec, len(x)):
        if block.start <= at < block.stop:
            assert FATES[fate](came[block], expected[block], at - block.start)
            if fate == "itself":
                assert came[at] == bad
        else:
            assert torch.equal(came[block], expected[block])


@every_float_codec
def test_a_finite_value_becomes_infinite_or_no_number_only_where_the_sheet_says(codec: FloatCodec) -> None:
    overflow = codec.properties.overflow
    largest = torch.finfo(torch.float32).max
    if overflow > largest:
        assert round_trip(codec, torch.tensor([largest, -largest])).isfinite().all()
    else:
        at = torch.tensor(overflow)
        assert not round_trip(codec, torch.stack([at, -at])).isfinite().any()
        below = torch.nextafter(at, torch.tensor(0.0))
        assert round_trip(codec, torch.stack([below, -below])).isfinite().all()


@every_float_codec
@few
@given(elems=st.integers(0, 200), cuts=st.integers(1, 12))
def test_chunks_that_respect_blocks_give_the_bits_of_the_whole(codec: FloatCodec, elems: int, cuts: int) -> None:
    block = getattr(codec, "block", 1)
    if block is None:
        return  # one block for all cannot be cut
    x = torch.randn(elems)
    step = cuts * (block if isinstance(codec, (TableCodec, OneBitCodec)) else 1)
    parts = [round_trip(codec, x[first : first + step]) for first in range(0, elems, step)]
    assert bits(round_trip(codec, x)) == bits(torch.cat(parts) if parts else x)


@every_codec_of_values
@few
@given(shape=st.lists(st.integers(0, 6), max_size=4))
def test_the_payload_has_the_bytes_that_were_announced(codec: Codec, shape: list[int]) -> None:
    encoded = codec.encode(torch.zeros(shape, dtype=codec.dtypes[0]))
    assert encoded.nbytes == encoded.payload.numel() == codec.bytes_for(shape)
    assert encoded.payload.dtype == torch.uint8
    of_values = codec.properties.bits_per_value * prod(shape) / 8
    of_blocks = 8 * len(blocks(codec, prod(shape)))
    assert of_values <= encoded.nbytes <= of_values + of_blocks + 1
