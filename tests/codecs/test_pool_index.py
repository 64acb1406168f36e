"""A byte for each max-pool index tells the same place, and no byte tells a place outside of the image."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.codecs.pool_index import NO_PLACE, decode, encode, fits
from tests.pools import CHANNELS_LAST, FORWARD, Pool, pools


@given(pools())
def test_decoding_gives_back_every_index(pool: Pool) -> None:
    codes = encode(pool.indices, pool.x.shape, *pool.window)
    assert codes.dtype == torch.uint8
    assert (codes.shape, codes.stride()) == (pool.indices.shape, pool.indices.stride())
    again = decode(codes, pool.x.shape, *pool.window)
    assert again.dtype == torch.int64
    assert torch.equal(again, pool.indices)
    assert again.stride() == pool.indices.stride()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("image", "kernel", "dilation"),
    [([9, 300], [3, 3], [1, 1]), ([5, 70, 40], [2, 3, 2], [2, 1, 3]), ([4, 130], [2, 2], [2, 1])],
)
def test_so_it_does_where_a_window_spans_more_of_the_flat_image_than_a_byte_counts(
    image: list[int], kernel: list[int], dilation: list[int], channels_last: bool
) -> None:
    dims = len(image)
    x = torch.randn(2, 3, *image)
    x = x.contiguous(memory_format=CHANNELS_LAST[dims]) if channels_last else x
    window = (kernel, [1] * dims, [size // 2 for size in kernel], dilation)
    _, indices = FORWARD[dims](x, *window, False)
    codes = encode(indices, x.shape, *window)
    assert int(codes.max()) < prod(kernel)
    assert (codes.dtype, codes.stride()) == (torch.uint8, indices.stride())
    assert torch.equal(decode(codes, x.shape, *window), indices)


@given(pools(), st.integers(0, 255))
def test_no_byte_leads_out_of_the_image(pool: Pool, byte: int) -> None:
    places = decode(torch.full_like(pool.indices, byte, dtype=torch.uint8), pool.x.shape, *pool.window)
    assert int(places.min()) >= 0
    assert int(places.max()) < prod(pool.x.shape[2:])


def test_all_places_of_the_largest_window_have_codes_of_their_own_and_one_code_is_left() -> None:
    indices = torch.arange(255).view(255, 1, 1, 1)
    window = ([15, 17], [15, 17], [0, 0], [1, 1])
    codes = encode(indices, (255, 1, 15, 17), *window)
    assert sorted({*codes.flatten().tolist(), NO_PLACE}) == list(range(256))
    assert torch.equal(decode(codes, (255, 1, 15, 17), *window), indices)


@given(pools())
def test_no_place_of_any_window_has_the_code_of_none(pool: Pool) -> None:
    assert NO_PLACE not in encode(pool.indices, pool.x.shape, *pool.window)


@pytest.mark.parametrize(
    ("kernel", "expected"), [([15, 17], True), ([16, 16], False), ([6, 6, 7], True), ([7, 6, 7], False), ([1], True)]
)
def test_a_window_fits_if_it_has_at_most_as_many_places_as_there_are_codes(kernel: list[int], expected: bool) -> None:
    assert fits(kernel) is expected
