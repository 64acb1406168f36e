"""Batch norm again, and its gradient in place: the bits of PyTorch's kernels, and no more memory than is said."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shoal.kernels import batch_norm, norm_again, pieces
from shoal.kernels.batch_norm import backward, backward_, backward_repeats_bits
from shoal.kernels.norm_again import normalise, normalise_, repeats_bits
from shoal.kernels.pieces import WORTH_PIECES_BYTES
from shoal.lowlevel import allocations
from shoal.lowlevel.dispatch import VARIABLE
from shoal.lowlevel.native import cpu_features, levels

aten = torch.ops.aten
CPU = torch.device("cpu")
NormAffine = torch.Tensor | None
# Whose gradient is all but zero: rounding is most of what is left of it.
NEARLY_ZERO = torch.tensor([[[[2.0469, 0.2070]], [[-1.6797, 1.0703]]]], dtype=torch.bfloat16)
KERNELS = ["reference", *(f"native,{level}" for level in levels())]


@st.composite
def inputs(draw: st.DrawFn, min_channels: int = 1) -> torch.Tensor:
    """A batch (N, C, ...) of one to three spatial dimensions, in either layout."""
    spatial = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    shape = (draw(st.integers(1, 4)), draw(st.integers(min_channels, 40)), *spatial)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    x = (torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 50.0])) + 0.5).to(dtype)
    return channels_last(x) if draw(st.booleans()) and x.dim() > 3 else x


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def per_channel(x: torch.Tensor, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(x.shape[1], generator=torch.Generator().manual_seed(seed)).to(dtype or x.dtype)


def forward(x: torch.Tensor, weight: NormAffine, bias: NormAffine) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch's kernel: result, mean, inverse deviation."""
    return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)


def gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """PyTorch's kernel: of input, weight and bias."""
    return aten.native_batch_norm_backward(grad, x, weight, None, None, mean, deviation, True, 0.0, [True, True, True])


def elsewhere(x: torch.Tensor) -> bool:
    return not x.is_contiguous()


@settings(max_examples=60)
@given(inputs(), st.booleans())
def test_where_it_repeats_the_bits_it_repeats_them_for_any_batch(x: torch.Tensor, affine: bool) -> None:
    weight, bias = (per_channel(x, 1), per_channel(x, 2)) if affine else (None, None)
    result, mean, deviation = forward(x, weight, bias)
    again = normalise(x, weight, bias, mean, deviation)
    if repeats_bits(x.dtype, CPU, x.dim(), x.shape[1], elsewhere(x), x.dtype if affine else None):
        assert torch.equal(again, result)
        assert again.stride() == result.stride()
    if x.dtype == torch.bfloat16:
        return  # too coarse to be compared with anything else
    wide = x.double()
    dims = [0, *range(2, x.dim())]
    expected = wide - wide.mean(dims, keepdim=True)
    expected = expected * torch.rsqrt(wide.var(dims, correction=0, keepdim=True) + 1e-5)
    if weight is not None and bias is not None:
        shape = (1, -1, *[1] * (x.dim() - 2))
        expected = expected * weight.double().view(shape) + bias.double().view(shape)
    torch.testing.assert_close(again.double(), expected, rtol=2e-3, atol=2e-3)


@settings(max_examples=60)
@given(inputs(), st.booleans())
def test_written_over_its_input_it_gives_the_same(x: torch.Tensor, affine: bool) -> None:
    weight, bias = (per_channel(x, 1), per_channel(x, 2)) if affine else (None, None)
    _, mean, deviation = forward(x, weight, bias)
    expected = normalise(x, weight, bias, mean, deviation)
    taken = x.clone()
    assert normalise_(taken, weight, bias, mean, deviation).data_ptr() == taken.data_ptr()
    assert torch.equal(taken, expected)


@settings(max_examples=60)
@given(inputs(min_channels=2), st.integers(1, 99), st.integers(1, 99), st.sampled_from(KERNELS), st.booleans())
@example(torch.arange(2.0 * 32 * 9).view(2, 32, 3, 3), 1, 64, "reference", False)
@example(channels_last(torch.arange(2.0 * 32 * 9).view(2, 32, 3, 3)), 64, 1, "reference", False)
@example(torch.arange(2.0 * 32 * 9).view(2, 32, 3, 3).sqrt(), 1, 1, "native,portable", False)
@example(channels_last(torch.arange(2.0 * 32 * 9).view(2, 32, 3, 3).sqrt()), 1, 1, "native,portable", False)
@example(channels_last(torch.arange(2.0 * 32 * 9).view(2, 32, 3, 3).sqrt().bfloat16()), 1, 1, "reference", True)
@example(channels_last(torch.arange(2.0 * 32 * 9).view(2, 32, 3, 3).sqrt().bfloat16()), 1, 1, "native,portable", True)
@example(channels_last(NEARLY_ZERO), 1, 1, KERNELS[-1], True)
def test_where_its_gradient_repeats_the_bits_it_does_for_any_batch_and_any_pieces(
    x: torch.Tensor, piece_elems: int, channels_elems: int, kernels: str, autocast: bool
) -> None:
    assume(elsewhere(x) or x[0, 0].numel() > 1)  # single pixels have a test of their own
    weight = per_channel(x, 1, torch.float32 if autocast and x.dtype == torch.bfloat16 else None)
    grad = torch.empty_like(x).copy_(x.flip(0) - 0.25)
    _, mean, deviation = forward(x, weight, weight)
    expected = gradients(grad, x, weight, mean, deviation)
    untouched = grad.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "TILE_ELEMS", piece_elems)
        patch.setattr(batch_norm, "_CHANNELS_ELEMS", channels_elems)
        patch.setenv(VARIABLE, kernels)
        found = backward(grad, x, weight, mean, deviation)
        taken = grad.clone()
        over = backward_(taken, x, weight, mean, deviation)
        pieces._repeats_bits.cache_clear()  # whose key has no kernels
        repeats = backward_repeats_bits(x.dtype, weight.dtype, CPU, x.dim(), x.shape[1], elsewhere(x))
    assert torch.equal(grad, untouched)
    assert all(torch.equal(one, two) or one.isnan().any() for one, two in zip(over, found, strict=True))
    if repeats:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        assert found[0].stride() == expected[0].stride()


@pytest.mark.parametrize("shape", [(16384, 64, 1, 1), (65536, 16, 1)])
def test_the_gradient_of_single_pixels_has_the_same_bits_too(shape: tuple[int, ...]) -> None:
    x, grad = torch.randn(shape), torch.randn(shape)
    assert x.nbytes >= WORTH_PIECES_BYTES
    weight = per_channel(x, 1)
    assert backward_repeats_bits(x.dtype, x.dtype, CPU, x.dim(), x.shape[1], False)
    _, mean, deviation = forward(x, weight, weight)
    expected = gradients(grad, x, weight, mean, deviation)
    assert torch.equal(backward(grad, x, weight, mean, deviation)[0], expected[0])


def test_a_gradient_of_another_layout_than_its_input_is_left_to_pytorch() -> None:
    x, grad = torch.randn(2, 20, 3, 5), channels_last(torch.randn(2, 20, 3, 5))
    weight = per_channel(x, 1)
    _, mean, deviation = forward(x, weight, weight)
    for one, other in ((grad, x), (x, grad), (grad, x.transpose(2, 3).contiguous().transpose(2, 3))):
        expected = gradients(one, other, weight, mean, deviation)
        found = backward(one, other, weight, mean, deviation)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_whether_bits_repeat_is_found_out_without_a_trace() -> None:
    state = torch.get_rng_state()
    pieces._repeats_bits.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        repeats_bits(torch.float32, CPU, 4, 6, False, torch.float32)
        backward_repeats_bits(torch.float32, torch.float32, CPU, 4, 6, True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif("fma" not in cpu_features(), reason="PyTorch's kernel adds and multiplies in other ways here")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_where_the_processor_has_fused_multiply_adds_the_bits_repeat(elsewhere: bool) -> None:
    assert repeats_bits(torch.float32, CPU, 4, 24, elsewhere, torch.float32)
    assert backward_repeats_bits(torch.float32, torch.float32, CPU, 4, 24, elsewhere)


@pytest.mark.skipif("fma" not in cpu_features() or not levels(), reason="no native kernels, or of another arithmetic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", levels())
def test_in_channels_last_the_native_sweep_repeats_them_over_the_gradient(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"native,{level}")
    monkeypatch.setattr(batch_norm, "_in_pieces", None)  # it is not called
    x, grad = (channels_last(torch.randn(3, 32, 29, 27)).to(dtype) for _ in range(2))
    grad[0, 0] *= 1e-39  # less than the smallest normal number
    weight = per_channel(x, 1, torch.float32)
    _, mean, deviation = forward(x, weight, weight)
    expected = gradients(grad, x, weight, mean, deviation)
    pieces._repeats_bits.cache_clear()
    assert backward_repeats_bits(dtype, torch.float32, CPU, 4, 32, True)  # tries it out
    found, changes = allocations.record(lambda: backward_(grad, x, weight, mean, deviation))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert found[0].data_ptr() == grad.data_ptr()
    assert allocations.peak_bytes(changes) <= 12 * weight.nbytes


@pytest.mark.skipif(not levels(), reason="no native kernels")
def test_a_native_sweep_that_does_not_repeat_them_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    batch_norm._native_arithmetic.cache_clear()
    call = batch_norm._native_call
    off = lambda tensors: (tensors[0] * (1 + 1e-6), *tensors[1:])  # noqa: E731
    monkeypatch.setattr(batch_norm, "_native_call", lambda *args: lambda *tensors: off(call(*args)(*tensors)))
    try:
        x = channels_last(torch.randn(2, 32, 3, 5))
        weight = per_channel(x, 1)
        _, mean, deviation = forward(x, weight, weight)
        expected = gradients(x.exp(), x, weight, mean, deviation)
        found = backward(x.exp(), x, weight, mean, deviation)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    finally:
        batch_norm._native_arithmetic.cache_clear()


def test_bits_that_do_not_repeat_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces._repeats_bits.cache_clear()
    try:
        lines, whole = norm_again.lines, batch_norm._whole_backward
        off = lambda tensors: (tensors[0] * (1 + 1e-6), *tensors[1:])  # noqa: E731
        monkeypatch.setattr(norm_again, "lines", lambda *args: off(lines(*args)))
        monkeypatch.setattr(
            batch_norm, "_whole_backward", lambda grad, *args: whole(grad * (1 + 1e-6 * len(args[1])), *args)
        )
        assert not repeats_bits(torch.float32, CPU, 4, 8, False, torch.float32)
        assert not backward_repeats_bits(torch.float32, torch.float32, CPU, 4, 8, False)
    finally:
        pieces._repeats_bits.cache_clear()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_normalising_again_allocates_the_result_and_two_numbers_a_channel(layout: torch.memory_format) -> None:
    x = torch.randn(4, 16, 6, 6).contiguous(memory_format=layout)
    weight, bias = per_channel(x, 1), per_channel(x, 2)
    _, mean, deviation = forward(x, weight, bias)
    _, changes = allocations.record(lambda: normalise(x, weight, bias, mean, deviation))
    assert allocations.peak_bytes(changes) == x.nbytes + 2 * weight.nbytes
    assert sum(changes) == x.nbytes
    _, changes = allocations.record(lambda: normalise_(x, weight, bias, mean, deviation))
    assert (allocations.peak_bytes(changes), sum(changes)) == (2 * weight.nbytes, 0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_is_never_there_twice(layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "TILE_ELEMS", 128)
    grad, x = (torch.randn(8, 32, 16, 16).contiguous(memory_format=layout) for _ in range(2))
    weight = per_channel(x, 1)
    _, mean, deviation = forward(x, weight, weight)
    backward(grad, x, weight, mean, deviation)  # the first call tries out what repeats the bits
    _, changes = allocations.record(lambda: backward_(grad, x, weight, mean, deviation))
    # Of a 16th of the channels: both operands, the result, and what the kernel allocates in addition to it.
    pieces_bytes = 4 * grad.nbytes // 16 if layout is torch.contiguous_format else 128 * 4
    assert 0 < allocations.peak_bytes(changes) <= pieces_bytes + 8 * weight.nbytes
    assert sum(changes) == 2 * weight.nbytes
    _, plain = allocations.record(lambda: gradients(grad, x, weight, mean, deviation))
    assert allocations.peak_bytes(plain) >= grad.nbytes


def test_on_cuda_the_second_half_of_pytorchs_kernel_normalises_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its op computes stands here in ops of the CPU: (x - mean) * invstd * weight + bias, in float32."""

    def elemt(x, weight, bias, mean, invstd, eps):  # type: ignore[no-untyped-def]
        shape = (1, -1, *[1] * (x.dim() - 2))
        weight, bias = (torch.ones_like(mean), torch.zeros_like(mean)) if weight is None else (weight, bias)
        y = (x.float() - mean.view(shape)) * invstd.view(shape)
        return (weight.view(shape) * y + bias.view(shape)).to(x.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("batch_norm_elemt", elemt, "CPU")
    library.impl("batch_norm_elemt.out", lambda x, *others, out: out.copy_(elemt(x, *others)), "CPU")
    try:
        monkeypatch.setattr(norm_again, "_has_second_half", lambda *_: True)
        for dtype, affine in ((torch.bfloat16, True), (torch.float32, False)):
            x = channels_last(torch.randn(4, 6, 9, 7)).to(dtype)
            weight = torch.rand(6) + 0.5 if affine else None
            y, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0.1, 1e-5)
            again = normalise(x, weight, weight, mean, invstd)
            assert (again.dtype, again.stride()) == (y.dtype, y.stride())
            torch.testing.assert_close(again, y)
            taken = x.clone(memory_format=torch.preserve_format)
            assert normalise_(taken, weight, weight, mean, invstd) is taken
            assert torch.equal(taken, again)
    finally:
        library._destroy()


def test_weights_of_another_dtype_are_left_to_pytorch_on_the_cpu() -> None:
    assert not repeats_bits(torch.bfloat16, CPU, 4, 6, False, torch.float32)
