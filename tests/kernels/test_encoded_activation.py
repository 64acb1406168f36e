"""The ops that encode and decode activations are the codecs, bit for bit, and what they tell of a ReLU is exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import codecs
from shoal.core.lossy import CODECS
from shoal.kernels.encoded_activation import (
    decode,
    encode,
    measured_errors,
    payload_bytes,
    relu_backward,
    relu_backward_,
)
from shoal.lowlevel import allocations
from tests.engine.training_laws import same_bits

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((2, 3, 5, 7), (3, 4), (70_001,), (2, 8, 65, 66))
KIB = 1024


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, channels_last: bool = False) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    drawn = drawn.to(memory_format=torch.channels_last) if channels_last else drawn
    return drawn.to(dtype)


def back(x: torch.Tensor, payload: torch.Tensor, codec: str, block: int, closed: float | None = None) -> torch.Tensor:
    return decode(payload, x.shape, x.stride(), x.dtype, codec, block, closed)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block", [0, 1, 300, 2048, 100_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_payload_is_the_codecs_and_so_is_what_comes_back(codec: str, block: int, dtype: torch.dtype) -> None:
    reference = codecs.get(codec, block=block or None)
    for shape in SHAPES if block != 1 else SHAPES[:2]:
        x = values(shape, dtype, channels_last=len(shape) == 4)
        payload = encode(x, codec, block, None, None)
        assert torch.equal(payload, reference.encode(x).payload)
        assert payload.numel() == payload_bytes(x.numel(), block) == reference.bytes_for(shape)
        decoded = back(x, payload, codec, block)
        assert decoded.stride() == x.stride()
        assert same_bits(decoded, reference.decode(reference.encode(x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 512])
def test_chance_rounds_as_the_codec_does_by_a_seed_that_hangs_on_the_values(dtype: torch.dtype, block: int) -> None:
    x = values((70_001,), dtype)
    once, again = encode(x, "linear", block, 3, None), encode(x.clone(), "linear", block, 3, None)
    assert torch.equal(once, again), "a second run gives the same bits"
    assert not torch.equal(once, encode(x, "linear", block, 4, None))
    moved = x.clone()
    moved[0] += 1
    differing = once[-70_000:] != encode(moved, "linear", block, 3, None)[-70_000:]
    assert differing.float().mean() > 0.1, "other values draw again, everywhere"


def test_chance_is_right_in_the_mean() -> None:
    x = values((4096,)).relu()
    mean = torch.stack([back(x, encode(x, "linear", 0, s, math.inf), "linear", 0, math.inf) for s in range(400)]).mean(
        0
    )
    step = float(x.max()) / 127
    assert (mean - x).abs().max() < 6 * step / math.sqrt(12 * 400) * 2
    nearest = back(x, encode(x, "linear", 0, None, math.inf), "linear", 0, math.inf)
    assert (mean - x).norm() < (nearest - x).norm() / 4


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("closed", [math.inf, 6.0, 0.5])
def test_what_a_clipped_activation_decodes_to_is_within_the_stated_error(codec: str, closed: float) -> None:
    x = (3 * values((2, 8, 33, 35), channels_last=True)).clamp(0, closed)
    decoded = back(x, encode(x, codec, 512, None, closed), codec, 512, closed)
    bound = codecs.get(codec, block=512).error_bound(x)
    assert ((decoded.double() - x.double()).abs() <= bound).all()
    assert not decoded[x == 0].any(), "zero decodes to zero"


SPECIAL = torch.tensor([0.0, -0.0, 1e-45, 1e-38, 1e-30, 1.0, 6.0, 5.9999995, 1e30, math.inf, math.nan, -math.nan])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 3, 4096])
def test_it_lets_through_just_what_the_exact_output_lets_through(dtype: torch.dtype, block: int) -> None:
    for x in (SPECIAL, SPECIAL[:9], values((2, 3, 50, 70), channels_last=True), values((1, 5, 7))):
        output = x.to(dtype).relu()
        grad = torch.randn_like(output)
        payload = encode(output, "linear", block, None, math.inf)
        found = relu_backward(grad, payload, output.shape, output.stride(), block)
        exact = aten.threshold_backward(grad, output, 0)
        assert same_bits(found, exact) and found.stride() == exact.stride()
        relu_backward_(grad, payload, output.shape, output.stride(), block)
        assert same_bits(grad, exact)


@pytest.mark.parametrize("high", [6.0, 1.0])
def test_a_clipped_relu_lets_through_what_lies_inside_its_bounds(high: float) -> None:
    for x in (SPECIAL, 3 * values((2, 3, 50, 70))):
        output = aten.hardtanh(x, 0, high)
        grad = torch.randn_like(output)
        payload = encode(output, "dynamic_tree", 256, None, high)
        found = relu_backward(grad, payload, output.shape, output.stride(), 256)
        assert same_bits(found, aten.hardtanh_backward(grad, output, 0, high))


def test_a_gradient_of_another_layout_keeps_the_layout_the_library_gives_it() -> None:
    output = values((2, 3, 4, 5), channels_last=True).relu()
    payload = encode(output, "linear", 16, None, math.inf)
    for grad in (
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 1, 1).expand(2, 3, 4, 5),
        torch.randn(2, 3, 4, 10)[..., ::2],
    ):
        found = relu_backward(grad, payload, output.shape, output.stride(), 16)
        exact = aten.threshold_backward(grad, output, 0)
        assert same_bits(found, exact) and found.stride() == exact.stride()


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40), st.integers(0, 9))
def test_every_relu_is_told_exactly_and_comes_back_within_its_bound(numbers: list[float], block: int) -> None:
    output = torch.tensor(numbers).relu()
    payload = encode(output, "dynamic_tree", block, None, math.inf)
    ones = torch.ones_like(output)
    found = relu_backward(ones, payload, output.shape, output.stride(), block)
    assert torch.equal(found, aten.threshold_backward(ones, output, 0))
    decoded = back(output, payload, "dynamic_tree", block, math.inf)
    bound = codecs.get("dynamic_tree", block=block or None).error_bound(output)
    off = (decoded.double() - output.double()).abs()
    assert ((off <= bound) | bound.isinf()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scratch_does_not_grow_with_the_activation(dtype: torch.dtype) -> None:
    for closed in (None, math.inf, 6.0):
        scratches = []
        for elems in (1 << 19, 1 << 21):
            x = values((elems,), dtype).relu().clamp(max=6)
            payload, changes = allocations.record(lambda x=x, closed=closed: encode(x, "linear", 4096, None, closed))
            scratches.append(allocations.peak_bytes(changes) - payload.nbytes)
            decoded, changes = allocations.record(
                lambda x=x, p=payload, closed=closed: back(x, p, "linear", 4096, closed)
            )
            scratches.append(allocations.peak_bytes(changes) - decoded.nbytes)
        assert max(scratches) < 4096 * KIB
        assert abs(scratches[2] - scratches[0]) < 64 * KIB and abs(scratches[3] - scratches[1]) < 64 * KIB


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("closed", [None, math.inf, 1.0])
def test_errors_are_measured_as_they_are(dtype: torch.dtype, closed: float | None) -> None:
    x = values((70_001,), dtype) if closed is None else values((70_001,), dtype).clamp(0, closed)
    with measured_errors() as errors:
        payload = encode(x, "dynamic_tree", 2048, None, closed)
    encode(x, "dynamic_tree", 2048, None, closed)
    exact = x.double()
    decoded = decode(payload, x.shape, x.stride(), torch.float32, "dynamic_tree", 2048, closed)
    assert errors == [pytest.approx(float((decoded.double() - exact).norm() / exact.norm()), rel=1e-4)]
