"""One bit and two means a block: sums in their stated order, and an error that is fed back is not lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import codecs
from shoal.codecs.blocks import blocks_of
from shoal.codecs.one_bit import OneBitCodec, decode_blocks, encode_blocks
from shoal.errors import CodecError
from tests.raising import raising

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def encoded(x: torch.Tensor, block: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    means = torch.full((blocks_of(x.numel(), block), 2), 9.0)
    bits = torch.full((-(-x.numel() // 8),), 0xA5, dtype=torch.uint8)
    encode_blocks(x, block, means, bits)
    return means, bits


def mean_by_hand(block: list[float], negative: bool) -> float:
    """In runs of 4096 values, 64 lanes a run, lanes folded by halves, runs added in order; all in float64."""
    total, count = 0.0, 0
    for first in range(0, len(block), 4096):
        lanes = [0.0] * 64
        for place, value in enumerate(block[first : first + 4096]):
            if (value < 0) == negative:
                lanes[place % 64] += value
                count += 1
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [lanes[lane] + lanes[lane + half] for lane in range(half)]
        total += lanes[0]
    return total / count if count else 0.0


@pytest.mark.parametrize(
    ("elems", "block"),
    [(0, None), (1, None), (100, None), (300, 8), (9001, 4096), (12_345, None), (20_000, 8192), (70_001, 65_536)],
)
def test_means_are_those_of_a_sum_in_its_order(elems: int, block: int | None) -> None:
    x = torch.randn(elems) * 10.0 ** torch.randint(-6, 7, (elems,))
    means, bits = encoded(x, block)
    parts = [x[first : first + (block or elems)].tolist() for first in range(0, elems, block or max(elems, 1))]
    expected = [[mean_by_hand(part, negative=False), mean_by_hand(part, negative=True)] for part in parts]
    assert means.numpy().tobytes() == np.array(expected, dtype=np.float32).tobytes()
    assert bits.numpy().tobytes() == np.packbits(x.numpy() < 0, bitorder="little").tobytes()


@given(st.lists(FINITE, max_size=40), st.sampled_from([8, 16, None]))
def test_a_value_comes_back_as_the_mean_of_its_side(values: list[float], block: int | None) -> None:
    x = torch.tensor(values)
    means, bits = encoded(x, block)
    out = torch.empty(x.shape)
    decode_blocks(bits, means, block, out)
    expected = [means[place // (block or len(values)), int(value < 0)].item() for place, value in enumerate(values)]
    assert out.tolist() == expected


def test_zero_counts_as_not_negative_whatever_its_sign() -> None:
    means, bits = encoded(torch.tensor([-0.0, 2.0, -3.0]), None)
    assert means.tolist() == [[1.0, -3.0]]
    assert bits.tolist() == [4]


@pytest.mark.parametrize("bad", [float("nan"), -float("nan")])
def test_a_nan_makes_both_means_of_its_block_nan(bad: float) -> None:
    x = torch.ones(24)
    x[9] = bad
    means, _ = encoded(x, 8)
    assert means.isnan().tolist() == [[False, False], [True, True], [False, False]]
    assert means.view(torch.int32)[1].tolist() == [0x7FC00000] * 2


def test_an_infinity_makes_the_mean_of_its_side_infinite() -> None:
    means, _ = encoded(torch.tensor([1.0, float("inf"), -2.0]), None)
    assert means.tolist() == [[float("inf"), -2.0]]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_what_is_lost_comes_with_the_next_tensor(memory_format: torch.memory_format) -> None:
    codec = codecs.get("one_bit", block=None)
    assert isinstance(codec, OneBitCodec)
    left = torch.zeros(2, 3, 4, 5).to(memory_format=memory_format)
    given, came = torch.zeros(2, 3, 4, 5).double(), torch.zeros(2, 3, 4, 5).double()
    for _ in range(50):
        x = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
        before = left.clone()
        encoded = codec.encode(x, residual=left)
        decoded = encoded.decode()
        assert torch.equal(left, (before + x) - decoded)
        assert torch.equal(decoded, codec.encode(before + x).decode())
        given += x
        came += decoded
        # Nothing is lost but what the residual holds.
        assert torch.allclose(given - came, left.double(), atol=1e-4)
    assert left.abs().max() < 20  # and it does not grow


def test_a_bfloat16_gradient_has_a_residual_in_float32() -> None:
    codec = codecs.get("one_bit")
    assert isinstance(codec, OneBitCodec)
    x, left = torch.tensor([1.0, 3.0, -5.0]).bfloat16(), torch.zeros(3)
    assert codec.encode(x, residual=left).decode().dtype == torch.bfloat16
    assert left.tolist() == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "residual",
    [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2).t()],
    ids=["shape", "dtype", "strides"],
)
def test_a_residual_of_another_kind_is_refused(residual: torch.Tensor) -> None:
    codec = codecs.get("one_bit")
    assert isinstance(codec, OneBitCodec)
    with raising(CodecError, "float32", "(2, 2)"):
        codec.encode(torch.ones(2, 2), residual=residual)


@pytest.mark.parametrize("block", [0, -8, 12, 2.0, 2**63])
def test_a_block_is_a_multiple_of_eight(block: object) -> None:
    with pytest.raises(CodecError):
        codecs.get("one_bit", block=block)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_elems": 12}, "block_elems=12"),
        ({"means": torch.empty(2)}, "means: got 2 elements, expected 4"),
        ({"bits": torch.empty(1, dtype=torch.uint8)}, "bits: got 1 elements, expected 2"),
        ({"x": torch.ones(16).half()}, "values: got torch.float16"),
    ],
)
def test_tensors_of_another_kind_are_refused(change: dict, said: str) -> None:
    arguments = {
        "x": torch.ones(16),
        "block_elems": 8,
        "means": torch.empty(2, 2),
        "bits": torch.empty(2, dtype=torch.uint8),
    }
    with pytest.raises(CodecError) as told:
        encode_blocks(**(arguments | change))
    assert said in str(told.value)
