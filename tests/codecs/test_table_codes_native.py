"""The native table codes give the bits of the torch reference: at every threshold, on every instruction set."""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal import codecs
from shoal.codecs import table_codes
from shoal.codecs.blocks import blocks_of
from shoal.codecs.table_codes_triton import Rounding
from shoal.codecs.tables import Table, table_of
from shoal.errors import CodecError, InputError
from shoal.lowlevel.dispatch import TABLE, VARIABLE
from shoal.lowlevel.native import LEVELS, levels
from tests.codecs.native_levels import at_level, off_by_one, same_bits
from tests.raising import raising

OP = TABLE["table_codes"]
native, reference = OP.functions("native"), OP.functions("reference")
pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")
each_level = pytest.mark.parametrize("level", levels())

# Squares lie on no line, two clusters far apart; sixteen octaves are more pieces than are looked up at once.
SQUARES = table_of("squares", (Fraction(i * i, 127 * 127) for i in range(128)))
CLUSTERS = table_of(
    "clusters", [*(Fraction(i, 10**6) for i in range(64)), *(1 - Fraction(i, 10**6) for i in range(64))]
)
OCTAVES = table_of(
    "octaves",
    {Fraction(0), *(Fraction(m, 15 * 2**e) for e in range(16) for m in range(8, 16))} - {Fraction(8, 15 * 2**15)},
)
NAMES = ("dynamic_tree", "dynamic_tree_even", "static_tree", "mantissa", "linear")
TABLES = {name: codecs.get(name).table() for name in NAMES} | {
    "squares": SQUARES,
    "clusters": CLUSTERS,
    "octaves": OCTAVES,
}
each_table = pytest.mark.parametrize("name", TABLES)


def both(
    x: torch.Tensor,
    table: Table,
    block: int | None = None,
    *,
    scale: float | None = None,
    seed: int | None = None,
    first_elem: int = 0,
) -> None:
    """Encodes and decodes with both and compares all bits."""
    found = []
    for kernels in (reference, native):
        scales = torch.full((blocks_of(x.numel(), block),), 7.0)
        codes = torch.full((x.numel(),), 77, dtype=torch.uint8)
        kernels.encode_blocks(x, table, block, scales, codes, Rounding(scale, seed, first_elem))
        out = torch.full((x.numel(),), 7.0)
        kernels.decode_blocks(codes, scales, table, block, out)
        found.append((scales, codes, out))
    for expected, ours in zip(*found, strict=True):
        assert same_bits(ours, expected)


def around(values: torch.Tensor) -> torch.Tensor:
    """Values, and the floats next to them."""
    above, below = (torch.nextafter(values, torch.full_like(values, end)) for end in (9.0, -9.0))
    return torch.cat([values, above, below])


@each_level
@each_table
@pytest.mark.parametrize("scale", [1.0, 3.0, 0.7, 1e-30, 1e30, 2.0**-126, 1e-44, 3e38])
def test_thresholds_magnitudes_and_their_neighbours(level: str, name: str, scale: float) -> None:
    table = TABLES[name]
    x = around(torch.cat([table.magnitudes, table.thresholds, torch.ones(1)])) * scale
    x = torch.cat([x, -x])
    with at_level(level):
        both(x, table)
        both(x, table, scale=scale)
        both(x, table, seed=1)


@each_level
@each_table
def test_every_exponent_and_mantissas_at_random(level: str, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (40_000,), generator=generator, dtype=torch.int64).int()
    x = bits.view(torch.float32)
    with at_level(level):
        both(x, TABLES[name], 64)  # most blocks hold a NaN
        finite = x[x.isfinite()]
        both(finite, TABLES[name], 1)
        both(finite, TABLES[name], 64)
        both(finite, TABLES[name], None, scale=2.0**-20)


@each_level
@each_table
def test_all_codes_decode_at_every_scale(level: str, name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(6)
    scales = torch.tensor([1.0, 0.0, torch.nan, 1e-44, 3e38, -2.0])
    with at_level(level):
        for aligned in (codes, off_by_one(codes)):
            outs = [torch.full((len(codes),), 7.0) for _ in range(2)]
            for kernels, out in zip((reference, native), outs, strict=True):
                kernels.decode_blocks(aligned, scales, TABLES[name], 256, out)
            assert same_bits(*outs)


@each_level
@each_table
@pytest.mark.parametrize(("block", "elems"), [(64, 1000), (4096, 10_000), (None, 9001), (5, 4)])
@pytest.mark.parametrize(("others", "divisor"), [(0, 1), (1, 2), (2, 3)])
def test_a_mean_in_one_pass_has_the_bits_of_its_steps(
    level: str, name: str, block: int | None, elems: int, others: int, divisor: int
) -> None:
    generator = torch.Generator().manual_seed(elems + divisor)
    table, blocks = TABLES[name], blocks_of(elems, block)
    own = torch.randn(elems, generator=generator)
    messages = [
        (torch.rand(blocks, generator=generator), torch.randint(256, (elems,), generator=generator).to(torch.uint8))
        for _ in range(others)
    ]
    with at_level(level):
        expected, came = own.clone(), torch.empty(elems)
        for their_scales, their_codes in messages:
            reference.decode_blocks(their_codes, their_scales, table, block, came)
            expected.add_(came)
        expected.div_(divisor)
        scales, codes = torch.empty(2, blocks), torch.empty(2, elems, dtype=torch.uint8)
        reference.encode_blocks(expected, table, block, scales[0], codes[0])
        reference.decode_blocks(codes[0], scales[0], table, block, expected)
        native.mean_blocks(own, messages, divisor, table, block, scales[1], codes[1])
    assert same_bits(own, expected)
    assert same_bits(*scales)
    assert torch.equal(*codes)


@each_level
def test_a_mean_with_what_is_no_number_is_none_in_its_block(level: str) -> None:
    table = TABLES["dynamic_tree"]
    own, codes = torch.ones(300), torch.full((300,), 127, dtype=torch.uint8)
    own[5], theirs = torch.inf, torch.tensor([1.0, torch.nan, 1.0])
    scales, mean = torch.empty(3), torch.empty(300, dtype=torch.uint8)
    with at_level(level):
        native.mean_blocks(own, [(theirs, codes)], 2, table, 100, scales, mean)
    assert own.isnan().tolist() == [True] * 200 + [False] * 100
    assert scales.isnan().tolist() == [True, True, False]


values = st.one_of(
    st.floats(width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 2.0**-149, 2.0**-126, 3.4028234663852886e38]),
)


@each_level
@settings(max_examples=60)
@given(
    st.lists(values, max_size=70),
    st.integers(1, 40),
    st.sampled_from(list(TABLES)),
    st.sampled_from([1, 3, 8, 32, 33, 100, 4096, None]),
    st.one_of(st.none(), st.floats(2.0**-140, 2.0**120, width=32)),
    st.one_of(st.none(), st.integers(0, 2**63)),
    st.integers(0, 2**33),
    st.integers(1, 3),
)
@example([1.0], 40, "linear", None, None, None, 0, 3)
@example([], 1, "mantissa", None, None, 3, 0, 3)
def test_any_tensor_in_any_blocks(
    level: str,
    values: list[float],
    times: int,
    name: str,
    block: int | None,
    scale: float | None,
    seed: int | None,
    first_elem: int,
    threads: int,
) -> None:
    x = off_by_one(torch.tensor(values * times))
    with at_level(level, threads):
        both(x, TABLES[name], block, scale=scale, seed=seed, first_elem=first_elem)


@each_level
@pytest.mark.parametrize("name", ["dynamic_tree", "linear"])  # tables differ only in numbers
@pytest.mark.parametrize("block", [4096, 70_000, None])
@pytest.mark.parametrize("seed", [None, 5])
def test_threads_and_the_size_of_a_tensor_change_no_bit(
    level: str, name: str, block: int | None, seed: int | None
) -> None:
    elems = 150_001
    x = torch.randn(elems, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, elems)

    def encoded(kernels: ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
        scales, codes = torch.empty(blocks_of(elems, block)), torch.empty(elems, dtype=torch.uint8)
        kernels.encode_blocks(x, TABLES[name], block, scales, codes, Rounding(None, seed, 2**32 - 70_000))
        return scales, codes

    expected = encoded(reference)
    for threads in (1, 2, 3):
        with at_level(level, threads):
            for ours, right in zip(encoded(native), expected, strict=True):
                assert same_bits(ours, right)


def test_every_float_from_0_to_1() -> None:
    """2**30 shares: a block of them and a one, so that its scale is 1. Between two thresholds all must be one code.

    Of one table, since tables differ only in numbers, and every threshold of each is tried with its neighbours above.
    """
    table, step, one = TABLES["dynamic_tree"], 1 << 18, 0x3F800000
    begins = table.thresholds.view(torch.int32).tolist()
    bits = torch.arange(step, dtype=torch.int32)
    x, codes, scales = bits.view(torch.float32), torch.empty(step, dtype=torch.uint8), torch.empty(1)
    for first in range(0, one + 1, step - 1):
        last = min(first + step - 2, one)
        bits.clamp_(max=one)[-1] = one
        native.encode_blocks(x, table, None, scales, codes)
        assert scales.item() == 1
        before, within = (bisect_right(begins, bound) for bound in (first, last))
        if before == within:
            assert [int(code) for code in codes[:-1].aminmax()] == [before, before]
        else:
            assert torch.equal(codes.long(), torch.bucketize(x, table.thresholds, right=True))
        bits += step - 1
    assert last == one


def test_what_does_not_fit_is_refused_before_an_address_is_passed_on() -> None:
    table, x = TABLES["linear"], torch.ones(10)
    codes, scales = torch.empty(10, dtype=torch.uint8), torch.empty(2)
    table_codes.encode_blocks(x, table, 8, scales, codes)
    for wrong in (
        (x.double(), 8, scales, codes),
        (x, 8, scales[:1], codes),
        (x, 8, scales, codes[:9]),
        (x, 8, scales.half(), codes),
        (x, 8, scales, codes.int()),
        (torch.ones(20)[::2], 8, scales, codes),
        (x, -8, scales, codes),
        (x, None, scales, codes),
    ):
        with pytest.raises(CodecError):
            table_codes.encode_blocks(wrong[0], table, *wrong[1:])


def test_a_level_this_machine_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mmx")
    with raising(InputError, f"{VARIABLE}=mmx"):
        native.encode_blocks(torch.ones(1), TABLES["linear"], None, torch.empty(1), torch.empty(1, dtype=torch.uint8))
    assert set(levels()) <= set(LEVELS)
