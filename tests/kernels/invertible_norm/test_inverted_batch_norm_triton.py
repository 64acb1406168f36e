"""Triton's sweeps of the inverted batch norm against float64: on CUDA, and on the CPU in Triton's interpreter.

`tests.test_interpreter` runs these in the interpreter.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.kernels.invertible_norm.inverted_norms import BATCH_NORM, kept_from_zero, reconstruction_error, run
from shoal.kernels.invertible_norm.inverted_op import InvertedVectors, gradients_into
from shoal.kernels.norm.norm_operands import Activation, NormAffine
from shoal.kernels.norm.norm_sweeps import REFERENCE, apply_exactly, sweeps
from shoal.kernels.norm.norm_sweeps_native import NATIVE
from shoal.kernels.norm.norm_sweeps_triton import TRITON
from shoal.lowlevel import allocations, native
from tests.interpreter import (
    INTERPRETED,
    LAYOUTS,
    drawn,
    each_kind_of_shape,
    not_interpreted,
    on_device,
    with_triton,
)
from tests.kernels.kernel_choice import only
from tests.norm_reference import assert_no_worse

ACTIVATIONS = [("leaky_relu", 0.01), ("elu", 1.0), ("elu", 0.5), ("identity", 1.0)]
each_activation = pytest.mark.parametrize(("activation", "slope"), ACTIVATIONS)
# Where the forward pass, tried with each, tells them apart: in the interpreter some.
some_activations = pytest.mark.parametrize(
    ("activation", "slope"), [ACTIVATIONS[0], ACTIVATIONS[2]] if INTERPRETED else ACTIVATIONS
)
in_both_layouts = pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def vectors(channels: int, device: str, least: float = 0.1) -> list[torch.Tensor]:
    """Mean, scale, shift and inverse deviation; scales of both signs are kept from zero."""
    mean, scale, shift, deviation = torch.randn((4, channels), generator=torch.Generator().manual_seed(9))
    return [v.to(device) for v in (mean, kept_from_zero(scale, least), shift, deviation.abs() + 0.5)]


def activate(z: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    if activation == "identity":
        return z
    return nn.functional.elu(z, slope) if activation == "elu" else nn.functional.leaky_relu(z, slope)


def plain(layer: nn.Module, x: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """The same in PyTorch's ops, which save whatever they like."""
    again = copy.copy(layer)
    again._parameters = {"bias": layer.bias}
    again.weight = kept_from_zero(layer.weight, layer.eps)  # type: ignore[arg-type]
    return activate(again(x), activation, slope)


@on_device
@with_triton
@each_kind_of_shape
@pytest.mark.parametrize(
    ("activation", "slope", "offset"),
    [("leaky_relu", 0.01, 0.0), ("leaky_relu", 0.3, 1e3), ("elu", 1.0, 0.0), ("elu", 0.5, 1e3), ("identity", 1.0, 0.0)],
)
def test_forward_is_as_exact_as_plain_float32(
    device: str, shape: tuple[int, ...], layout: str, gap: int, activation: str, slope: float, offset: float
) -> None:
    x = drawn(shape, layout, 0, device, gap, offset)
    mean, scale, shift, _ = vectors(shape[1], device)
    mean += offset
    whole = torch.full((shape[0], shape[1] + gap, *shape[2:]), 7.0, device=device)
    whole = whole.contiguous(memory_format=LAYOUTS[layout])
    y = whole[:, gap // 2 : gap // 2 + shape[1]]
    assert TRITON.applies(x, y)
    TRITON.apply(x, NormAffine(mean, scale, shift), None, Activation(activation, slope), y)

    def expected(dtype: torch.dtype) -> torch.Tensor:
        middle, factor, added = (v.to(dtype).view(1, -1, *[1] * (x.dim() - 2)) for v in (mean, scale, shift))
        return activate((x.to(dtype) - middle) * factor + added, activation, slope)

    assert_no_worse(["y"], [y], [expected(torch.float32)], [expected(torch.float64)])
    assert (whole == 7).sum() >= whole.numel() - y.numel()  # the channels in addition to it stay
    over = x.clone(memory_format=torch.preserve_format)
    assert TRITON.applies(over, over)
    TRITON.apply(over, NormAffine(mean, scale, shift), None, Activation(activation, slope), over)
    assert torch.equal(over, y)


@on_device
@with_triton
@each_kind_of_shape
@each_activation
@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_is_as_exact_as_plain_float32(
    device: str, shape: tuple[int, ...], layout: str, gap: int, activation: str, slope: float, frozen: bool
) -> None:
    grad, y = drawn(shape, layout, 0, device, gap), drawn(shape, layout, 1, device, gap)
    if activation == "elu":
        y.copy_(nn.functional.elu(y, slope))  # nothing else comes out of one
    _, scale, shift, deviation = vectors(shape[1], device)
    options = Activation(activation, slope)

    def expected(dtype: torch.dtype) -> list[torch.Tensor]:
        operands = [t.to(dtype).contiguous() for t in (grad, y, scale, shift, deviation)]
        result, vectors = torch.empty_like(operands[1]), InvertedVectors(*operands[2:])
        with only("reference"):
            sums = gradients_into(operands[0], result, operands[1], vectors, options, frozen=frozen)
        return [result, *sums]

    over = grad.clone(memory_format=torch.preserve_format)
    of_x = drawn(shape, layout, 2, device, gap)
    arguments = (y, InvertedVectors(scale, shift, deviation), options)
    assert sweeps(grad, y) is TRITON
    ours = [of_x, *gradients_into(grad, of_x, *arguments, frozen=frozen)]
    assert ours[1].dtype == ours[2].dtype == torch.float64
    terms = {"scale": (y.numel() / shape[1]) ** 0.5 * float((1 / scale).abs().max()), "shift": 1.0}
    assert_no_worse(["x", "scale", "shift"], ours, expected(torch.float32), expected(torch.float64), terms)
    again = gradients_into(over, over, *arguments, frozen=frozen)
    assert all(torch.equal(a, b) for a, b in zip((over, *again), ours, strict=True))


@on_device
@with_triton
@in_both_layouts
@pytest.mark.parametrize(("activation", "slope"), [("leaky_relu", 0.01), ("leaky_relu", 0.3), ("identity", 1.0)])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("far", [0.0, 1e3])
def test_a_layer_s_gradients_are_off_by_no_more_than_plain_float32_s_and_what_the_bound_tells(
    device: str, layout: str, activation: str, slope: float, batch: int, far: float
) -> None:
    x = drawn((batch, 37, 7, 5), layout, batch, device, 0, far)
    layer = nn.BatchNorm2d(37).to(device)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(37, generator=generator))
        for first, factor in enumerate((1e-3, -1e-6, 0.0)):
            layer.weight[first::7] *= factor
    rows, dims = x.numel() // 37, (0, 2, 3)
    wide = copy.deepcopy(layer).double()
    weights = torch.randn(x.shape, generator=generator).to(device)
    y = plain(copy.deepcopy(wide), x.double(), activation, slope)
    weights *= (y.abs() > 1e-3 * y.abs().amax(dims, keepdim=True)).float()  # which side of the kink is no error

    def step(call: object, layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
        y = call(layer, x, activation, slope)  # type: ignore[operator]
        gradients = torch.autograd.grad(y, [x, layer.weight, layer.bias], weights.to(x.dtype))
        return [y.detach(), *gradients, layer.running_mean, layer.running_var]  # type: ignore[list-item]

    exact, theirs, ours = step(plain, wide, x.double()), step(plain, layer, x), step(run, layer, x)
    inexact = reconstruction_error(
        kept_from_zero(layer.weight.double(), layer.eps), layer.bias, activation, torch.float32
    )
    # What each channel's gradients can be off where each normalised input is off by that.
    summed = weights.abs().double().sum(dims)
    gamma_invstd = kept_from_zero(wide.weight.detach(), layer.eps).abs() / x.double().std(dims, correction=0)
    none = torch.zeros(1, device=device)
    told = [none, gamma_invstd * inexact * (exact[2].abs() + 6 * summed) / rows, inexact * summed, none, none, none]
    names = ("y", "x", "weight", "bias", "mean", "variance")
    for name, mine, other, right, bound in zip(names, ours, theirs, exact, told, strict=True):
        allowed = (other.double() - right).abs().max() + 4e-6 * right.abs().max()
        error = (mine.double() - right).abs()
        if error.dim() > 1:
            error = error.amax(dims)
        assert (error <= allowed + bound).all(), name


@on_device
@with_triton
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_elu_and_its_inverse_keep_relative_accuracy_near_zero(device: str, alpha: float) -> None:
    z = torch.cat([-torch.logspace(-30, 0.9, 800), torch.linspace(-0.51, -0.49, 95)]).to(device)
    zero, one, y = torch.zeros_like(z), torch.ones_like(z), torch.empty_like(z)
    TRITON.apply(z[None], NormAffine(zero, one, zero), None, Activation("elu", alpha), y[None])
    torch.testing.assert_close(y.double(), alpha * torch.expm1(z.double()), rtol=5e-7, atol=0)
    # A single row: the sums are what is made again, times its gradient.
    rest = InvertedVectors(one, zero, one), Activation("elu", alpha)
    of_scale, of_shift = gradients_into(one[None], torch.empty_like(z)[None], y[None], *rest, frozen=True)
    again = torch.log1p(y.double() / alpha)
    torch.testing.assert_close(of_shift, y.double() + alpha, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(of_scale / of_shift, again, rtol=1e-6, atol=0)


@on_device
@with_triton
@in_both_layouts
@some_activations
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_tensors_are_rounded_once(
    device: str, layout: str, activation: str, slope: float, dtype: torch.dtype
) -> None:
    x, grad = (drawn((3, 37, 9, 7), layout, seed, device).to(dtype) for seed in range(2))
    mean, scale, shift, deviation = vectors(37, device)
    y, of_x = torch.empty_like(x), torch.empty_like(x)
    TRITON.apply(x, NormAffine(mean, scale, shift), None, Activation(activation, slope), y)
    right = torch.empty_like(x, dtype=torch.float64)
    affine = NormAffine(*(v.double() for v in (mean, scale, shift)))
    apply_exactly(x.double(), affine, None, Activation(activation, slope), right)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), right, rtol=eps, atol=1e-6)
    rest = InvertedVectors(scale, shift, deviation), Activation(activation, slope)
    exact = torch.empty_like(x, dtype=torch.float32)
    with only("reference"):
        expected = gradients_into(grad.float(), exact, y.float(), *rest)
    found = gradients_into(grad, of_x, y, *rest)
    torch.testing.assert_close(of_x.float(), exact, rtol=eps, atol=1e-5)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-3)


@on_device
@with_triton
@in_both_layouts
@pytest.mark.parametrize("overwrite", [False, True])
def test_only_the_result_and_vectors_are_saved(device: str, layout: str, overwrite: bool) -> None:
    x = drawn((4, 8, 6, 6), layout, 0, device).requires_grad_() * 1.0
    layer, saved = nn.BatchNorm2d(8).to(device), []
    assert sweeps(x, x) is TRITON
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = run(layer, x, "elu", 1.0, overwrite)
    assert sorted(t.numel() for t in saved) == [8, 8, 8, y.numel()]
    assert {t.data_ptr() for t in saved if t.numel() > 8} == {y.data_ptr()}
    assert (y.data_ptr() == x.data_ptr()) == overwrite


@with_triton
@pytest.mark.skipif(not INTERPRETED, reason="counts the CPU's allocations, where Triton runs interpreted")
@in_both_layouts
@some_activations
def test_over_their_operands_they_allocate_vectors_alone(layout: str, activation: str, slope: float) -> None:
    x, grad = drawn((8, 16, 12, 12), layout, 0, "cpu"), drawn((8, 16, 12, 12), layout, 1, "cpu")
    arguments, options = (torch.ones(16), torch.zeros(16)), (1e-5, activation, slope)
    (y, _, variance), changes = allocations.record(lambda: BATCH_NORM.forward_(x, *arguments, None, None, *options))
    assert y.data_ptr() == x.data_ptr()
    assert allocations.peak_bytes(changes) <= x.nbytes // 16
    deviation = torch.rsqrt(variance + 1e-5)
    found, changes = allocations.record(lambda: BATCH_NORM.backward_(grad, y, *arguments, deviation, False, *options))
    assert found[0].data_ptr() == grad.data_ptr()
    assert allocations.peak_bytes(changes) <= x.nbytes // 16


@on_device
@with_triton
@in_both_layouts
@some_activations
def test_the_ops_call_them_and_agree_with_pytorchs_own(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: str, activation: str, slope: float
) -> None:
    x, grad = drawn((3, 11, 5, 6), layout, 0, device), drawn((3, 11, 5, 6), layout, 1, device)
    layer = nn.BatchNorm2d(11).to(device)

    def step() -> list[torch.Tensor]:
        ours, leaf = copy.deepcopy(layer), x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = run(ours, leaf, activation, slope)
        gradients = torch.autograd.grad(y, [leaf, *ours.parameters()], grad)
        ops = torch.ops.shoal.inverted_batch_norm(x, ours.weight.detach(), None, None, None, 1e-5, activation, slope)
        return [y.detach(), *gradients, *ours.buffers(), *ops]

    asked: list[str] = []
    for name in ("apply", "reduce", "apply_backward"):
        real = getattr(TRITON, name)
        monkeypatch.setattr(TRITON, name, lambda *a, real=real, name=name: asked.append(name) or real(*a))
    ours = step()
    assert set(asked) == {"apply", "reduce", "apply_backward"}
    monkeypatch.setenv("SHOAL_KERNELS", "native")
    for own, other in zip(ours, step(), strict=True):
        assert own.stride() == other.stride()
        torch.testing.assert_close(own, other, rtol=1e-5, atol=2e-5)


@on_device
@with_triton
def test_a_nan_stays_one(device: str) -> None:
    x = torch.tensor([[[1.0, torch.nan, -1.0]]], device=device)
    one = torch.ones(1, device=device)
    for activation, slope in ACTIVATIONS:
        y, of_x = torch.empty_like(x), torch.empty_like(x)
        TRITON.apply(x, NormAffine(0 * one, one, 0 * one), None, Activation(activation, slope), y)
        assert y.isnan().tolist() == [[[False, True, False]]]
        rest = y, InvertedVectors(one, 0 * one, one), Activation(activation, slope)
        gradients_into(x, of_x, *rest, frozen=True)
        assert of_x.isnan().tolist() == [[[False, True, False]]]
        found = gradients_into(torch.ones_like(x), of_x, *rest)
        assert found[0].isnan().all() and of_x.isnan().all()


@on_device
@with_triton
def test_what_they_do_not_take_is_left_to_others(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = drawn((2, 3, 4, 5), "contiguous", 0, device)
    other = drawn((2, 3, 4, 5), "channels_last", 0, device)
    applies = TRITON.applies
    assert applies(x, x) and applies(x.half(), x.half())
    assert not applies(x, other) and not applies(x.double(), x.double())
    assert not applies(x.transpose(2, 3), x.transpose(2, 3)) and not applies(x[:0], x[:0])
    assert sweeps(x.double(), x.double()) is REFERENCE
    monkeypatch.setenv("SHOAL_KERNELS", "native")
    assert sweeps(x.half(), x.half()) is REFERENCE


@not_interpreted
def test_the_cpu_has_its_own() -> None:
    x = torch.randn(2, 3, 4, 5)
    own = NATIVE if native.library() is not None else REFERENCE
    assert sweeps(x, x) is own


@on_device
@with_triton
@in_both_layouts
@pytest.mark.parametrize("groups", [3, 6])
@pytest.mark.parametrize(("activation", "slope"), ACTIVATIONS[:2])
def test_norms_of_samples_are_as_exact_as_plain_float32(
    device: str, layout: str, groups: int, activation: str, slope: float
) -> None:
    x, grad = (drawn((2, 6, 7, 9), layout, seed, device, 0) for seed in range(2))
    norm = nn.GroupNorm(groups, 6, device=device)
    with torch.no_grad():
        norm.weight.copy_(vectors(6, device)[1])
        norm.bias.copy_(vectors(6, device)[2])
    assert sweeps(x, x) is TRITON

    def step(dtype: torch.dtype | None) -> list[torch.Tensor]:
        own = copy.deepcopy(norm).to(dtype or torch.float32)
        leaf = x.detach().to(dtype or torch.float32).requires_grad_()
        y = run(own, leaf, activation, slope) if dtype is None else activate(own(leaf), activation, slope)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *own.parameters()], grad.to(y.dtype))]

    names = ["y", "x", "weight", "bias"]
    assert_no_worse(names, step(None), step(torch.float32), step(torch.float64), relative=2e-5)
