"""Max pooling with one byte an output: PyTorch's results and gradients for every window, layout and value."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernels import pooling
from shoal.lowlevel import allocations
from shoal.lowlevel.native import levels
from tests.kernels.threads import threads_of_torch
from tests.pools import BACKWARD, CHANNELS_LAST, FORWARD, Pool, pools

KERNELS = ["reference", *(f"native,{level}" for level in levels())]
with_every_kernel = pytest.mark.parametrize("kernels", KERNELS)


@with_every_kernel
@given(pool=pools(), piece_elems=st.integers(1, 64))
def test_result_and_gradient_are_those_of_pytorch(kernels: str, pool: Pool, piece_elems: int) -> None:
    x, expected, layout = pool.x, pool.pooled, CHANNELS_LAST[pool.dims]
    grad = torch.empty_like(expected).copy_(torch.randn(expected.shape))
    channels_last = x.is_contiguous(memory_format=layout) and not x.is_contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_KERNELS", kernels)
        patch.setattr(pooling, "_PIECE_ELEMS", piece_elems)
        found, codes = pooling.forward(x, *pool.options, False)
        gradient = pooling.backward(grad, codes, list(x.shape), channels_last, *pool.options, False)
    assert torch.equal(found.nan_to_num(77), expected.nan_to_num(77))
    assert torch.equal(found.isnan(), expected.isnan())
    assert found.is_contiguous(memory_format=layout) == expected.is_contiguous(memory_format=layout)
    assert (codes.dtype, codes.shape) == (torch.uint8, pool.indices.shape)
    expected_gradient = BACKWARD[pool.dims](grad, x, *pool.options, pool.indices)
    assert torch.equal(gradient, expected_gradient)
    assert gradient.stride() == expected_gradient.stride()


@with_every_kernel
@given(pool=pools(most_dilation=1), piece_elems=st.integers(1, 64))
def test_after_a_relu_the_gradient_is_that_of_both(kernels: str, pool: Pool, piece_elems: int) -> None:
    x, layout = pool.x.relu(), CHANNELS_LAST[pool.dims]
    expected, indices = FORWARD[pool.dims](x, *pool.options)
    grad = torch.empty_like(expected).copy_(torch.randn(expected.shape))
    channels_last = x.is_contiguous(memory_format=layout) and not x.is_contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_KERNELS", kernels)
        patch.setattr(pooling, "_PIECE_ELEMS", piece_elems)
        found, codes = pooling.forward(x, *pool.options, True)
        gradient = pooling.backward(grad, codes, list(x.shape), channels_last, *pool.options, True)
    assert torch.equal(found.nan_to_num(77), expected.nan_to_num(77))
    unfolded = BACKWARD[pool.dims](grad, x, *pool.options, indices)
    expected_gradient = torch.ops.aten.threshold_backward(unfolded, x, 0)
    assert torch.equal(gradient, expected_gradient)
    assert not torch.signbit(gradient[gradient == 0]).any()


@pytest.mark.parametrize("after_relu", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_no_index_of_the_whole_batch_exists(
    layout: torch.memory_format, after_relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    x = torch.randn(32, 4, 16, 16).contiguous(memory_format=layout)
    options = ([2, 2], [2, 2], [0, 0], [1, 1], False, after_relu)
    outputs = 32 * 4 * 8 * 8
    monkeypatch.setattr(pooling, "_PIECE_ELEMS", outputs // 32)  # one image
    (pooled, codes), changes = allocations.record(lambda: pooling.forward(x, *options))
    assert sum(changes) == pooled.nbytes + codes.nbytes == 5 * outputs
    assert allocations.peak_bytes(changes) <= 5 * outputs + 8 * 8 * (outputs // 32)
    monkeypatch.setattr(pooling, "_PIECE_ELEMS", outputs)
    _, of_the_whole = allocations.record(lambda: pooling.forward(x, *options))
    assert allocations.peak_bytes(of_the_whole) > 5 * outputs + 8 * outputs

    monkeypatch.setattr(pooling, "_PIECE_ELEMS", outputs // 32)
    gradient, changes = allocations.record(
        lambda: pooling.backward(pooled, codes, list(x.shape), layout is torch.channels_last, *options)
    )
    assert sum(changes) == gradient.nbytes == x.nbytes
    assert allocations.peak_bytes(changes) <= x.nbytes + 8 * 8 * (outputs // 32)


@pytest.mark.parametrize("after_relu", [False, True])
def test_the_gradient_takes_as_much_scratch_in_both_layouts(after_relu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient in another layout than the result's would have PyTorch's kernel copy each image's result twice."""
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    options = ([2, 2], [2, 2], [0, 0], [1, 1], False, after_relu)
    peaks = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(8, 64, 64, 64).relu().contiguous(memory_format=layout)
        pooled, codes = pooling.forward(x, *options)
        grad = torch.ones_like(pooled)
        channels_last = layout is torch.channels_last
        backward = partial(pooling.backward, grad, codes, list(x.shape), channels_last, *options)
        peaks.append(allocations.peak_bytes(allocations.record(backward)[1]))
    assert peaks[0] == peaks[1]


@pytest.mark.skipif(not levels(), reason="the native library was not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_native_kernels_take_no_scratch(channels_last: bool, dtype: torch.dtype) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(3, 5, 16, 16, dtype=dtype).contiguous(memory_format=layout)
    options = ([3, 3], [2, 2], [1, 1], [1, 1], True, True)
    (pooled, codes), changes = allocations.record(lambda: pooling.forward(x, *options))
    assert changes == [pooled.nbytes, codes.nbytes]
    backward = partial(pooling.backward, pooled, codes, list(x.shape), channels_last, *options)
    gradient, changes = allocations.record(backward)
    assert changes == [gradient.nbytes] == [x.nbytes]


LARGE = {  # more channels and columns than a vector has lanes, and a few more
    "overlapping": ((2, 101, 9, 75), ([3, 3], [2, 2], [1, 1], [1, 1], False)),
    "dense": ((2, 67, 20, 22), ([3, 3], [1, 1], [1, 1], [1, 1], True)),
    "apart": ((1, 33, 40, 70), ([2, 2], [2, 2], [0, 0], [1, 1], False)),
    "with gaps": ((1, 20, 19, 160), ([2, 3], [3, 4], [1, 1], [1, 1], True)),
    "numbered places": ((1, 18, 9, 300), ([3, 5], [2, 2], [1, 2], [1, 1], False)),
    "as long as the input": ((2, 24, 5, 17), ([5, 17], [1, 2], [2, 8], [1, 1], False)),
    "volume": ((1, 35, 6, 7, 40), ([3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1], False)),
    "flat volume": ((2, 17, 4, 12, 40), ([1, 2, 2], [1, 2, 2], [0, 0, 0], [1, 1, 1], True)),
}


@pytest.mark.parametrize("kernels", KERNELS[1:])  # the reference has no vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", LARGE)
def test_vectors_and_what_is_left_of_them_have_the_bits_of_pytorch(
    case: str, channels_last: bool, dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", kernels)
    shape, options = LARGE[case]
    dims = len(shape) - 2
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(-3, 9, shape, generator=draw).to(dtype).relu()  # ties
    x[torch.rand(shape, generator=draw) < 0.01] = float("inf")
    if channels_last:
        x = x.contiguous(memory_format=CHANNELS_LAST[dims])
    pooled, indices = FORWARD[dims](x, *options)
    grad = torch.empty_like(pooled).copy_(torch.randn(pooled.shape, generator=draw))  # sums are rounded in bfloat16
    unfolded = BACKWARD[dims](grad, x, *options, indices)
    for after_relu in (False, True):
        expected = torch.ops.aten.threshold_backward(unfolded, x, 0) if after_relu else unfolded
        for threads in (1, 3):
            with threads_of_torch(threads):
                found, codes = pooling.forward(x, *options, after_relu)
                gradient = pooling.backward(grad, codes, list(shape), channels_last, *options, after_relu)
            assert torch.equal(found, pooled) and found.stride() == pooled.stride() == codes.stride()
            assert torch.equal(gradient, expected) and gradient.stride() == expected.stride()


@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_are_the_sums_of_float64(channels_last: bool) -> None:
    x = torch.randn(2, 40, 30, 30, dtype=torch.float64)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = x.float().contiguous(memory_format=layout).double().requires_grad_()
    pooled = torch.nn.functional.max_pool2d(x.relu(), 3, 1, 1)
    grad = torch.randn_like(pooled).float()
    (expected,) = torch.autograd.grad(pooled, x, grad.double())
    options = ([3, 3], [1, 1], [1, 1], [1, 1], False, True)
    found, codes = pooling.forward(x.detach().float().relu(), *options)
    assert torch.equal(found.double(), pooled)
    gradient = pooling.backward(grad, codes, list(x.shape), channels_last, *options)
    largest_sum = 9 * float(grad.abs().max())  # a pixel is in nine windows, and each sum rounds by half a unit
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=9 * 2**-24 * largest_sum)


@with_every_kernel
def test_codes_of_one_kernel_are_those_of_another(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape, options in LARGE.values():
        x = torch.randn(shape).relu()
        monkeypatch.setenv("SHOAL_KERNELS", "reference")
        _, expected = pooling.forward(x, *options, True)
        monkeypatch.setenv("SHOAL_KERNELS", kernels)
        assert torch.equal(pooling.forward(x, *options, True)[1], expected)


@with_every_kernel
@pytest.mark.parametrize("channels_last", [False, True])
def test_tensors_that_lie_otherwise_give_the_same(
    channels_last: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", kernels)
    options = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    x = torch.randn(2, 24, 20, 40)[:, ::2, :, 1:]
    pooled, indices = FORWARD[2](x, *options)
    found, codes = pooling.forward(x, *options, False)
    assert torch.equal(found, pooled)
    grad = torch.randn(pooled.shape).contiguous(
        memory_format=torch.contiguous_format if channels_last else torch.channels_last
    )
    for given_codes in (codes, codes.contiguous(memory_format=torch.channels_last)):
        gradient = pooling.backward(grad, given_codes, list(x.shape), channels_last, *options, False)
        assert torch.equal(gradient, BACKWARD[2](grad, x, *options, indices))
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert gradient.is_contiguous(memory_format=layout)


@with_every_kernel
def test_no_images_give_none(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", kernels)
    options = ([2, 2], [2, 2], [0, 0], [1, 1], False, False)
    pooled, codes = pooling.forward(torch.empty(0, 3, 8, 8), *options)
    assert pooled.shape == codes.shape == (0, 3, 4, 4)
    assert pooling.backward(pooled, codes, [0, 3, 8, 8], False, *options).shape == (0, 3, 8, 8)
