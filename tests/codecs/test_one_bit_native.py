"""The native signs and means give the bits of the torch reference: the order of the sums is part of the format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.codecs import one_bit
from shoal.codecs.blocks import blocks_of
from shoal.errors import CodecError
from shoal.lowlevel.dispatch import TABLE
from shoal.lowlevel.native import levels
from tests.codecs.native_levels import at_level, off_by_one, same_bits

OP = TABLE["one_bit"]
native, reference = OP.functions("native"), OP.functions("reference")
pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")
each_level = pytest.mark.parametrize("level", levels())


def both(x: torch.Tensor, block: int | None) -> None:
    found = []
    for kernels in (reference, native):
        means = torch.full((blocks_of(x.numel(), block), 2), 7.0)
        bits = torch.full((-(-x.numel() // 8),), 0xA5, dtype=torch.uint8)
        kernels.encode_blocks(x, block, means, bits)
        out = torch.full((x.numel(),), 7.0)
        kernels.decode_blocks(bits, means, block, out)
        found.append((means, bits, out))
    for expected, ours in zip(*found, strict=True):
        assert same_bits(ours, expected)


@each_level
@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.floats(width=32), st.floats(-1, 1, width=32)), max_size=70),
    st.integers(1, 40),
    st.sampled_from([8, 32, 64, 72, 4096, None]),
    st.integers(1, 3),
)
def test_any_tensor_in_any_blocks(level: str, values: list[float], times: int, block: int | None, threads: int) -> None:
    with at_level(level, threads):
        both(off_by_one(torch.tensor(values * times)), block)


@each_level
@pytest.mark.parametrize("block", [8, 4096, 8192, 100_000, None])
def test_sums_do_not_depend_on_threads(level: str, block: int | None) -> None:
    """Of magnitudes so different that any other order rounds differently."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_007, generator=generator) * torch.randn(200_007, generator=generator).mul(9).exp()
    for threads in (1, 3):
        with at_level(level, threads):
            both(x, block)


def test_a_nan_and_an_infinity_have_the_fate_that_is_stated() -> None:
    means, bits = torch.empty(2, 2), torch.empty(2, dtype=torch.uint8)
    x = torch.ones(16)
    x[3], x[8] = torch.nan, -torch.inf
    native.encode_blocks(x, 8, means, bits)
    assert means.view(torch.int32)[0].tolist() == [0x7FC00000] * 2
    assert means[1].tolist() == [1.0, -torch.inf] and bits.tolist() == [0, 1]


def test_what_does_not_fit_is_refused_before_an_address_is_passed_on() -> None:
    x, means, bits = torch.ones(16), torch.empty(2, 2), torch.empty(2, dtype=torch.uint8)
    one_bit.encode_blocks(x, 8, means, bits)
    for wrong in (
        (x.double(), 8, means, bits),
        (x, 8, means[:1], bits),
        (x, 8, means, bits[:1]),
        (x, 12, means, bits),
        (x, -8, means, bits),
        (x, 8, means.double(), bits),
        (torch.ones(32)[::2], 8, means, bits),
    ):
        with pytest.raises(CodecError):
            one_bit.encode_blocks(*wrong)
