"""Codes by brute force in float64: every value gets the nearest magnitude, whatever the block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import codecs
from shoal.codecs import blocks
from shoal.codecs.blocks import blocks_of
from shoal.codecs.table_codes import decode_blocks, encode_blocks
from shoal.errors import CodecError

TYPES = ("dynamic_tree", "dynamic_tree_even", "static_tree", "mantissa", "linear")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BLOCKS = st.sampled_from([1, 3, 8, 100, None])


def encoded(x: torch.Tensor, name: str, block: int | None, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    scales = torch.full((blocks_of(x.numel(), block),), -1.0)
    codes = torch.full(x.shape, 77, dtype=torch.uint8)
    encode_blocks(x, codecs.get(name).table(), block, scales, codes, **options)  # type: ignore[arg-type]
    return scales, codes


def decoded(codes: torch.Tensor, scales: torch.Tensor, name: str, block: int | None) -> torch.Tensor:
    out = torch.empty(codes.shape)
    decode_blocks(codes, scales, codecs.get(name).table(), block, out)
    return out


def by_hand(x: np.ndarray, name: str, scale: np.float32) -> list[int]:
    """The code of each value, one by one: the share in float32, then the nearest of all magnitudes in float64."""
    magnitudes = codecs.get(name).table().magnitudes.double().numpy()
    found = []
    for value in x:
        share = np.float32(0) if scale == 0 else np.abs(value) / scale
        assert share.dtype == np.float32
        distances = np.abs(magnitudes - np.float64(share))
        index = int(np.flatnonzero(distances == distances.min())[-1])
        if index < 127:  # on the rounded middle itself the greater wins
            middle = np.float32((magnitudes[index] + magnitudes[index + 1]) / 2)
            index += int(share >= middle)
        if index > 0:
            middle = np.float32((magnitudes[index - 1] + magnitudes[index]) / 2)
            index -= int(share < middle)
        found.append(index | (0x80 if np.signbit(value) else 0))
    return found


@given(st.lists(FINITE, max_size=30), st.sampled_from(TYPES), BLOCKS)
def test_a_code_is_the_nearest_magnitude_of_a_share_of_the_blocks_greatest(
    values: list[float], name: str, block: int | None
) -> None:
    x = torch.tensor(values)
    scales, codes = encoded(x, name, block)
    for number, first in enumerate(range(0, len(values), block or max(len(values), 1))):
        part = x[first : first + (block or len(values))]
        assert scales[number] == part.abs().max()
        assert codes[first : first + len(part)].tolist() == by_hand(part.numpy(), name, scales[number].numpy())


@pytest.mark.parametrize("name", TYPES)
def test_on_and_beside_every_threshold(name: str) -> None:
    thresholds = codecs.get(name).table().thresholds
    for x, above in (
        (thresholds, 1),
        (torch.nextafter(thresholds, torch.tensor(1.0)), 1),
        (torch.nextafter(thresholds, torch.tensor(0.0)), 0),
    ):
        _, codes = encoded(x, name, None, scale=1.0)
        assert codes.tolist() == [index + above for index in range(127)]
        _, codes = encoded(-x, name, None, scale=1.0)
        assert codes.tolist() == [128 + index + above for index in range(127)]


@pytest.mark.parametrize("scale_exponent", [-149, -140, -126, -60, 0, 60, 127])
@pytest.mark.parametrize("name", TYPES)
def test_every_exponent_a_float_has(name: str, scale_exponent: int) -> None:
    exponents = torch.arange(-149, scale_exponent + 1, dtype=torch.float64)
    x = torch.cat([2.0**exponents, 1.7 * 2.0**exponents]).clamp(max=2.0**scale_exponent).float()
    scales, codes = encoded(x, name, None)
    assert scales.item() == 2.0**scale_exponent
    assert codes.tolist() == by_hand(x.numpy(), name, scales.numpy()[0])


@given(st.lists(st.integers(0, 255), min_size=1, max_size=30), st.lists(FINITE.map(abs), min_size=30, max_size=30))
def test_decoding_multiplies_once(codes: list[int], scales: list[float]) -> None:
    values = codecs.get("dynamic_tree").table().values().numpy()
    for block in (1, 3):
        some = torch.tensor(scales)[: blocks_of(len(codes), block)]
        out = decoded(torch.tensor(codes, dtype=torch.uint8), some, "dynamic_tree", block).numpy()
        expected = np.array([values[code] * some.numpy()[place // block] for place, code in enumerate(codes)])
        assert out.tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_a_block_that_holds_no_number_is_no_number_and_the_others_are_as_ever(bad: float, scale: float | None) -> None:
    x = torch.tensor([1.0, 2.0, -3.0, bad, -4.0, 5.0, 6.0])
    scales, codes = encoded(x, "linear", 3, scale=scale)
    assert scales.view(torch.int32)[1] == 0x7FC00000
    assert codes[3:6].tolist() == [128 if np.signbit(value) else 0 for value in x[3:6].tolist()]
    out = decoded(codes, scales, "linear", 3)
    assert out[3:6].view(torch.int32).tolist() == [0x7FC00000] * 3
    assert out.isnan().tolist() == [False] * 3 + [True] * 3 + [False]


@pytest.mark.parametrize("name", TYPES)
def test_what_passes_a_fixed_scale_gets_the_last_code(name: str) -> None:
    _, codes = encoded(torch.tensor([1.5, -7.0, 3e38, 1.0]), name, 2, scale=1.0)
    assert codes.tolist() == [127, 255, 127, 127]


def test_a_fixed_scale_is_a_float32() -> None:
    scales, _ = encoded(torch.ones(2), "linear", 1, scale=0.1)
    assert scales.tolist() == [torch.tensor(0.1).item()] * 2


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.sampled_from(TYPES), BLOCKS)
def test_stochastic_rounding_goes_to_either_neighbour_by_the_elements_own_draw(
    seed: int, first_elem: int, name: str, block: int | None
) -> None:
    x = torch.randn(50)
    scales, codes = encoded(x, name, block, seed=seed, first_elem=first_elem)
    magnitudes = codecs.get(name).table().magnitudes.numpy()
    scale_of = scales.repeat_interleave(block or 50)[:50].numpy()
    share = np.abs(x.numpy()) / scale_of
    for place in range(50):
        low = int(np.flatnonzero(magnitudes <= share[place])[-1])
        up = False
        if low < 127:
            chance = (share[place] - magnitudes[low]) / (magnitudes[low + 1] - magnitudes[low])
            up = lowbias32((first_elem + place) % 2**32 ^ seed) / 2**24 < chance
        assert codes[place] & 127 == low + up


def lowbias32(x: int) -> int:
    """Its upper 24 bits, in whole numbers of any size."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return (x ^ (x >> 16)) >> 8


@pytest.mark.parametrize("name", TYPES)
def test_stochastic_rounding_is_right_in_the_mean(name: str) -> None:
    value = 0.3217
    x = torch.full((20_000,), value)
    scales, codes = encoded(x, name, None, scale=1.0, seed=3)
    out = decoded(codes, scales, name, None).double()
    low, high = out.min().item(), out.max().item()
    assert low < value < high
    spread = ((value - low) * (high - value)) ** 0.5
    assert abs(out.mean().item() - value) < 4 * spread / 20_000**0.5


def test_chunks_that_end_with_blocks_give_the_bits_of_the_whole() -> None:
    x = torch.randn(1000)
    for seed in (None, 5):
        scales, codes = encoded(x, "dynamic_tree", 24, seed=seed)
        parts = [
            encoded(x[first : first + 240], "dynamic_tree", 24, seed=seed, first_elem=first)
            for first in range(0, 1000, 240)
        ]
        assert torch.equal(scales, torch.cat([part[0] for part in parts]))
        assert torch.equal(codes, torch.cat([part[1] for part in parts]))


@pytest.mark.parametrize("block", [1000, 65536, 70_000, None])
def test_the_references_own_pieces_leave_no_trace(monkeypatch: pytest.MonkeyPatch, block: int | None) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    x = torch.randn(150_001)
    scales, codes = encoded(x, "dynamic_tree", block, seed=1)
    out = decoded(codes, scales, "dynamic_tree", block)
    monkeypatch.setattr(blocks, "PIECE_ELEMS", 1 << 20)
    again = encoded(x, "dynamic_tree", block, seed=1)
    assert torch.equal(scales, again[0])
    assert torch.equal(codes, again[1])
    assert torch.equal(out, decoded(codes, scales, "dynamic_tree", block))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.ones(4, dtype=torch.float64)}, "values: got torch.float64"),
        ({"x": torch.ones(2, 2)}, "values: got torch.float32 of shape (2, 2)"),
        ({"x": torch.ones(8)[::2]}, "strides (2,)"),
        ({"codes": torch.empty(3, dtype=torch.uint8)}, "codes: got 3 elements, expected 4"),
        ({"codes": torch.empty(4)}, "codes: got torch.float32"),
        ({"scales": torch.empty(1)}, "scales: got 1 elements, expected 2"),
        ({"block_elems": 0}, "block_elems=0"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": 1e-50}, "scale=1e-50"),
        ({"scale": 1e39}, "scale=1e+39"),
        ({"scale": float("nan")}, "scale=nan"),
    ],
)
def test_tensors_of_another_kind_are_refused(change: dict, said: str) -> None:
    arguments = {
        "x": torch.ones(4),
        "block_elems": 2,
        "scales": torch.empty(2),
        "codes": torch.empty(4, dtype=torch.uint8),
    }
    with pytest.raises(CodecError) as told:
        encode_blocks(table=codecs.get("linear").table(), **(arguments | change))
    assert said in str(told.value)
