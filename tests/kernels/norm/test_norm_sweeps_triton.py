"""Triton's sweeps against float64: on CUDA where there is one, on the CPU in Triton's interpreter.

`tests.test_interpreter` runs these in the interpreter.
"""

from __future__ import annotations

import sys

import pytest
import torch

from shoal.errors import InputError
from shoal.kernels.norm.norm_act import activated, norm_act
from shoal.kernels.norm.norm_operands import IDENTITY, RELU, Activation, NormAffine, NormMoves, NormRead
from shoal.kernels.norm.norm_sweeps import REFERENCE, sweeps
from shoal.kernels.norm.norm_sweeps_triton import TRITON, TRITON_KERNELS
from shoal.kernels.norm.statistics import MeasuredNorm, measure, statistics, whole_gradient
from shoal.lowlevel import triton_launch
from tests.interpreter import drawn, each_shape, not_interpreted, on_device, with_triton
from tests.kernels_elsewhere import compiled_for, each_capability, kernels_of, there
from tests.norm_reference import assert_no_worse, row
from tests.raising import raising


def vectors(channels: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mean, scale and shift; some scales are zero, half are negative."""
    mean, scale, shift = torch.randn((3, channels), generator=torch.Generator().manual_seed(9))
    scale[::5] = 0.0
    return mean.to(device), scale.to(device), shift.to(device)


def broad(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))


@on_device
@with_triton
@each_shape
def test_statistics_survive_a_mean_of_a_thousand_deviations(
    device: str, shape: tuple[int, ...], layout: str, gap: int
) -> None:
    x = drawn(shape, layout, 0, device, gap, 1e3)
    assert TRITON.applies(x)
    mean, variance = TRITON.statistics(x)
    assert mean.untyped_storage().data_ptr() != variance.untyped_storage().data_ptr()  # results of an op share nothing
    dims = [0, *range(2, x.dim())]
    true_variance, true_mean = torch.var_mean(x.double(), dims, correction=0)
    torch.testing.assert_close(mean.double(), true_mean, rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(variance.double(), true_variance, rtol=3e-6, atol=1e-9)


@on_device
@with_triton
@each_shape
@pytest.mark.parametrize(("relu", "adds", "offset"), [(True, False, 0.0), (True, True, 1e3), (False, True, 0.0)])
def test_normalise_and_its_gradient_are_as_exact_as_plain_float32(
    device: str, shape: tuple[int, ...], layout: str, gap: int, relu: bool, adds: bool, offset: float
) -> None:
    x, grad = drawn(shape, layout, 0, device, gap, offset), drawn(shape, layout, 1, device, gap)
    residual = drawn(shape, layout, 2, device, gap) if adds else None
    mean, scale, shift = vectors(shape[1], device)
    mean += offset

    def plain(dtype: torch.dtype) -> list[torch.Tensor]:
        kept = (x, mean, scale, shift, *([] if residual is None else [residual]))
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in kept]
        z = (leaves[0] - broad(leaves[1], x)) * broad(leaves[2], x) + broad(leaves[3], x)
        z = z + leaves[4] if adds else z
        z = z.relu() if relu else z
        return [z.detach(), *torch.autograd.grad(z, leaves, grad.to(dtype))]

    z, of_x, masked = (drawn(shape, layout, 3, device, gap) for _ in range(3))
    assert TRITON.applies(x, grad, z, of_x, masked)
    affine, activation = NormAffine(mean, scale, shift), RELU if relu else IDENTITY
    TRITON.apply(x, affine, residual, activation, z)
    read = NormRead(x, affine, activation, z if adds else None)
    of_scale, of_shift = TRITON.reduce(grad, read, of_x, masked if adds else None)
    ours = [z, of_x, -scale * of_shift, of_scale, of_shift, *([masked] if adds else [])]
    names = ("z", "x", "mean", "scale", "shift", "residual")[: len(ours)]
    terms = dict.fromkeys(("mean", "scale", "shift"), (x.numel() / x.shape[1]) ** 0.5)
    assert_no_worse(names, ours, plain(torch.float32), plain(torch.float64), terms)


@on_device
@with_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
def test_narrow_tensors_are_rounded_once(device: str, dtype: torch.dtype, layout: str) -> None:
    x, grad, residual = (drawn((3, 37, 9, 7), layout, seed, device).to(dtype) for seed in range(3))
    mean, variance = TRITON.statistics(x)
    assert mean.dtype == variance.dtype == torch.float32
    torch.testing.assert_close(mean.double(), x.double().mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    _, scale, shift = vectors(37, device)
    z, of_x = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    affine = NormAffine(mean, scale, shift)
    TRITON.apply(x, affine, residual, RELU, z)
    exact = ((x.double() - row(mean)) * row(scale) + row(shift) + residual.double()).relu()
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(z.double(), exact, rtol=step, atol=1e-6)
    of_scale, of_shift = TRITON.reduce(grad, NormRead(x, affine, RELU, z), of_x)
    da = grad.double() * (z > 0)
    torch.testing.assert_close(of_x.double(), da * row(scale), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_shift.double(), da.sum((0, 2, 3)), rtol=1e-5, atol=1e-4)
    centred = x.double() - row(mean)
    torch.testing.assert_close(of_scale.double(), (da * centred).sum((0, 2, 3)), rtol=1e-5, atol=1e-4)
    slope, constant, _ = vectors(37, device)
    moved = torch.empty_like(x)
    TRITON.apply_backward(grad, NormRead(x, affine, RELU, z), NormMoves(slope, constant), moved)
    line = (da + centred * row(slope) + row(constant)) * row(scale)
    torch.testing.assert_close(moved.double(), line, rtol=step, atol=1e-6)


@on_device
@with_triton
@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("adds", [False, True])
def test_the_ops_call_them_and_agree_with_pytorchs_own(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: str, adds: bool
) -> None:
    xs = [drawn((2, count, 5, 6), layout, count, device).requires_grad_() for count in (3, 8)]
    leaves = [*xs, *(vector.requires_grad_() for vector in vectors(11, device))]
    residual = drawn((2, 11, 5, 6), layout, 7, device).requires_grad_() if adds else None
    wanted = [*leaves, *([] if residual is None else [residual])]

    def run() -> list[torch.Tensor]:
        z = norm_act(xs, *leaves[2:], residual)
        mean, variance = statistics(xs[1])
        loss = z.square().mean((2, 3)).sum() + (mean * variance).sum()
        parts = (
            measure(xs[0].detach()),
            whole_gradient(xs[1].detach(), MeasuredNorm(*(t.detach() for t in (xs[1], mean, mean, variance)))),
        )
        a = activated(xs[0].detach(), NormAffine(*(leaf.detach()[:3] for leaf in leaves[2:])), True, torch.float32)
        return [z, mean, variance, *parts[0], parts[1], a, *torch.autograd.grad(loss, wanted)]

    asked: list[str] = []

    for name in ("statistics", "apply", "reduce"):
        real = getattr(TRITON, name)
        monkeypatch.setattr(TRITON, name, lambda *a, real=real, name=name: asked.append(name) or real(*a))
    ours = run()
    assert {"statistics", "apply", "reduce"} <= set(asked)
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    for own, other in zip(ours, run(), strict=True):
        assert own.stride() == other.stride()
        torch.testing.assert_close(own, other, rtol=1e-5, atol=2e-5)


@on_device
@with_triton
@pytest.mark.parametrize("adds", [False, True])
def test_whole_gradients_of_narrow_tensors_agree_with_pytorchs_own(
    monkeypatch: pytest.MonkeyPatch, device: str, adds: bool
) -> None:
    xs = [drawn((2, count, 5, 6), "channels_last", count, device).bfloat16().requires_grad_() for count in (3, 8)]
    residual = drawn((2, 11, 5, 6), "channels_last", 7, device).bfloat16().requires_grad_() if adds else None
    grad = drawn((2, 11, 5, 6), "channels_last", 8, device).bfloat16()
    variance, mean = torch.var_mean(torch.cat(xs, 1).detach().float(), (0, 2, 3), correction=0)
    _, weight, shift = (vector.requires_grad_() for vector in vectors(11, device))
    leaves = [*xs, weight, shift, *([] if residual is None else [residual])]

    def run() -> tuple[torch.Tensor, ...]:
        scale = weight * torch.rsqrt(variance + 1e-5)
        z = norm_act(xs, mean, scale, shift, residual, True, variance, 1e-5)
        return torch.autograd.grad(z, leaves, grad)

    asked: list[str] = []
    real = TRITON.apply_backward
    monkeypatch.setattr(TRITON, "apply_backward", lambda *a: asked.append("apply_backward") or real(*a))
    ours = run()
    assert len(asked) == len(xs)
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    for own, other in zip(ours, run(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-5)


@on_device
@with_triton
@pytest.mark.parametrize("activation", [Activation("leaky_relu", 0.1), Activation("elu", 0.7)])
def test_other_activations_agree_with_pytorchs_own(device: str, activation: Activation) -> None:
    x, grad = (drawn((2, 11, 5, 6), "channels_last", seed, device) for seed in range(2))
    read = NormRead(x, NormAffine(*vectors(11, device)), activation)
    moves = NormMoves(*vectors(11, device)[:2])
    found = []
    for kernel in (TRITON, REFERENCE):
        z, of_x = torch.empty_like(x), torch.empty_like(x)
        kernel.apply(x, read.affine, None, activation, z)
        kernel.apply_backward(grad, read, moves, of_x)
        found.append([z, of_x, *(vector.float() for vector in kernel.reduce(grad, read))])
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=2e-5)


@on_device
@with_triton
def test_a_nan_stays_one(device: str) -> None:
    x = torch.tensor([[[1.0, torch.nan, -1.0]]], device=device)
    one, out = torch.ones(1, device=device), torch.empty_like(x)
    TRITON.apply(x, NormAffine(0 * one, one, 0 * one), None, RELU, out)
    assert out.isnan().tolist() == [[[False, True, False]]] and out[0, 0, 2] == 0


@on_device
@with_triton
def test_what_they_do_not_read_is_left_to_others(device: str) -> None:
    x = drawn((2, 3, 4, 5), "contiguous", 0, device)
    other = drawn((2, 3, 4, 5), "channels_last", 0, device)
    assert TRITON.applies(x) and TRITON.applies(x, x.half())
    assert not TRITON.applies(x, other)  # one layout for all
    assert not TRITON.applies(x.double()) and not TRITON.applies(x[:0])
    assert not TRITON.applies(x.transpose(2, 3)) and not TRITON.applies(x[:, :, ::2])
    assert not TRITON.applies(x[0, 0, 0]) and not TRITON.applies(x[:, :, :1, :1].expand(2, 3, 4, 5))
    with raising(InputError, "channels_last"):
        TRITON.apply(x, NormAffine(*vectors(3, device)), None, RELU, other)
    with pytest.raises(InputError):
        TRITON.apply(x, NormAffine(*vectors(3, device)), None, RELU, x[:1])


@on_device
@with_triton
def test_the_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    x = drawn((2, 3, 4, 5), "contiguous", 0, device)
    assert sweeps(x) is TRITON
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    assert sweeps(x) is REFERENCE


def test_without_triton_pytorchs_own_kernels_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shoal.kernels.norm.norm_triton_kernels", None)  # importing it raises ImportError
    triton_launch._imported.cache_clear()
    try:
        assert TRITON_KERNELS.here() is None
        mean, variance = measure(torch.ones(2, 3, 4, 5))
    finally:
        triton_launch._imported.cache_clear()
    assert mean.tolist() == [1.0] * 3 and variance.tolist() == [0.0] * 3


@pytest.mark.slow
@with_triton
@not_interpreted
@each_capability
def test_they_compile_for_a_device_that_is_not_here(capability: int) -> None:
    from shoal.kernels.norm import norm_triton_kernels

    x, late = there(32, 64, 56, 56, dtype=torch.bfloat16, channels_last=True), there(32, 2048, 7, 7)
    with compiled_for(capability) as found:
        for y, residual in ((x, x), (late, None)):
            mean = there(y.shape[1])
            affine = NormAffine(mean, mean, mean)
            TRITON.statistics(y)
            TRITON.apply(y, affine, residual, RELU, y)
            TRITON.reduce(y, NormRead(y, affine, RELU, residual), y, residual)
            for activation in (Activation("leaky_relu", 0.01), Activation("elu"), IDENTITY):
                TRITON.apply(y, affine, None, activation, y)
                inverted = NormRead(y, affine, activation, inverted=True)
                TRITON.reduce(y, inverted)
                TRITON.apply_backward(y, inverted, NormMoves(mean, mean), y)
        dense, mean = there(32, 96, 28, 28, dtype=torch.float16, channels_last=True, gap=32), there(96)
        read = NormRead(dense, NormAffine(mean, mean, mean), RELU)
        TRITON.reduce(dense, read)
        TRITON.apply_backward(dense, read, NormMoves(mean, mean), dense)
    assert found.keys() == kernels_of(norm_triton_kernels)
    for name in found.keys() - {"merge"}:
        assert any("ld.global.v4" in ptx for ptx in found[name])  # 16 bytes at a time
        # That has no digits near 1, where the inverse of ELU needs them.
        assert not any("lg2.approx" in ptx for ptx in found[name])
