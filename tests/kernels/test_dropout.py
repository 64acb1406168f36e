"""Dropout gives the bits of eager PyTorch, forward and backward, from the same draws."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.kernels.dropout import dropout, dropout_, dropout_backward, dropout_backward_
from shoal.lowlevel import allocations


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.tuples(*[st.integers(1, 9)] * 4))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    x[x > 2] = draw(st.sampled_from([float("nan"), float("inf"), -0.0]))
    x = x.to(draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])))
    return x.contiguous(memory_format=torch.channels_last) if draw(st.booleans()) else x


# PyTorch leaves dropout with p = 0 out; it never comes here.
shares = st.one_of(st.sampled_from([0.1, 0.5, 1.0]), st.floats(0, 1, exclude_min=True))
seeds = st.integers(0, 2**31)


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit, signs of zeros too; NaN equals NaN."""
    return (
        ours.dtype == theirs.dtype
        and torch.equal(ours.nan_to_num(3), theirs.nan_to_num(3))
        and torch.equal(ours.isnan(), theirs.isnan())
        and torch.equal(ours.signbit() & ~ours.isnan(), theirs.signbit() & ~theirs.isnan())
    )


@given(tensors(), shares, seeds)
@example(torch.randn(2, 3, 4, 5).half(), 0.99999, 0)  # 1 / (1 - p) is more than float16 holds
def test_result_gradient_and_generator_are_those_of_eager_pytorch(x: torch.Tensor, p: float, seed: int) -> None:
    torch.manual_seed(seed)
    plain_input = x.clone().requires_grad_()
    expected = torch.nn.functional.dropout(plain_input, p)
    grad = torch.empty_like(x).copy_(x.flip(0) * 3)
    (expected_gradient,) = torch.autograd.grad(expected, plain_input, grad)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    kept, kept_grad = x.clone(), grad.clone()
    found, mask = dropout(x, p)
    assert torch.equal(torch.get_rng_state(), state)
    assert equal(found, expected.detach())
    assert equal(dropout_backward(grad, mask, p), expected_gradient)
    assert found.stride() == expected.stride()
    assert equal(x, kept)
    assert equal(grad, kept_grad)
    torch.manual_seed(seed)
    assert dropout_(kept, p)[0] is kept
    assert equal(kept, found)
    assert dropout_backward_(kept_grad, mask, p) is kept_grad
    assert equal(kept_grad, expected_gradient)


@given(shares, seeds)
def test_the_mask_tells_which_elements_stayed(p: float, seed: int) -> None:
    torch.manual_seed(seed)
    result, mask = dropout(torch.ones(200), p)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, result != 0)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_its_mask_takes_one_byte_an_element_and_in_place_nothing_else_stays(p: float) -> None:
    x = torch.randn(1000)
    (result, mask), changes = allocations.record(lambda: dropout_(x, p))
    assert (result.nbytes, mask.nbytes, sum(changes)) == (4000, 1000, 1000)
    assert sum(allocations.record(lambda: dropout(x, p))[1]) == 4000 + 1000
    assert sum(allocations.record(lambda: dropout_backward_(x, mask, p))[1]) == 0
    assert sum(allocations.record(lambda: dropout_backward(x, mask, p))[1]) == 4000
