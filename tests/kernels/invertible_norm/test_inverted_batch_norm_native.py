"""The native sweeps against the torch reference and float64, for every instruction set, layout and odd size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.kernels.invertible_norm.inverted_norms import kept_from_zero
from shoal.kernels.invertible_norm.inverted_op import InvertedVectors, gradients_into
from shoal.kernels.norm.norm_operands import Activation, NormAffine
from shoal.kernels.norm.norm_sweeps import apply_exactly
from shoal.kernels.norm.norm_sweeps_native import NATIVE
from shoal.lowlevel import native
from tests.kernels.kernel_choice import only
from tests.kernels.threads import threads_of_torch

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native library is not built")
LEVELS = native.levels()
applies = NATIVE.applies
ACTIVATIONS = [
    Activation(*one)
    for one in (("leaky_relu", 0.01), ("leaky_relu", 0.5), ("elu", 1.0), ("elu", 0.3), ("identity", 1.0))
]


def drawn(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    y[y.abs() < 0.1] = 0  # at the kink
    return y, grad


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
    y, grad = drawn(shape, draw(st.integers(0, 9999)))
    if draw(st.booleans()) and len(shape) > 3:
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        y, grad = y.contiguous(memory_format=layout), grad.contiguous(memory_format=layout)
    return y, grad


@settings(max_examples=80)
@given(
    operands(),
    st.sampled_from(LEVELS),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([1.0, 1e-3, 1e-6]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
# The sum over 100 numbers of up to a thousand times the result cancels to a thousandth of them.
@example(
    drawn((1, 1, 100), 243), next(reversed(LEVELS), "portable"), Activation("identity", 1.0), 1e-3, False, False, 1
)
def test_it_is_as_close_to_float64_as_the_reference(
    pair: tuple[torch.Tensor, torch.Tensor],
    level: str,
    activation: Activation,
    least_scale: float,
    frozen: bool,
    over: bool,
    threads: int,
) -> None:
    y, grad = pair
    if activation.name == "elu":  # nothing else comes out of one; far below zero it is flat
        y = nn.functional.elu(y * torch.logspace(0, 1.5, y.shape[-1]), activation.slope)
    assert applies(grad, y)
    generator = torch.Generator().manual_seed(1)
    scale, shift, deviation = (torch.randn(y.shape[1], generator=generator) for _ in range(3))
    scale[::2] *= least_scale
    vectors = (kept_from_zero(scale, 1e-5 if least_scale < 1 else 0.1), shift, deviation)
    norm, wide_norm = InvertedVectors(*vectors), InvertedVectors(*(vector.double() for vector in vectors))
    wide_result, theirs_result = torch.empty_like(grad, dtype=torch.float64), torch.empty_like(y)
    wide = gradients_into(grad.double(), wide_result, y.double(), wide_norm, activation, frozen=frozen)
    with only("reference"):
        plain = gradients_into(grad, theirs_result, y, norm, activation, frozen=frozen)
    right, theirs = (*wide, wide_result), (*plain, theirs_result)
    result = grad.clone() if over else torch.empty_like(grad)
    with threads_of_torch(threads), only(f"native,{level}"):
        ours = gradients_into(result if over else grad, result, y, norm, activation, frozen=frozen)
    z, of_z = activation.undone(y.double()), activation.gradient(grad.double(), y.double(), from_result=True)
    per_channel = (1, -1, *(1,) * (y.dim() - 2))
    normalised = (z - shift.double().view(per_channel)) / vectors[0].double().view(per_channel)
    summed = [terms.abs().transpose(0, 1).flatten(1).sum(1) for terms in (normalised * of_z, of_z)]
    rounding = [3 * 2.0**-24 * of_sum.max() for of_sum in summed] + [0.0]  # a float32 term is off by three roundings
    for mine, other, exact, off in zip((*ours, result), theirs, right, rounding, strict=True):
        allowed = 2 * (other.double() - exact).abs().max() + 1e-5 * exact.abs().max() + 1e-5 + off
        assert (mine.double() - exact).abs().max() <= allowed


@settings(max_examples=50)
@given(operands(), st.sampled_from(LEVELS), st.sampled_from(ACTIVATIONS), st.booleans(), st.integers(1, 3))
def test_forward_is_the_plain_formula(
    pair: tuple[torch.Tensor, torch.Tensor], level: str, activation: Activation, over: bool, threads: int
) -> None:
    x = pair[0]
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(x.shape[1], generator=generator) for _ in range(3)]
    right = torch.empty_like(x, dtype=torch.float64)
    apply_exactly(x.double(), NormAffine(*(vector.double() for vector in vectors)), None, activation, right)
    source = x.clone()
    result = source if over else torch.empty_like(x)
    with threads_of_torch(threads), only(f"native,{level}"):
        NATIVE.apply(source, NormAffine(*vectors), None, activation, result)
    torch.testing.assert_close(result.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_elu_and_its_inverse_are_within_an_ulp_of_their_own_size(level: str, alpha: float) -> None:
    z = -torch.arange(0x20000000, 0x41900000, 997, dtype=torch.int32).view(torch.float32)  # -1e-19 to -18
    zero, one, y = torch.zeros_like(z), torch.ones_like(z), torch.empty_like(z)
    elu = Activation("elu", alpha)
    with only(f"native,{level}"):
        NATIVE.apply(z[None], NormAffine(zero, one, zero), None, elu, y[None])
    right = alpha * torch.expm1(z.double())
    ulp = 2.0 ** (torch.frexp(right).exponent - 24.0)
    assert ((y.double() - right).abs() <= ulp).all()
    # A single row: the sums are what is made again, times its gradient; that rounds too.
    y = y[y > -alpha]
    row, zero, one = y[None], torch.zeros_like(y), torch.ones_like(y)
    with only(f"native,{level}"):
        vectors = InvertedVectors(one, zero, one)
        of_scale, of_shift = gradients_into(one[None], torch.empty_like(row), row, vectors, elu, frozen=True)
    assert torch.equal(of_shift, (y + alpha).double())
    torch.testing.assert_close(of_scale / of_shift, torch.log1p(y.double() / alpha), rtol=1.5 * 2**-23, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_not_finite_passes_as_in_torch(
    level: str, activation: Activation, frozen: bool, channels_last: bool
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    generator = torch.Generator().manual_seed(3)
    x, grad = (torch.randn(2, 20, 3, 7, generator=generator).contiguous(memory_format=layout) for _ in range(2))
    for channel, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        x[0, channel, 1, 2] = value
        grad[1, channel + 3, 2, 5] = value
    vectors = [torch.randn(20, generator=generator) for _ in range(3)]
    found = [torch.empty_like(x) for _ in range(4)]
    with only(f"native,{level}"):
        NATIVE.apply(x, NormAffine(*vectors), None, activation, found[0])
    apply_exactly(x, NormAffine(*vectors), None, activation, found[1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6, equal_nan=True)
    with only(f"native,{level}"):
        ours = gradients_into(grad, found[2], found[1], InvertedVectors(*vectors), activation, frozen=frozen)
    with only("reference"):
        theirs = gradients_into(grad, found[3], found[1], InvertedVectors(*vectors), activation, frozen=frozen)
    for mine, other in zip((found[2], *ours), (found[3], *theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_what_it_does_not_take_is_left_to_torch() -> None:
    y = torch.randn(2, 3, 4, 5)
    assert applies(y, y)
    assert not applies(y.double(), y.double())
    assert not applies(y.bfloat16(), y.bfloat16())
    assert not applies(y.transpose(2, 3), y.transpose(2, 3))
    assert not applies(y[:0], y[:0])


@pytest.mark.parametrize(("activation", "slope"), ACTIVATIONS[1:3])
def test_without_the_library_torch_does_it(activation: str, slope: float, monkeypatch: pytest.MonkeyPatch) -> None:
    y, grad = torch.randn(2, 3, 4, 5).clamp(min=-0.9), torch.randn(2, 3, 4, 5)
    arguments = (y, torch.ones(3), torch.zeros(3), torch.ones(3), False, 1e-5, activation, slope)
    ours = torch.ops.shoal.inverted_batch_norm_backward(grad, *arguments)
    monkeypatch.setattr("shoal.kernels.norm.norm_sweeps_native.levels", lambda: ())
    assert not applies(grad, y)
    for mine, theirs in zip(ours, torch.ops.shoal.inverted_batch_norm_backward(grad, *arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_that_are_all_alike_add_up_to_their_number(level: str, layout: torch.memory_format) -> None:
    """Those of a mean over an image: what rounding does to one partial sum it would do to all of the same length."""
    y = torch.randn(2, 3, 40, 40).contiguous(memory_format=layout)
    grad = torch.full_like(y, 0.1, memory_format=torch.preserve_format)
    vectors = InvertedVectors(torch.ones(3), torch.zeros(3), torch.ones(3))
    with only(f"native,{level}"):
        _, of_shift = gradients_into(grad, torch.empty_like(grad), y, vectors, Activation("identity"))
    exact = torch.full((3,), 0.1).double() * 3200
    torch.testing.assert_close(of_shift.double(), exact, rtol=5e-7, atol=0.0)
