"""The native mask gives the bits of the torch reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.lowlevel.dispatch import TABLE
from shoal.lowlevel.native import levels
from tests.codecs.native_levels import at_level, off_by_one, same_bits

OP = TABLE["sign_mask"]
applies = OP.implementations[-1].applies
native, reference = OP.functions("native"), OP.functions("reference")
pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")
each_level = pytest.mark.parametrize("level", levels())


def both(x: torch.Tensor) -> None:
    masks = [torch.full((-(-x.numel() // 8),), 0xA5, dtype=torch.uint8) for _ in range(2)]
    flags = [torch.zeros(x.numel(), dtype=torch.bool) for _ in range(2)]
    for kernels, mask, flag in zip((reference, native), masks, flags, strict=True):
        kernels.encode(x, mask)
        kernels.decode(mask, flag)
    assert same_bits(*masks) and torch.equal(flags[1], x > 0)


@each_level
@settings(max_examples=60)
@given(st.lists(st.floats(width=32), max_size=70), st.integers(1, 40), st.integers(1, 3))
def test_any_tensor(level: str, values: list[float], times: int, threads: int) -> None:
    with at_level(level, threads):
        both(off_by_one(torch.tensor(values * times)))


@each_level
def test_threads_share_no_byte(level: str) -> None:
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(0))
    for threads in (1, 2, 3):
        with at_level(level, threads):
            both(x)


def test_it_takes_float32_and_leaves_the_rest() -> None:
    x, mask = torch.ones(9), torch.empty(2, dtype=torch.uint8)
    assert applies(x, mask) and applies(mask, x > 0)
    assert not applies(x.half(), mask) and not applies(x > 0, mask)
