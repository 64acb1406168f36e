"""Max pooling with one byte an output: PyTorch's results and gradients for every window, layout and value."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.kernels import pooling
from shoal.lowlevel import allocations
from tests.pools import BACKWARD, CHANNELS_LAST, FORWARD, Pool, pools


@given(pools(), st.integers(1, 64))
def test_result_and_gradient_are_those_of_pytorch(pool: Pool, piece_elems: int) -> None:
    x, expected, layout = pool.x, pool.pooled, CHANNELS_LAST[pool.dims]
    grad = torch.empty_like(expected).copy_(torch.randn(expected.shape))
    channels_last = x.is_contiguous(memory_format=layout) and not x.is_contiguous()
    with pytest.MonkeyPatch.context() as patch:
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


@given(pools(), st.integers(1, 64))
def test_after_a_relu_the_gradient_is_that_of_both(pool: Pool, piece_elems: int) -> None:
    assume(all(step == 1 for step in pool.options[3]))
    x, layout = pool.x.relu(), CHANNELS_LAST[pool.dims]
    expected, indices = FORWARD[pool.dims](x, *pool.options)
    grad = torch.empty_like(expected).copy_(torch.randn(expected.shape))
    channels_last = x.is_contiguous(memory_format=layout) and not x.is_contiguous()
    with pytest.MonkeyPatch.context() as patch:
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
def test_the_gradient_takes_as_much_scratch_in_both_layouts(after_relu: bool) -> None:
    """A gradient in another layout than the result's would have PyTorch's kernel copy each image's result twice."""
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
