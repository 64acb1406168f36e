"""The native sweeps: no less exact than plain float32, over slices of channels too, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.kernels.norm.norm_operands import IDENTITY, RELU, Activation, NormAffine, NormMoves, NormRead
from shoal.kernels.norm.norm_sweeps import REFERENCE
from shoal.kernels.norm.norm_sweeps_native import NATIVE as passes
from shoal.lowlevel.native import levels
from tests.kernels.kernel_choice import only
from tests.norm_reference import assert_no_worse, row
from tests.raising import raising

pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")
each_level = pytest.mark.parametrize("level", levels())


def pixels(
    shape: tuple[int, int, int, int], seed: int, gap: int, offset: float = 0.0, planes: bool = False
) -> torch.Tensor:
    """(N, C, H, W), channels_last or in planes, a slice of the channels of a tensor that has `gap` more."""
    images, channels, height, width = shape
    if planes:
        draw = torch.Generator().manual_seed(seed)
        whole = torch.full((images, channels + gap, height, width), torch.nan)[:, gap // 2 : gap // 2 + channels]
        return whole.copy_(torch.randn(whole.shape, generator=draw) + offset)
    wide = torch.full((images, height, width, channels + gap), torch.nan)[..., gap // 2 : gap // 2 + channels]
    wide.copy_(torch.randn(wide.shape, generator=torch.Generator().manual_seed(seed)) + offset)
    return wide.permute(0, 3, 1, 2)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 14), st.integers(1, 14))


@each_level
@settings(max_examples=40)
@given(
    shapes,
    st.integers(0, 999),
    st.sampled_from([0, 1, 16]),
    st.sampled_from([0.0, 1e3]),
    st.integers(1, 3),
    st.booleans(),
)
@example((4, 33, 30, 31), 0, 0, 1e3, 2, False)  # several blocks of rows a thread
@example((2, 3, 90, 131), 0, 0, 1e3, 2, True)  # several blocks of a plane
@example((1, 1, 1, 1), 0, 0, 0.0, 2, False)
def test_statistics_survive_a_mean_of_a_thousand_deviations(
    level: str, shape: tuple[int, int, int, int], seed: int, gap: int, offset: float, count: int, planes: bool
) -> None:
    x = pixels(shape, seed, gap, offset, planes)
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with only(f"native,{level}"):
            found = passes.statistics(x)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0].double(), mean, rtol=2e-7, atol=1e-6)
    torch.testing.assert_close(found[1].double(), variance, rtol=1e-5, atol=1e-9)


@each_level
@settings(max_examples=40)
@given(
    *(shapes, st.integers(0, 999), st.sampled_from([0, 1, 16]), st.booleans(), st.booleans()),
    *(st.sampled_from([0.0, 1e3]), st.booleans()),
)
def test_normalise_and_its_gradient_are_as_exact_as_plain_float32(
    level: str,
    shape: tuple[int, int, int, int],
    seed: int,
    gap: int,
    relu: bool,
    adds: bool,
    offset: float,
    planes: bool,
) -> None:
    x, grad = pixels(shape, seed, gap, offset, planes), pixels(shape, seed + 1, gap, 0.0, planes)
    residual = pixels(shape, seed + 2, 0, 0.0, planes) if adds else None
    generator = torch.Generator().manual_seed(seed)
    scale, shift = (torch.randn(shape[1], generator=generator) for _ in range(2))
    mean = x.mean((0, 2, 3))
    scale[::5] = 0.0

    def plain(dtype: torch.dtype) -> list[torch.Tensor | None]:
        kept = (x, mean, scale, shift, residual)
        leaves = [None if tensor is None else tensor.detach().to(dtype).requires_grad_() for tensor in kept]
        z = (leaves[0] - row(leaves[1])) * row(leaves[2]) + row(leaves[3])  # type: ignore[arg-type]
        z = z if leaves[4] is None else z + leaves[4]
        z = z.relu() if relu else z
        gradients = torch.autograd.grad(z, [leaf for leaf in leaves if leaf is not None], grad.to(dtype))
        return [z.detach(), *gradients, *([] if adds else [None])]

    z, of_x, of_residual = (pixels(shape, seed, gap, 0.0, planes) for _ in range(3))
    affine, activation = NormAffine(mean, scale, shift), RELU if relu else IDENTITY
    read = NormRead(x, affine, activation, z if relu and adds else None)
    with only(f"native,{level}"):
        passes.apply(x, affine, residual, activation, z)
        of_scale, of_shift = passes.reduce(grad, read, of_x, of_residual if adds else None)
    ours = [z, of_x, -scale * of_shift, of_scale, of_shift, of_residual if adds else None]
    names = ("z", "x", "mean", "scale", "shift", "residual")
    terms = dict.fromkeys(("mean", "scale", "shift"), (x.numel() / x.shape[1]) ** 0.5)
    assert_no_worse(names, ours, plain(torch.float32), plain(torch.float64), terms)


@pytest.mark.parametrize("activation", [IDENTITY, RELU, Activation("leaky_relu", 0.1), Activation("elu", 0.7)])
@pytest.mark.parametrize("kernel", [passes, REFERENCE], ids=["native", "reference"])
@pytest.mark.parametrize("planes", [False, True])
def test_a_moved_gradient_is_the_scaled_sum_of_product_and_line(
    kernel: Any, activation: Activation, planes: bool
) -> None:
    x, grad, of_x = (pixels((2, 19, 5, 6), seed, 3, 0.0, planes) for seed in range(3))
    affine, moves = NormAffine(*torch.randn(3, 19)), NormMoves(*torch.randn(2, 19))
    read = NormRead(x, affine, activation)
    sums = kernel.reduce(grad, read)
    kernel.apply_backward(grad, read, moves, of_x)
    centred = x.double() - row(affine.mean)
    line = (centred * row(affine.scale) + row(affine.shift)).requires_grad_()
    (da,) = torch.autograd.grad(activation.apply_(line * 1.0), line, grad.double())
    expected = (da + centred * row(moves.slope) + row(moves.constant)) * row(affine.scale)
    torch.testing.assert_close(of_x.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.of_scale.double(), (da * centred).sum((0, 2, 3)), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums.of_shift.double(), da.sum((0, 2, 3)), rtol=1e-5, atol=1e-4)


@each_level
def test_what_is_not_wanted_is_not_written(level: str) -> None:
    x, grad = pixels((2, 19, 5, 6), 0, 0), pixels((2, 19, 5, 6), 1, 0)
    affine = NormAffine(*torch.randn(3, 19))
    whole = [torch.empty_like(x), torch.empty_like(x)]
    with only(f"native,{level}"):
        expected = passes.reduce(grad, NormRead(x, affine, RELU), *whole)
        found = passes.reduce(grad, NormRead(x, affine, RELU))
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


def test_tensors_of_two_shapes_are_refused() -> None:
    x, out = pixels((2, 19, 5, 6), 0, 0), pixels((2, 20, 5, 6), 0, 0)
    with pytest.raises(InputError):
        passes.apply(x, NormAffine(*torch.randn(3, 19)), None, RELU, out)


def test_tensors_of_two_layouts_and_other_dtypes_are_left_to_others() -> None:
    x, rows = torch.ones(2, 3, 4, 5), pixels((2, 3, 4, 5), 0, 1)
    assert passes.applies(rows, pixels((2, 3, 4, 5), 0, 0)) and passes.applies(x, x[:, :1]) and passes.applies(x[0])
    assert not passes.applies(rows, x) and not passes.applies(x, x.double())
    assert not passes.applies(x.transpose(2, 3)) and not passes.applies(x[:, :, ::2]) and not passes.applies(x[:0])
    with raising(InputError, "channels_last"):
        passes.apply(x, NormAffine(*torch.randn(3, 3)), None, RELU, rows)


@each_level
@pytest.mark.parametrize("planes", [False, True])
def test_gradients_that_are_all_alike_add_up_to_their_number(level: str, planes: bool) -> None:
    """Those of a mean over an image: what rounding does to one partial sum it would do to all of the same length."""
    x, grad = (pixels((4, 5, 32, 32), 0, 0, 0.0, planes) for _ in range(2))
    each = torch.tensor([0.1, 0.3, 0.7, 1 / 3, 1e-3])
    grad.copy_(row(each).expand_as(grad))
    affine = NormAffine(torch.zeros(5), torch.ones(5), torch.zeros(5))
    with only(f"native,{level}"):
        of_scale, of_shift = passes.reduce(grad, NormRead(x, affine, IDENTITY))
    torch.testing.assert_close(of_shift.double(), each.double() * 4096, rtol=3e-7, atol=0.0)
    products = grad.double() * x.double()
    allowed = 3e-7 * products.abs().sum((0, 2, 3))
    assert bool(((of_scale.double() - products.sum((0, 2, 3))).abs() <= allowed).all())
