"""The native fused convolution: no less exact than plain float32, on every instruction set, layout and shape."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.kernels.norm import norm_conv_native
from shoal.kernels.norm.norm_conv_native import ConvWindow, NormConv
from shoal.kernels.norm.norm_operands import NormAffine, affine_of
from shoal.kernels.norm.norm_rows import native_row_stride as row_stride
from shoal.kernels.norm.statistics import MeasuredNorm
from shoal.lowlevel import allocations
from shoal.lowlevel.dispatch import VARIABLE
from shoal.lowlevel.native import LEVELS, levels
from tests.kernels.kernel_choice import only
from tests.kernels.threads import threads_of_torch
from tests.norm_reference import Case, assert_no_worse, fused
from tests.raising import raising

pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")
NAMES = ("y", "mean_y", "variance_y", "x", "mean", "scale", "shift", "weight", "bias")
each_level = pytest.mark.parametrize("level", levels())
each_kind = pytest.mark.parametrize(
    ("kernel", "winograd"), [(1, False), (3, False), (3, True)], ids=["1x1", "3x3", "3x3 Winograd"]
)


def window(kernel: int, **changes: Any) -> ConvWindow:
    return ConvWindow((1, 1), (kernel // 2,) * 2, (1, 1), 1)._replace(**changes)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """`x` as a slice of a wider channels_last tensor."""
    images, channels, height, width = x.shape
    wide = torch.full((images, height, width, channels + gap), torch.nan)[..., gap // 2 : gap // 2 + channels]
    wide.copy_(x.permute(0, 2, 3, 1))
    return wide.permute(0, 3, 1, 2)


def drawn(
    kernel: int,
    images: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    *,
    seed: int = 0,
    relu: bool = True,
    offset: float = 0.3,
    statistics: bool = True,
    normalise: bool = True,
    bias: bool = True,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    inner, outer = channels
    x = channels_last(draw(images, inner, *size) + offset)
    mean = x.mean((0, 2, 3)) if normalise else None
    scale = draw(inner) if normalise else None
    if scale is not None:
        scale[::5] = 0.0  # a channel that a learnt scale has turned off
    return Case(
        x=x,
        mean=mean,
        scale=scale,
        shift=draw(inner) if normalise else None,
        weight=draw(outer, inner, kernel, kernel) / (inner * kernel * kernel) ** 0.5,
        bias=draw(outer) if bias else None,
        relu=relu,
        grads=(
            channels_last(draw(images, outer, *size)),
            draw(outer) if statistics else None,
            draw(outer) if statistics else None,
        ),
    )


def of_level(level: str | None) -> AbstractContextManager[None]:
    return only(f"native,{level}") if level else nullcontext()


def native(
    case: Case, level: str | None = None, gap: int = 0, winograd: bool | None = None
) -> list[torch.Tensor | None]:
    """What `fused` gives; with a gap every tensor of pixels lies in a wider one."""
    grad, of_mean, of_variance = case.grads
    x, statistics = apart(case.x, gap), of_mean is not None
    if gap:
        grad = apart(grad, gap + 3)
    outer, (images, inner, *size) = case.weight.shape[0], case.x.shape
    out = apart(torch.zeros(images, outer, *size), gap) if gap else None
    into = apart(torch.zeros(images, inner, *size), gap) if gap else None
    moved = window(case.weight.shape[2])
    assert norm_conv_native.applies(x, case.weight, case.bias, moved)
    layer = NormConv(affine_of(case.mean, case.scale, case.shift), case.relu, case.weight, case.bias, moved)
    with of_level(level):
        y, mean_y, variance_y = norm_conv_native.forward(x, layer, statistics, out=out, winograd=winograd)
    assert mean_y.numel() == variance_y.numel() == (outer if statistics else 0)
    needs = [True, case.mean is not None, True, case.bias is not None]
    measured = None if of_mean is None or of_variance is None else MeasuredNorm(y, mean_y, of_mean, of_variance)
    with of_level(level):
        gradients = norm_conv_native.backward(grad, measured, x, layer, needs, grad_x=into, winograd=winograd)
    return [y, *((mean_y, variance_y) if statistics else (None, None)), *gradients]


Results = list[torch.Tensor | None]


def exact_and_naive(case: Case) -> tuple[Results, Results]:
    exact, naive = fused(case, torch.float64), fused(case, torch.float32)
    if case.grads[1] is None:
        exact[1:3] = naive[1:3] = [None, None]
    return exact, naive


def expect(
    case: Case,
    level: str | None = None,
    gap: int = 0,
    winograd: bool | None = None,
    known: tuple[Results, Results] | None = None,
) -> None:
    exact, naive = known or exact_and_naive(case)
    # Every result but y and the gradient of x adds up pixels, whose own rounding may all go one way.
    assert exact[0] is not None
    largest, walk = float(exact[0].abs().max()), (case.x.numel() / case.x.shape[1]) ** 0.5
    terms = dict.fromkeys(NAMES[4:], walk) | {"mean_y": largest, "variance_y": largest**2}
    assert_no_worse(NAMES, native(case, level, gap, winograd), naive, exact, terms)


@each_level
@settings(max_examples=settings().max_examples // 2)
@given(
    kernel=st.sampled_from([1, 3]),
    images=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    size=st.tuples(st.integers(1, 17), st.integers(1, 17)),
    seed=st.integers(0, 999),
    relu=st.booleans(),
    statistics=st.booleans(),
    normalise=st.booleans(),
    bias=st.booleans(),
    gap=st.sampled_from([0, 1, 16]),
    count=st.integers(1, 3),
    winograd=st.booleans(),
)
@example(3, 1, (1, 1), (8, 11), 0, False, True, True, False, 0, 1, False)  # a mean that nearly cancels
@example(1, 1, (1, 1), (1, 1), 0, True, True, True, True, 0, 2, False)
@example(3, 1, (17, 33), (1, 1), 0, True, True, True, False, 0, 2, False)
@example(3, 1, (17, 33), (1, 1), 0, True, True, True, False, 0, 2, True)
@example(3, 2, (8, 16), (1, 9), 0, True, True, True, False, 0, 1, True)
def test_it_is_as_exact_as_plain_float32(
    level: str,
    kernel: int,
    images: int,
    channels: tuple[int, int],
    size: tuple[int, int],
    seed: int,
    relu: bool,
    statistics: bool,
    normalise: bool,
    bias: bool,
    gap: int,
    count: int,
    winograd: bool,
) -> None:
    case = drawn(
        kernel,
        images,
        channels,
        size,
        seed=seed,
        relu=relu,
        statistics=statistics,
        normalise=normalise,
        bias=bias,
    )
    with threads_of_torch(count):
        expect(case, level, gap, winograd)


@cache
def large(
    kernel: int, images: int, channels: tuple[int, int], size: tuple[int, int]
) -> tuple[Case, tuple[Results, Results]]:
    """Drawn, and computed in PyTorch's ops, once for every level."""
    case = drawn(kernel, images, channels, size)
    return case, exact_and_naive(case)


@each_level
@pytest.mark.parametrize("winograd", [False, True], ids=["direct", "Winograd"])
@pytest.mark.parametrize(
    ("kernel", "images", "channels", "size"),
    [
        (1, 2, (300, 530), (9, 7)),  # several panels in both directions, the last of each not full
        (1, 3, (64, 16), (40, 40)),  # several strips a thread
        (3, 2, (270, 40), (5, 6)),
        (3, 1, (24, 290), (7, 5)),
        (3, 2, (32, 24), (40, 37)),  # strips with rows above and below
        (3, 5, (20, 18), (3, 3)),  # blocks of tiles of several images
        (3, 3, (190, 180), (17, 9)),  # a weight so wide that threads share the tiles
    ],
)
def test_panels_and_strips_meet(
    level: str, winograd: bool, kernel: int, images: int, channels: tuple[int, int], size: tuple[int, int]
) -> None:
    if winograd and kernel == 1:
        pytest.skip("Winograd's algorithm is for a 3 x 3")
    case, known = large(kernel, images, channels, size)
    with threads_of_torch(2):
        expect(case, level, winograd=winograd, known=known)


@each_level
@each_kind
def test_a_mean_of_a_thousand_deviations_costs_no_digits(level: str, winograd: bool, kernel: int) -> None:
    case = drawn(kernel, 2, (20, 24), (20, 19), offset=1e3)
    expect(case, level, winograd=winograd)
    expect(drawn(kernel, 2, (20, 24), (20, 19), offset=1e3, normalise=False), level, winograd=winograd)
    # The result's own mean and deviation, likewise: its bias is what makes them differ.
    shifted = Case(**{**vars(case), "bias": torch.full((24,), 1e3)})
    y, mean_y, variance_y, *_ = native(shifted, level, winograd=winograd)
    assert y is not None and mean_y is not None and variance_y is not None
    variance, mean = torch.var_mean(y.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean_y.double(), mean, rtol=2e-7, atol=0)
    torch.testing.assert_close(variance_y.double(), variance, rtol=1e-5, atol=0)


@each_level
@each_kind
def test_one_thread_and_two_agree_to_rounding(level: str, winograd: bool, kernel: int) -> None:
    case = drawn(kernel, 3, (40, 50), (15, 14))
    found = []
    for count in (1, 2):
        with threads_of_torch(count):
            found.append(native(case, level, winograd=winograd))
    for name, one, two in zip(NAMES, *found, strict=True):
        assert one is not None and two is not None
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5 * float(one.abs().max()), msg=name)
    again = native(case, level, winograd=winograd)
    assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True) if a is not None and b is not None)


@each_level
def test_what_lies_between_the_pixels_is_left_alone(level: str) -> None:
    case = drawn(3, 2, (6, 10), (4, 5))
    wide = torch.full((2, 4, 5, 30), 7.0)
    out = wide[..., 9:19].permute(0, 3, 1, 2)
    layer = NormConv(affine_of(case.mean, case.scale, case.shift), True, case.weight, None, window(3))
    with of_level(level):
        norm_conv_native.forward(case.x, layer, True, out=out)
    assert (wide[..., :9] == 7).all() and (wide[..., 19:] == 7).all() and not (wide[..., 9:19] == 7).any()


@each_level
def test_a_gradient_is_added_to_what_is_there(level: str) -> None:
    case = drawn(1, 2, (12, 8), (3, 3), statistics=False)
    fresh = native(case, level)[3]
    into = channels_last(torch.ones_like(case.x))
    layer = NormConv(affine_of(case.mean, case.scale, case.shift), True, case.weight, None, window(1))
    with of_level(level):
        found = norm_conv_native.backward(case.grads[0], None, case.x, layer, [True] * 4, grad_x=into)
    assert found[0] is into and fresh is not None
    torch.testing.assert_close(into, fresh + 1)


def test_a_weight_and_a_gradient_of_either_layout_give_the_same() -> None:
    case = drawn(3, 2, (10, 12), (6, 5))
    other = Case(
        **{
            **vars(case),
            "weight": channels_last(case.weight),
            "grads": (case.grads[0].contiguous(), *case.grads[1:]),
        }
    )
    for one, two in zip(native(case), native(other), strict=True):
        assert one is not None and two is not None and torch.equal(one, two)


@each_level
def test_winograd_gives_smaller_errors_than_a_direct_convolution(level: str) -> None:
    case = drawn(3, 2, (64, 48), (28, 30), statistics=False)
    exact = fused(case, torch.float64)
    for which in (0, 3, 7):  # y, and the gradients of x and of the weight
        truth = exact[which]
        assert truth is not None
        errors = []
        for winograd in (True, False):
            found = native(case, level, winograd=winograd)[which]
            assert found is not None
            errors.append(float((found.double() - truth).norm()))
        assert errors[0] < errors[1], NAMES[which]


@pytest.mark.parametrize("at", [(5, 5), (0, 0), (4, 11), (11, 6)])
def test_a_nan_reaches_what_it_does_in_a_direct_convolution(at: tuple[int, int]) -> None:
    case = drawn(3, 1, (16, 16), (12, 12), statistics=False, normalise=False, relu=False, bias=False)
    case.x[0, 3, at[0], at[1]] = torch.nan
    direct, transformed = (native(case, winograd=winograd)[0] for winograd in (False, True))
    assert direct is not None and transformed is not None
    assert direct.isnan().any() and torch.equal(direct.isnan(), transformed.isnan())


def test_whether_a_convolution_uses_winograd(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = channels_last(torch.ones(2, 32, 16, 16)), torch.ones(32, 32, 3, 3)
    winograd_pays = norm_conv_native.winograd_pays
    assert winograd_pays(x, weight) and norm_conv_native.backward_pays(x, weight, None, window(3))
    assert not winograd_pays(x, torch.ones(32, 32, 1, 1))
    assert not winograd_pays(x, torch.ones(8, 32, 3, 3)) and not winograd_pays(x[:, :8], torch.ones(32, 8, 3, 3))
    assert not winograd_pays(x[..., :4, :4], weight)  # the weight's transform would be the work
    monkeypatch.setenv(VARIABLE, "no-winograd")
    assert not winograd_pays(x, weight)
    case = drawn(3, 2, (32, 32), (16, 16))
    assert torch.equal(native(case)[0], native(case, winograd=False)[0])  # type: ignore[arg-type]


def test_nan_reaches_the_result_and_the_statistics() -> None:
    case = drawn(1, 1, (3, 4), (2, 2))
    case.x[0, 0, 0, 0] = torch.nan
    y, mean_y, variance_y, *_ = native(case)
    assert y is not None and mean_y is not None and variance_y is not None
    assert y[0, :, 0, 0].isnan().all() and not y[0, :, 1, 1].isnan().any()
    assert mean_y.isnan().all() and variance_y.isnan().all()


def test_results_are_channels_last_and_what_is_not_needed_is_none() -> None:
    case = drawn(1, 2, (5, 6), (3, 4), statistics=False)
    layer = NormConv(None, True, case.weight, None, window(1))
    y, mean_y, _ = norm_conv_native.forward(case.x, layer, False)
    assert y.is_contiguous(memory_format=torch.channels_last) and mean_y.shape == (0,)
    needs = [True, False, False, False]
    found = norm_conv_native.backward(case.grads[0], None, case.x, layer, needs)
    assert found[0] is not None and found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[1:] == (None,) * 5


def test_it_says_which_cases_it_does() -> None:
    x, weight = channels_last(torch.ones(2, 4, 5, 6)), torch.ones(3, 4, 3, 3)
    applies = norm_conv_native.applies
    assert applies(x, weight, None, window(3))
    assert applies(x[:, 1:], weight[:, 1:], None, window(3))
    assert not applies(x.contiguous(), weight, None, window(3))
    assert not applies(x.double(), weight.double(), None, window(3))
    assert not applies(x[:, :, ::2], weight, None, window(3))
    assert not applies(x[:0], weight, None, window(3))
    for change in ({"stride": (2, 1)}, {"padding": (0, 1)}, {"dilation": (1, 2)}, {"groups": 2}):
        assert not applies(x, weight, None, window(3, **change))
    assert not applies(x, torch.ones(3, 4, 5, 5), None, window(5))
    assert not applies(x, torch.ones(3, 4, 1, 3), None, window(1))


def test_pixels_apart_are_told_from_other_layouts() -> None:
    x = channels_last(torch.ones(2, 6, 3, 4))
    assert row_stride(x) == row_stride(x[:, 2:4]) == 6
    assert row_stride(torch.ones(3, 5, 1, 1)) == 5
    assert row_stride(torch.ones(3, 1, 2, 2)) == 1
    assert row_stride(x[:, :, :2]) is None and row_stride(x[:, :, :, 1:]) is None
    assert row_stride(x[:, ::2]) is None and row_stride(x.transpose(2, 3)) is None
    assert row_stride(x[:1].expand(2, -1, -1, -1)) is None


def test_the_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(1, 1, (9, 7), (3, 3))
    for level in levels():
        monkeypatch.setenv(VARIABLE, level)
        assert torch.equal(native(case)[0], native(case, level)[0])  # type: ignore[arg-type]
    absent = next((level for level in LEVELS if level not in levels()), "avx1024")
    with raising(InputError, absent):
        native(case, absent)


def test_all_it_needs_beside_its_results_is_a_workspace_of_the_step() -> None:
    case = drawn(1, 8, (64, 64), (16, 16))
    layer = NormConv(affine_of(case.mean, case.scale, case.shift), True, case.weight, None, window(1))
    _, changes = allocations.record(lambda: norm_conv_native.forward(case.x, layer, True))
    kept = case.x.nbytes + 2 * 64 * 4  # as many channels out as in
    assert sum(changes) == kept
    assert allocations.peak_bytes(changes) <= kept + (1 << 20)


@each_level
@each_kind
def test_gradients_that_are_all_alike_add_up_to_their_number(level: str, winograd: bool, kernel: int) -> None:
    """Those of a mean over an image: what rounding does to one partial sum it would do to all of the same length."""
    each = 0.1
    weight = torch.zeros(3, 3, kernel, kernel)
    weight[range(3), range(3), kernel // 2, kernel // 2] = (
        1.0  # the gradient of what is convolved is that of the result
    )
    x = channels_last(torch.randn(2, 3, 40, 40))
    grad = channels_last(torch.full((2, 3, 40, 40), each))
    ones = torch.ones(3)
    layer = NormConv(NormAffine(0 * ones, ones, 0 * ones), False, weight, None, window(kernel))
    with of_level(level):
        found = norm_conv_native.backward(grad, None, x, layer, [True, True, False, False], winograd=winograd)
    of_shift = found[3]
    assert of_shift is not None
    exact = torch.full((3,), each).double() * 3200
    torch.testing.assert_close(of_shift.double(), exact, rtol=3e-7, atol=0.0)


@each_level
@each_kind
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("channels", [(16, 32), (40, 24), (5, 7)])
def test_a_factor_gives_the_bits_of_the_product(
    level: str, kernel: int, winograd: bool, statistics: bool, channels: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (channels_last(torch.randn(2, n, 9, 14, generator=generator)) for n in channels)
    weight = torch.randn(channels[1], channels[0], kernel, kernel, generator=generator)
    affine = NormAffine(*(torch.rand(channels[0], generator=generator) for _ in range(3)))
    factor, *of_statistics = (torch.randn(channels[1], generator=generator) for _ in range(3))
    layer = NormConv(affine, True, weight, None, window(kernel))
    y, mean_y, _ = norm_conv_native.forward(x, layer, True)
    measured = MeasuredNorm(y, mean_y, *of_statistics) if statistics else None
    needs = [True, True, True, True]

    def gradients(grad: torch.Tensor, factor: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with of_level(level):
            return norm_conv_native.backward(grad, measured, x, layer, needs, factor=factor, winograd=winograd)

    *found, of_bias = gradients(grad, factor)
    *expected, bias = gradients(channels_last(grad * factor.view(1, -1, 1, 1)), None)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))  # type: ignore[arg-type]
    torch.testing.assert_close(of_bias, bias)
