"""The native packing gives the bits of the torch reference, whatever the bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codecs import truncation
from shoal.errors import CodecError
from shoal.lowlevel.dispatch import TABLE
from shoal.lowlevel.native import levels
from tests.codecs.native_levels import at_level, off_by_one, same_bits

OP = TABLE["truncation"]
native, reference = OP.functions("native"), OP.functions("reference")
pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")
each_level = pytest.mark.parametrize("level", levels())
each_width = pytest.mark.parametrize("width", [1, 2, 3])


def both(x: torch.Tensor, width: int) -> None:
    for nearest in (False, True):
        assert all(
            map(same_bits, there_and_back(reference, x, width, nearest), there_and_back(native, x, width, nearest))
        )


def there_and_back(kernels: Any, x: torch.Tensor, width: int, nearest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.full((width * x.numel(),), 0xA5, dtype=torch.uint8)
    values = torch.full((x.numel(),), 7.0)
    kernels.pack(x, width, nearest, packed)
    kernels.unpack(packed, width, values)
    return packed, values


@each_level
@each_width
def test_every_top_half_with_low_halves_around_the_ties(level: str, width: int) -> None:
    top = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    with at_level(level):
        for low in (0, 1, 0x7F, 0x80, 0x81, 0x17F, 0x180, 0x181, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            both((top | low).view(torch.float32), width)


@each_level
@each_width
@settings(max_examples=60)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=90), st.integers(1, 9), st.integers(1, 3))
def test_any_bits_of_any_length(level: str, width: int, bits: list[int], times: int, threads: int) -> None:
    x = torch.from_numpy(np.array(bits * times, dtype=np.uint32).view(np.float32))
    with at_level(level, threads):
        both(off_by_one(x), width)


@each_level
@each_width
def test_threads_change_no_bit(level: str, width: int) -> None:
    bits = torch.randint(-(2**31), 2**31, (200_003,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = bits.int().view(torch.float32)
    found = []
    for threads in (1, 2, 3):
        with at_level(level, threads):
            found.append([*there_and_back(native, x, width, False), *there_and_back(native, x, width, True)])
    expected = [*there_and_back(reference, x, width, False), *there_and_back(reference, x, width, True)]
    assert all(all(map(same_bits, each, expected)) for each in found)


@each_width
def test_every_code_of_one_and_two_bytes_unpacks(width: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256 * width)
    outs = [torch.full((codes.numel() // width,), 7.0) for _ in range(2)]
    if width > 1:
        codes = codes + torch.arange(256 * width, dtype=torch.uint8).repeat_interleave(256)
    reference.unpack(codes, width, outs[0])
    native.unpack(codes, width, outs[1])
    assert same_bits(*outs)


def test_what_does_not_fit_is_refused_before_an_address_is_passed_on() -> None:
    x, packed = torch.ones(10), torch.empty(20, dtype=torch.uint8)
    for wrong in ((x, 4, packed), (x, 1, packed), (x.double(), 2, packed), (x, 2, packed.int()), (x[::2], 4, packed)):
        with pytest.raises(CodecError):
            truncation.pack(wrong[0], wrong[1], False, wrong[2])
        with pytest.raises(CodecError):
            truncation.unpack(wrong[2], wrong[1], wrong[0])


@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 31])
def test_three_bytes_past_the_caches_stay_within_their_place(nearest: bool, offset: int) -> None:
    x = torch.randn((4 << 20) + 37, generator=torch.Generator().manual_seed(0))
    x[::1001] = torch.nan
    room = torch.full((3 * len(x) + 64,), 0xA5, dtype=torch.uint8)
    right = torch.empty(3 * len(x), dtype=torch.uint8)
    native.pack(x, 3, nearest, room[offset : offset + len(right)])
    reference.pack(x, 3, nearest, right)
    assert torch.equal(room[offset : offset + len(right)], right)
    assert bool((room[:offset] == 0xA5).all()) and bool((room[offset + len(right) :] == 0xA5).all())
