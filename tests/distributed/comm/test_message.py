"""Headers come back as they were; checksums tell one message from another."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.distributed.comm.message import HEADER_BYTES, MessageHeader, body_tag, checksum, fitting, read_header


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.text(), st.booleans())
def test_a_header_comes_back(sequence: int, length_bytes: int, crc: int, text: str, gave_up: bool) -> None:
    text = fitting(text).rstrip("\0")
    header = MessageHeader(sequence, length_bytes, crc, text, gave_up)
    data = header.to_tensor()
    assert data.shape == (HEADER_BYTES,)
    assert read_header(data) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(data: bytes) -> None:
    assert data.startswith(b"SHMS") or read_header(torch.frombuffer(bytearray(data), dtype=torch.uint8)) is None


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_tag_is_no_header_s_and_fits_31_bits(sequence: int, length_bytes: int) -> None:
    assert 1 < body_tag(sequence, length_bytes) < 2**31


@given(st.data())
def test_one_changed_byte_changes_the_checksum(data: st.DataObject) -> None:
    elems = data.draw(st.sampled_from([1, 7, 8, 8191, 8192, 8193, 30_000]))
    shift = data.draw(st.sampled_from([0, 1, 8]))
    message = torch.arange(elems + shift).mul(7).to(torch.uint8)[shift:]
    before = checksum(message)
    assert before == checksum(message.clone())
    message[data.draw(st.integers(0, elems - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(message) != before


def test_a_longer_message_and_a_swap_of_rows_have_another_checksum() -> None:
    message = torch.arange(40_000).mul(11).floor_divide(5).to(torch.uint8)
    swapped = torch.cat([message[8192:16384], message[:8192], message[16384:]])
    assert len({checksum(message), checksum(swapped), checksum(message[:-1]), checksum(message[:-8])}) == 4
