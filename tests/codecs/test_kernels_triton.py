"""Triton's kernels give the bits of the torch reference: on CUDA where there is one, on the CPU in its interpreter.

`tests.test_interpreter` runs these in the interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from shoal.codecs import get
from shoal.codecs.blocks import blocks_of
from shoal.codecs.launch import triton_applies as applies
from shoal.codecs.table_codes_triton import Rounding, buckets_of
from shoal.errors import CodecError
from shoal.lowlevel.dispatch import TABLE, VARIABLE, choose
from tests.interpreter import INTERPRETED, not_interpreted, on_device, with_triton
from tests.kernels_elsewhere import compiled_for, each_capability, kernels_of, there

table_codes_reference, table_codes_triton = map(TABLE["table_codes"].functions, ("reference", "triton"))
truncation_reference, truncation_triton = map(TABLE["truncation"].functions, ("reference", "triton"))
one_bit_reference, one_bit_triton = map(TABLE["one_bit"].functions, ("reference", "triton"))
sign_mask_reference, sign_mask_triton = map(TABLE["sign_mask"].functions, ("reference", "triton"))

TABLES = {
    name: get(name).table() for name in ("dynamic_tree", "dynamic_tree_even", "static_tree", "mantissa", "linear")
}
each_table = pytest.mark.parametrize("name", list(TABLES))


def around(values: torch.Tensor) -> torch.Tensor:
    """Each float32, and the next on either side."""
    return torch.cat([values, values.nextafter(torch.tensor(-1.0)), values.nextafter(torch.tensor(torch.inf))])


def every_exponent(steps: int) -> torch.Tensor:
    """Positive float32 of every exponent, from the smallest denormal to the greatest, ascending."""
    return torch.arange(1, 0x7F800000, 0x7F800000 // steps, dtype=torch.int32).view(torch.float32)


def mixed(elems: int, seed: int = 0) -> torch.Tensor:
    """Signed float32 with every kind of number in it; neighbours are of like magnitude."""
    x = every_exponent(elems)[:elems]
    x = torch.where(torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.5, -x, x)
    special = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf])
    x[5 : 5 + len(special) * 7 : 7] = special[: len(x[5 : 5 + len(special) * 7 : 7])]
    return x


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.int32) if x.dtype == torch.float32 else x.cpu()


def same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(one), bits(other)) for one, other in zip(ours, theirs, strict=True))


# The interpreter is slow, and tables differ only in numbers: it sees all kinds of blocks with one of them, and one
# kind with another.
IN_BLOCKS = [
    (name, block)
    for name in TABLES
    for block in (None, 16, 100, 4096, 5000)
    if not INTERPRETED or (name, block) == ("linear", 100) or (name == "dynamic_tree" and block in (None, 100, 5000))
]


@on_device
@with_triton
@pytest.mark.parametrize(("name", "block"), IN_BLOCKS)
@pytest.mark.parametrize(
    "options", [{}, {"seed": -7, "first_elem": 5}, {"scale": 0.5}, {"scale": 1e-40, "seed": 2**31}]
)
def test_table_codes(device: str, name: str, block: int | None, options: dict[str, float]) -> None:
    table = TABLES[name]
    ties = around(torch.cat([table.thresholds, table.magnitudes[1:]])).clamp(max=1)
    for x in (torch.cat([ties, -ties]), mixed(6000), mixed(6000)[50:], torch.zeros(9), -torch.zeros(1), torch.zeros(0)):
        made = []
        for module, where in ((table_codes_triton, device), (table_codes_reference, "cpu")):
            values = x.to(where)
            scales = torch.full((blocks_of(len(x), block),), 9.0, device=where)
            codes, out = torch.full_like(values, 9, dtype=torch.uint8), torch.full_like(values, 9)
            module.encode_blocks(values, table, block, scales, codes, Rounding(**options))
            module.decode_blocks(codes, scales, table, block, out)
            made.append([scales, codes, out])
        assert applies(values.to(device), scales.to(device), codes.to(device))
        assert same_bits(*made)


@on_device
@with_triton
@each_table
def test_every_code_decodes_to_its_value_under_every_scale(device: str, name: str) -> None:
    scales = torch.cat([every_exponent(30), torch.tensor([0.0, torch.inf, torch.nan])])
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(scales))
    out, expected = torch.empty(len(codes), device=device), torch.empty(len(codes))
    table_codes_triton.decode_blocks(codes.to(device), scales.to(device), TABLES[name], 256, out)
    table_codes_reference.decode_blocks(codes, scales, TABLES[name], 256, expected)
    finite = (scales < torch.inf).repeat_interleave(256)
    assert torch.equal(bits(out)[finite], bits(expected)[finite])
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)  # 0 * inf is any NaN


@on_device
@with_triton
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("nearest", [False, True])
def test_truncation(device: str, width: int, nearest: bool) -> None:
    step = 1 << (32 - 8 * width)
    codes = torch.arange(0, 0x7F800000 // step, max(1, (0x7F800000 // step) // 300)) * step
    # Halves, and for one byte two and a half of four, which are the middles of codes.
    ties = (
        torch.cat([codes + step // 2, codes + 0xA00000 % step, 0x7F7FFFFF - torch.arange(3)]).int().view(torch.float32)
    )
    for x in (torch.cat([around(ties), -ties]), mixed(9001), mixed(4096), mixed(5), mixed(1), torch.zeros(0)):
        for offset in (0, 1, 2):
            packed = torch.zeros(len(x) * width + offset, dtype=torch.uint8, device=device)[offset:]
            expected = torch.zeros(len(x) * width, dtype=torch.uint8)
            truncation_triton.pack(x.to(device), width, nearest, packed)
            truncation_reference.pack(x, width, nearest, expected)
            assert same_bits([packed], [expected])
            out, back = torch.full((len(x),), 9.0, device=device), torch.full((len(x),), 9.0)
            truncation_triton.unpack(packed, width, out)
            truncation_reference.unpack(expected, width, back)
            assert same_bits([out], [back])


@on_device
@with_triton
@pytest.mark.parametrize("block", [None, 8, 104, 4096, 4104])
def test_one_bit(device: str, block: int | None) -> None:
    elems = 600 if block == 8 else 4200 if INTERPRETED else 9001
    whole = mixed(elems)
    numbers = torch.randn(elems, generator=torch.Generator().manual_seed(1)) * 10.0 ** (torch.arange(elems) % 9)
    for x in (whole, whole[200:213], numbers, numbers[:4095], -torch.zeros(3), torch.zeros(0)):
        made = []
        for module, where in ((one_bit_triton, device), (one_bit_reference, "cpu")):
            means = torch.zeros((blocks_of(len(x), block), 2), device=where)
            flags = torch.zeros(-(-len(x) // 8), dtype=torch.uint8, device=where)
            out = torch.full((len(x),), 9.0, device=where)
            module.encode_blocks(x.to(where), block, means, flags)
            module.decode_blocks(flags, means, block, out)
            made.append([means, flags, out])
        assert same_bits(*made)


@on_device
@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("elems", [0, 1, 7, 64, 9001])
def test_sign_mask(device: str, dtype: torch.dtype, elems: int) -> None:
    x = mixed(9001)[:elems].to(dtype)
    mask, expected = (torch.zeros(-(-elems // 8), dtype=torch.uint8, device=where) for where in (device, "cpu"))
    sign_mask_triton.encode(x.to(device), mask)
    sign_mask_reference.encode(x, expected)
    assert same_bits([mask], [expected])
    out = torch.zeros(elems, dtype=torch.bool, device=device)
    sign_mask_triton.decode(mask, out)
    assert torch.equal(out.cpu(), x > 0)


@on_device
@with_triton
def test_the_codecs_run_on_them(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for name in ("dynamic_tree", "truncate3", "one_bit", "sign_mask"):
        monkeypatch.setenv(VARIABLE, "reference")
        expected = get(name).encode(x)
        monkeypatch.setenv(VARIABLE, "triton")
        encoded = get(name).encode(x.to(device))
        assert same_bits([encoded.payload, encoded.decode()], [expected.payload, expected.decode()])
    assert choose(TABLE["table_codes"], x.to(device)) is table_codes_triton


@on_device
@with_triton
def test_what_they_do_not_read_is_left_to_others(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = torch.ones((4, 6), device=device)
    assert applies(x.view(-1), x.view(-1).byte())
    assert not applies(x) and not applies(x[:, 0]) and not applies(x.view(-1).double())
    assert not applies(x.view(-1), torch.ones(1, device="meta")) and not applies(torch.ones(1, device="meta"))
    flat = x.view(-1)
    assert choose(TABLE["sign_mask"], flat, flat.byte()) is sign_mask_triton
    assert choose(TABLE["one_bit"], flat, x.view(12, 2), flat.byte()) is one_bit_triton
    assert choose(TABLE["one_bit"], flat, x.t(), flat.byte()) is not one_bit_triton
    monkeypatch.setenv(VARIABLE, "reference")
    assert choose(TABLE["sign_mask"], flat, flat.byte()) is sign_mask_reference


@not_interpreted
@each_table
def test_a_bucket_finds_what_a_search_finds(name: str) -> None:
    for thresholds in (TABLES[name].thresholds, TABLES[name].magnitudes[1:]):
        found = buckets_of(thresholds)
        x = torch.cat([around(thresholds), every_exponent(10_000), torch.tensor([0.0, 1.0, torch.inf])])
        assert torch.equal(found.count(x), torch.bucketize(x, thresholds, right=True).int())


@not_interpreted
@settings(max_examples=50)
@given(
    st.lists(st.floats(2**-10, 1.0, width=32), min_size=1, max_size=127, unique_by=lambda t: int(t * 2**18)),
    st.lists(st.floats(0.0, width=32, allow_nan=False), min_size=1, max_size=20),
)
def test_so_it_does_for_any_thresholds_that_lie_apart(thresholds: list[float], others: list[float]) -> None:
    ordered = torch.tensor(sorted(thresholds))
    x = torch.cat([around(ordered), torch.tensor(others).abs()])
    try:
        found = buckets_of(ordered)
    except CodecError:  # some draws lie closer together than their decades leave buckets for
        reject()
    assert torch.equal(found.count(x), torch.bucketize(x, ordered, right=True).int())


def test_thresholds_too_close_or_too_far_apart_are_refused() -> None:
    one = torch.tensor([0.5])
    with pytest.raises(CodecError):
        buckets_of(torch.cat([one, one.nextafter(torch.ones(1))]))
    with pytest.raises(CodecError):
        buckets_of(torch.tensor([1e-30, 0.5, 0.5001]))


def launch_each(elems: int, block_elems: int | None) -> None:
    """Every function on that many elements, in blocks of that many."""
    x, byte = there(elems), torch.uint8
    codes, scales, flags = (
        there(elems, dtype=byte),
        there(-(-elems // (block_elems or elems))),
        there(elems, dtype=byte),
    )
    table_codes_triton.encode_blocks(x, TABLES["dynamic_tree"], block_elems, scales, codes)
    table_codes_triton.encode_blocks(x, TABLES["dynamic_tree"], block_elems, scales, codes, Rounding(1.0, 3))
    table_codes_triton.decode_blocks(codes, scales, TABLES["dynamic_tree"], block_elems, x)
    for width_bytes in (1, 2, 3):
        packed = there(width_bytes * elems, dtype=byte)
        truncation_triton.pack(x, width_bytes, True, packed)
        truncation_triton.unpack(packed, width_bytes, x)
    mask = there(-(-elems // 8), dtype=byte)
    for dtype in (torch.float32, torch.bfloat16):
        sign_mask_triton.encode(there(elems, dtype=dtype), mask)
    sign_mask_triton.decode(mask, flags)
    one_bit_triton.encode_blocks(x, block_elems, there(len(scales), 2), mask)
    one_bit_triton.decode_blocks(mask, there(len(scales), 2), block_elems, x)


@pytest.mark.slow
@with_triton
@not_interpreted
@each_capability
def test_they_compile_for_a_device_that_is_not_here(capability: int) -> None:
    from shoal.codecs import kernels_triton

    with compiled_for(capability) as found:
        for block_elems in (256, None):
            launch_each(25 << 18, block_elems)  # a bucket of gradients
        launch_each(2_359_299, None)  # a weight that is no multiple of anything
    assert found.keys() == kernels_of(kernels_triton)
    for name, compiled in found.items():
        for ptx in compiled:
            assert not any(word in ptx for word in (".ftz", "div.full", "div.approx", "fma.rn.f32"))
        if name not in ("mean_sides", "unpack_bytes", "pack_bytes"):
            assert any("global.v4" in ptx for ptx in compiled)  # 16 bytes at a time, where values lie side by side
