"""Kept bytes are the top ones of each float, cut or rounded, against a brute force over all that can be kept."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.codecs.truncation import pack, unpack
from shoal.errors import CodecError

BITS = st.integers(0, 2**32 - 1)
INFINITY = 0x7F800000


def of_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def packed(x: torch.Tensor, width: int, nearest: bool) -> torch.Tensor:
    out = torch.full((width * x.numel(),), 0xA5, dtype=torch.uint8)
    pack(x, width, nearest, out)
    return out


def codes(x: torch.Tensor, width: int, nearest: bool) -> list[int]:
    raw = packed(x, width, nearest).numpy().tobytes()
    return [int.from_bytes(raw[place : place + width], "little") for place in range(0, len(raw), width)]


def unpacked(packed: torch.Tensor, width: int) -> torch.Tensor:
    out = torch.full((packed.numel() // width,), 5.0)
    unpack(packed, width, out)
    return out


def value(code: int, width: int) -> float:
    """What a code stands for: the float with these top bytes. Of one byte even infinity's exponent is a number here."""
    if width == 1:
        exponent = 2 * (code & 0x7F)
        magnitude = 0.0 if exponent == 0 else 2.0 ** (exponent - 127)
        return -magnitude if code & 0x80 else magnitude
    return struct.unpack("<f", struct.pack("<I", code << (32 - 8 * width)))[0]


@given(st.lists(BITS, min_size=1, max_size=40), st.sampled_from([1, 2, 3]))
def test_cutting_keeps_the_top_bytes(bits: list[int], width: int) -> None:
    for bit, code in zip(bits, codes(of_bits(bits), width, nearest=False), strict=True):
        if bit & 0x7FFFFFFF <= INFINITY:
            assert code == bit >> (32 - 8 * width)
        else:
            assert code >> (8 * width - 1) == bit >> 31
            assert unpacked(packed(of_bits([bit]), width, False), width).isnan().all()


@given(st.lists(BITS, min_size=1, max_size=40), st.sampled_from([1, 2, 3]))
def test_rounding_keeps_the_nearest_value_of_two_the_even_code(bits: list[int], width: int) -> None:
    for x, code in zip(of_bits(bits).numpy(), codes(of_bits(bits), width, nearest=True), strict=True):
        if np.isnan(x):
            continue
        assert code >> (8 * width - 1) == np.signbit(x)
        assert code == nearest_by_hand(float(abs(x)), width) | int(np.signbit(x)) << (8 * width - 1)


def nearest_by_hand(magnitude: float, width: int) -> int:
    """By the distances, exact in float64, to the two codes around; the first past the last is where infinity begins."""
    end = INFINITY >> (32 - 8 * width)
    if magnitude == float("inf"):
        return end
    values = {code: value(code, width) for code in (*range(end), end)} if width == 1 else None
    cut = struct.unpack("<I", struct.pack("<f", magnitude))[0] >> (32 - 8 * width)
    lower = values[cut] if values else value(cut, width)
    if cut == end:
        return end
    if values:
        upper = 2.0 ** (2 * (cut + 1) - 127)
    else:
        upper = 2.0**128 if cut + 1 == end else value(cut + 1, width)
    below, above = magnitude - lower, upper - magnitude
    return cut + (above < below or (above == below and cut % 2 == 1))


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_rounding_at_the_end_of_the_floats(width: int, sign: int) -> None:
    largest = codes(of_bits([0x7F7FFFFF | sign]), width, nearest=True)
    assert largest == [(INFINITY | sign) >> (32 - 8 * width)]
    back = unpacked(packed(of_bits([0x7F7FFFFF | sign, INFINITY | sign]), width, True), width)
    assert back.isnan().all() if width == 1 else (back == (-1 if sign else 1) * float("inf")).all()


def test_one_byte_rounds_at_two_and_a_half_times_a_power_of_four() -> None:
    x = torch.tensor([2.0, 4.999999, 5.0, 5.000001, 8.0, 20.0, 20.00001])
    # 2 has code 0x40, which is even, 8 the odd code 0x41: of two as near, 5 goes down and 20 up.
    assert codes(x, 1, nearest=True) == [0x40, 0x40, 0x40, 0x41, 0x41, 0x42, 0x42]
    tiny = torch.tensor([2.0**-126, torch.nextafter(torch.tensor(2.0**-126), torch.tensor(1.0)).item(), 2.0**-125])
    assert codes(tiny, 1, nearest=True) == [0, 1, 1]


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7F810000])
@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_nan_stays_one_with_its_sign(bits: int, nearest: bool, width: int) -> None:
    back = unpacked(packed(of_bits([bits]), width, nearest), width)
    assert back.isnan().all()
    assert back.view(torch.int32).item() < 0 if bits >> 31 else back.view(torch.int32).item() >= 0


def test_one_byte_has_no_code_for_infinity() -> None:
    x = torch.tensor([2.0**127, -(2.0**127), float("inf"), 2.0**126])
    back = unpacked(packed(x, 1, False), 1)
    assert back.view(torch.int32).tolist()[:3] == [0x7FC00000, 0x7FC00000 - 2**31, 0x7FC00000]
    assert back[3] == 2.0**125


@pytest.mark.parametrize("width", [1, 2])
def test_every_code_comes_back_from_what_it_stands_for(width: int) -> None:
    every = torch.arange(256**width)
    packed_all = torch.stack([every >> 8 * byte & 255 for byte in range(width)], 1).to(torch.uint8).flatten()
    back = unpacked(packed_all, width)
    for code, x in enumerate(back.tolist()):
        if code & (0x7F if width == 1 else 0x7FFF) < INFINITY >> (32 - 8 * width):
            assert x == value(code, width)
    # A NaN that signals comes back quiet.
    quiet = every | torch.where(back.isnan(), 0x40, 0) if width == 2 else every
    for nearest in (False, True):
        assert codes(back, width, nearest) == quiet.tolist()


@given(st.lists(st.integers(0, 2**24 - 1).filter(lambda code: code & 0x7FFFFF <= 0x7F8000), min_size=1))
def test_so_does_every_code_of_three_bytes(some: list[int]) -> None:
    x = of_bits([code << 8 for code in some])
    for nearest in (False, True):
        assert codes(x, 3, nearest) == some
        assert torch.equal(unpacked(packed(x, 3, nearest), 3), x)


def test_bytes_lie_with_the_lowest_kept_one_first() -> None:
    x = of_bits([0x3F8CBBAA])
    assert packed(x, 3, False).numpy().tobytes() == b"\xbb\x8c\x3f"
    assert packed(x, 2, False).numpy().tobytes() == b"\x8c\x3f"
    assert packed(x, 1, False).numpy().tobytes() == b"\x3f"
    assert packed(x, 3, True).numpy().tobytes() == b"\xbc\x8c\x3f"


def test_two_rounded_bytes_are_pytorchs_bfloat16() -> None:
    x = torch.cat([torch.randn(1000) * 2.0 ** torch.randint(-130, 120, (1000,)), torch.tensor([0.0, -0.0])])
    assert torch.equal(packed(x, 2, True).view(torch.int16), x.bfloat16().view(torch.int16))


@pytest.mark.parametrize("elems", [0, 1, 65535, 65536, 65537])
def test_any_number_of_elements(elems: int) -> None:
    x = torch.randn(elems)
    for width in (1, 2, 3):
        expected = x.numpy().view(np.uint32) >> (32 - 8 * width) << (32 - 8 * width)
        assert unpacked(packed(x, width, False), width).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("x", "width", "out", "said"),
    [
        (torch.ones(2), 4, torch.empty(8, dtype=torch.uint8), "width_bytes=4"),
        (torch.ones(2).bfloat16(), 2, torch.empty(4, dtype=torch.uint8), "got torch.bfloat16"),
        (torch.ones(2), 2, torch.empty(3, dtype=torch.uint8), "got 3 elements, expected 4"),
        (torch.ones(2), 2, torch.empty(8, dtype=torch.uint8)[::2], "strides (2,)"),
    ],
)
def test_tensors_of_another_kind_are_refused(x: torch.Tensor, width: int, out: torch.Tensor, said: str) -> None:
    for call in (lambda: pack(x, width, False, out), lambda: unpack(out, width, x)):
        with pytest.raises(CodecError) as told:
            call()
        assert said in str(told.value)
