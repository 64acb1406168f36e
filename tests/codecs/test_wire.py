"""The header says what a payload is, and nothing that is not a header is believed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import codecs
from shoal.codecs import Encoded, from_bytes, wire
from shoal.errors import CodecError
from tests.codecs.every_codec import CODECS, name_of
from tests.raising import raising

OPTIONS_AT, PAYLOAD_AT = 33, 49  # of a vector encoded by a table codec


def some_tensor(codec: codecs.Codec) -> torch.Tensor:
    if codec.name == "pool_index":
        return torch.nn.functional.max_pool2d(torch.randn(2, 3, 8, 8), 2, return_indices=True)[1]
    return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


def mended(data: bytes) -> bytes:
    """With the CRC-32 of what it now says: damage that only reading can find."""
    data = data.ljust(24, b"\0")
    return data[:12] + struct.pack("<I", crc32(data[16:], crc32(data[:12]))) + data[16:]


def decodes_or_is_refused(data: bytes) -> bool:
    try:
        encoded = from_bytes(data)
        decoded = encoded.decode()
    except CodecError as error:
        assert "got" in str(error)
        return False
    assert decoded.shape == encoded.shape
    assert decoded.stride() == encoded.stride
    again = from_bytes(encoded.to_bytes())
    assert (again.codec, again.dtype, again.shape, again.stride) == (
        encoded.codec,
        encoded.dtype,
        encoded.shape,
        encoded.stride,
    )
    assert torch.equal(again.payload, encoded.payload)
    return True


LINEAR = codecs.get("linear").encode(torch.tensor([1.0, -0.5, 0.25])).to_bytes()


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_what_is_written_is_read(codec: codecs.Codec) -> None:
    encoded = codec.encode(some_tensor(codec))
    data = encoded.to_bytes()
    for kind in (bytes, bytearray, memoryview):
        read = from_bytes(kind(data))
        assert read.codec == codec
        assert (read.dtype, read.shape, read.stride) == (encoded.dtype, encoded.shape, encoded.stride)
        assert torch.equal(read.payload, encoded.payload)
        assert torch.equal(read.decode(), encoded.decode())
        assert read.to_bytes() == data


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1), (1,) * 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_so_is_a_tensor_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.full(shape, 3.0, dtype=dtype)
    decoded = from_bytes(codecs.get("linear").encode(x).to_bytes()).decode()
    assert torch.equal(decoded, x)
    assert (decoded.dtype, decoded.stride()) == (x.dtype, x.stride())


def test_what_was_read_is_a_copy() -> None:
    data = bytearray(LINEAR)
    read = from_bytes(data)
    data[-1] ^= 0xFF
    assert read.to_bytes() == LINEAR


def changed(at: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"", "got 0 bytes, expected a header of at least 24"),
        (lambda data: data[:23], "got 23 bytes, expected a header of at least 24"),
        (lambda data: data[:-1], f"got {len(LINEAR) - 1} bytes, expected {len(LINEAR)}"),
        (lambda data: data + b"\0", f"got {len(LINEAR) + 1} bytes, expected {len(LINEAR)}"),
        (changed(0, b"PK"), "this is no encoded tensor"),
        (changed(4, b"\2"), "got version 2 of the format, expected 1"),
        (changed(len(LINEAR) - 1, b"\7"), "the bytes were damaged"),
        (changed(12, b"\0\0\0\0"), "got CRC-32"),
        (changed(6, b"\7"), "the bytes were damaged"),
    ],
)
def test_damage_is_found(damage: Callable[[bytes], bytes], said: str) -> None:
    with pytest.raises(CodecError) as told:
        from_bytes(damage(LINEAR))
    assert said in str(told.value)


HUGE = struct.pack("<Q", 2**64 - 1)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (changed(6, b"\x7f"), "got codec number 127, which nothing registered"),
        (changed(6, b"\x07"), "truncate1: got 16 bytes of options, expected none"),
        (changed(8, b"\x09"), "got dtype 9, expected one of"),
        (changed(8, b"\x05"), "linear: got a header of torch.int64"),
        (changed(8, b"\x04"), "linear: got a header of torch.bool"),
        (changed(9, b"\x02"), "expected 65 by the header"),
        (changed(16, HUGE), "got 56 bytes, expected 18446744073709551664"),
        (changed(24, HUGE), "expected fewer than 2**60 elements"),
        (changed(24, struct.pack("<Q", 2**59)), "bytes of payload, expected"),
        (changed(24, struct.pack("<Q", 4)), "got 7 bytes of payload, expected 8 for shape (4,)"),
        (changed(32, b"\1"), "got dimension order (1,), expected each of 1 dimensions once"),
        (changed(OPTIONS_AT, struct.pack("<Q", 1)), "got 7 bytes of payload, expected 15"),
        (changed(OPTIONS_AT, HUGE), "got block=18446744073709551615"),
        (changed(OPTIONS_AT + 8, b"\3"), "which no codec has"),
        (changed(OPTIONS_AT + 9, b"\1"), "which no codec has"),
        (changed(OPTIONS_AT + 12, b"\1"), "which no codec has"),
        (changed(OPTIONS_AT + 8, b"\1\0\0\0\0\0\xc0\x7f"), "got a scale of nan"),
        (changed(OPTIONS_AT + 8, b"\1\0\0\0\0\0\x80\xbf"), "got a scale of -1"),
        (changed(OPTIONS_AT + 8, b"\2\0\0\0\1\0\0\0"), "linear has no exponent offset"),
        (lambda data: data[:10] + b"\0\0" + data[12:33] + data[49:], "linear: got 0 bytes of options, expected 16"),
    ],
)
def test_a_header_that_lies_under_a_right_crc_is_refused(lie: Callable[[bytes], bytes], said: str) -> None:
    with pytest.raises(CodecError) as told:
        from_bytes(mended(lie(LINEAR)))
    assert said in str(told.value)


def test_sizes_whose_strides_would_overflow_are_refused_even_with_nothing_in_them() -> None:
    header = wire.PayloadHeader(13, torch.float32, (0, 2**40, 2**40), (0, 1, 2), b"")
    with pytest.raises(CodecError):
        from_bytes(wire.to_bytes(header, b""))


def test_more_than_64_dimensions_are_refused() -> None:
    header = wire.PayloadHeader(13, torch.float32, (1,) * 65, tuple(range(65)), b"")
    with raising(CodecError, "65", "64"):
        from_bytes(wire.to_bytes(header, b"\0\0"))


def test_pool_options_that_do_not_fit_the_indices_are_refused() -> None:
    _, indices = torch.nn.functional.max_pool2d(torch.randn(1, 1, 4, 4), 2, return_indices=True)
    geometry = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
    data = codecs.get("pool_index", input_shape=(1, 1, 4, 4), **geometry).encode(indices).to_bytes()
    other = codecs.get("pool_index", input_shape=(1, 1, 2, 2), **geometry).wire_options()
    at = 24 + 9 * 4
    with raising(CodecError, "(1, 1, 2, 2)"):
        from_bytes(mended(data[:at] + other + data[at + len(other) :]))


MESSAGES = [codec.encode(some_tensor(codec)).to_bytes() for codec in CODECS]


@given(data=st.data())
def test_a_message_with_any_bytes_changed_is_refused(data: st.DataObject) -> None:
    message = bytearray(data.draw(st.sampled_from(MESSAGES)))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    assert not decodes_or_is_refused(bytes(message))


@settings(max_examples=400)
@given(data=st.data())
def test_one_whose_crc_was_mended_is_refused_or_decodes(data: st.DataObject) -> None:
    message = bytearray(data.draw(st.sampled_from(MESSAGES)))
    for _ in range(data.draw(st.integers(1, 4))):
        # Most lies are told in the header.
        place = data.draw(st.integers(0, min(len(message), 120) - 1) | st.integers(0, len(message) - 1))
        message[place] = data.draw(st.sampled_from([0, 1, 2, 3, 127, 128, 255]) | st.integers(0, 255))
    decodes_or_is_refused(mended(bytes(message)))


@settings(max_examples=200)
@given(data=st.data())
def test_so_is_one_that_was_cut_joined_or_made_up(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(MESSAGES))
    cut, resumed = data.draw(st.integers(0, len(message))), data.draw(st.integers(0, len(message)))
    spliced = message[:cut] + data.draw(st.binary(max_size=20)) + message[resumed:]
    for candidate in (spliced, mended(spliced), mended(b"SHCD\1\0" + data.draw(st.binary(max_size=80)))):
        decodes_or_is_refused(candidate)


@given(codec=st.sampled_from(CODECS), payload=st.binary(min_size=200, max_size=200), elems=st.integers(0, 24))
def test_any_payload_of_the_right_length_decodes(codec: codecs.Codec, payload: bytes, elems: int) -> None:
    shape, dtype = (elems,), codec.dtypes[0]
    if codec.name == "pool_index":
        shape = (2, 3, 4, 4)
    if codec.name == "sign_mask":
        dtype = torch.bool
    some = torch.frombuffer(bytearray(payload), dtype=torch.uint8)[: codec.bytes_for(shape)]
    stride = torch.empty(shape, device="meta").stride()
    decoded = codec.decode(Encoded(codec, dtype, shape, stride, some))
    assert decoded.shape == shape
    if codec.name == "pool_index":
        assert 0 <= int(decoded.min()) <= int(decoded.max()) < 64


def test_a_big_endian_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.sys, "byteorder", "big")
    with pytest.raises(CodecError):
        from_bytes(LINEAR)
