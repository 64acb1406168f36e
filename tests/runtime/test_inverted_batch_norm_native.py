"""The native sweeps against the torch reference and float64, for every instruction set, layout and odd size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import native
from shoal.runtime import inverted_batch_norm_reference as reference
from shoal.runtime.inverted_batch_norm import kept_from_zero
from shoal.runtime.inverted_batch_norm_native import BEST, applies, backward_into, forward_into

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not built")
LEVELS = (0, 1, BEST)


@st.composite
def operands(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and gradient (N, C, ...), up to sizes that fill several blocks and more channels than fit one."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, 9), st.integers(1, 40)),
            st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 700)),
            st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 30), st.integers(1, 30)),
            st.tuples(st.integers(1, 2), st.integers(510, 1030), st.integers(1, 3), st.integers(1, 3)),
            st.tuples(st.integers(1, 2), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
        )
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    y, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    y[y.abs() < 0.1] = 0  # at the kink
    if draw(st.booleans()) and len(shape) > 3:
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        y, grad = y.contiguous(memory_format=layout), grad.contiguous(memory_format=layout)
    return y, grad


@settings(max_examples=60)
@given(
    operands(),
    st.sampled_from(LEVELS),
    st.sampled_from([0.01, 0.5, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_it_is_as_close_to_float64_as_the_reference(
    pair: tuple[torch.Tensor, torch.Tensor], level: int, slope: float, frozen: bool, over: bool, threads: int
) -> None:
    y, grad = pair
    assert applies(grad, y, "leaky_relu")
    generator = torch.Generator().manual_seed(1)
    scale, shift, deviation = (torch.randn(y.shape[1], generator=generator) for _ in range(3))
    scale = kept_from_zero(scale, 0.1)
    vectors = (scale, shift, deviation)
    wide = [t.double() for t in (grad, torch.empty_like(grad), y, *vectors)]
    right = (*reference.backward_into(*wide, frozen, "leaky_relu", slope), wide[1])
    theirs_result = torch.empty_like(y)
    theirs = (*reference.backward_into(grad, theirs_result, y, *vectors, frozen, "leaky_relu", slope), theirs_result)
    result = grad.clone() if over else torch.empty_like(grad)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours = (
            *backward_into(result if over else grad, result, y, *vectors, frozen, "leaky_relu", slope, level),
            result,
        )
    finally:
        torch.set_num_threads(before)
    for mine, other, exact in zip(ours, theirs, right, strict=True):
        allowed = 2 * (other.double() - exact).abs().max() + 1e-5 * exact.abs().max() + 1e-5
        assert (mine.double() - exact).abs().max() <= allowed


@settings(max_examples=40)
@given(operands(), st.sampled_from(LEVELS), st.sampled_from([0.01, 1.0]), st.booleans(), st.integers(1, 3))
def test_forward_is_the_plain_formula(
    pair: tuple[torch.Tensor, torch.Tensor], level: int, slope: float, over: bool, threads: int
) -> None:
    x = pair[0]
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(x.shape[1], generator=generator) for _ in range(3)]
    right = torch.empty_like(x, dtype=torch.float64)
    reference.forward_into(x.double(), right, *(vector.double() for vector in vectors), "leaky_relu", slope)
    source = x.clone()
    result = source if over else torch.empty_like(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        forward_into(source, result, *vectors, "leaky_relu", slope, level)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-6)


def test_what_it_does_not_take_is_left_to_torch() -> None:
    y = torch.randn(2, 3, 4, 5)
    assert applies(y, y, "identity")
    assert not applies(y, y, "elu")
    assert not applies(y.double(), y.double(), "leaky_relu")
    assert not applies(y.bfloat16(), y.bfloat16(), "leaky_relu")
    assert not applies(y.transpose(2, 3), y.transpose(2, 3), "leaky_relu")
    assert not applies(y[:0], y[:0], "leaky_relu")


def test_without_the_library_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    y, grad = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    arguments = (y, torch.ones(3), torch.zeros(3), torch.ones(3), False, 1e-5, "leaky_relu", 0.01)
    ours = torch.ops.shoal.inverted_batch_norm_backward(grad, *arguments)
    monkeypatch.setattr(native, "library", lambda: None)
    assert not applies(grad, y, "leaky_relu")
    for mine, theirs in zip(ours, torch.ops.shoal.inverted_batch_norm_backward(grad, *arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
