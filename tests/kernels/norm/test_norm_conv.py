"""`shoal::norm_conv`: gradients, layouts and dtypes, and no worse than the naive float32 path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from shoal.kernels.norm import norm_conv as norm_conv_module
from shoal.kernels.norm import norm_conv_native
from shoal.kernels.norm.norm_conv import norm_conv
from shoal.kernels.norm.norm_conv_native import ConvWindow
from shoal.lowlevel.dispatch import VARIABLE
from shoal.lowlevel.native import levels

_DOUBLE = torch.float64


def _leaf(*shape: int, seed: int = 0, dtype: torch.dtype = _DOUBLE) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=_DOUBLE)
    return drawn.to(dtype).requires_grad_()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("normalises", [False, True])
def test_gradcheck(relu: bool, statistics: bool, normalises: bool) -> None:
    operands = [_leaf(2, 2, 4, 3, seed=1), _leaf(2, 2, 4, 3, seed=2), _leaf(4, 2, 3, 2, seed=3), _leaf(4, seed=4)]
    vectors = [_leaf(4, seed=seed) for seed in (5, 6, 7)] if normalises else []

    def call(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *rest: torch.Tensor) -> Any:
        mean, scale, shift = rest or (None, None, None)
        window = ConvWindow([2, 1], [1, 0], [1, 1], 2)
        results = norm_conv([a, b], mean, scale, shift, relu, weight, bias, window, statistics)
        return results if statistics else results[0]

    assert torch.autograd.gradcheck(call, [*operands, *vectors])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_the_compiler_believes_is_so(dtype: torch.dtype, layout: torch.memory_format) -> None:
    xs = [_leaf(2, c, 4, 4, seed=c, dtype=dtype).detach().contiguous(memory_format=layout) for c in (2, 1)]
    vectors = [_leaf(3, seed=seed, dtype=torch.float32) for seed in (5, 6, 7)]
    weight, bias = _leaf(4, 3, 3, 3, seed=3, dtype=dtype), _leaf(4, seed=4, dtype=dtype)
    arguments = ([x.requires_grad_() for x in xs], *vectors, True, weight, bias, [1, 1], [1, 1], [1, 1], 1, True)
    torch.library.opcheck(torch.ops.shoal.norm_conv.default, arguments, atol=1e-2, rtol=1e-2)
    if dtype == torch.bfloat16:
        own = *arguments[:-1], False, vectors[1].detach().square(), 0.1
        torch.library.opcheck(torch.ops.shoal.norm_conv.default, own, atol=1e-2, rtol=1e-2)
    y = torch.ops.shoal.norm_conv(*arguments)[0]
    plain = F.conv2d(torch.cat(xs, 1), weight, bias, padding=1)
    assert y.stride() == plain.stride() and y.dtype == dtype


def _results(dtype: torch.dtype, ours: bool, case: dict[str, Any]) -> list[torch.Tensor]:
    """Result, statistics and gradients of batch norm, ReLU, convolution, in plain PyTorch or in ours."""
    x = _leaf(case["batch"], case["channels"], case["size"], case["size"], seed=1)
    x = (x.detach() + case["offset"]).float().to(dtype).requires_grad_()
    gamma = (_leaf(case["channels"], seed=2).detach() * case["gain"]).float().to(dtype).requires_grad_()
    beta = _leaf(case["channels"], seed=3).detach().float().to(dtype).requires_grad_()
    groups = case["groups"]
    shape = (3 * groups, case["channels"] // groups, case["kernel"], case["kernel"])
    weight = _leaf(*shape, seed=4).detach().float().to(dtype).requires_grad_()
    window = ConvWindow([case["stride"]] * 2, [case["kernel"] // 2] * 2, [1, 1], groups)
    if ours:
        mean, variance = torch.ops.shoal.statistics(x)
        scale = gamma * torch.rsqrt(variance + 1e-5)
        y, mean_y, variance_y = norm_conv([x], mean, scale, beta, True, weight, None, window, True)
    else:
        a = F.relu(F.batch_norm(x, None, None, gamma, beta, True, 0.1, 1e-5))
        y = F.conv2d(a, weight, None, case["stride"], case["kernel"] // 2, 1, groups)
        variance_y, mean_y = torch.var_mean(y, (0, 2, 3), correction=0)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum() + mean_y.square().sum()
    (loss + variance_y.sum()).backward()
    found = [y, mean_y, variance_y, x.grad, gamma.grad, beta.grad, weight.grad]
    return [value.detach().double() for value in found if value is not None]


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    groups=st.sampled_from([1, 1, 2, 3]),
    slices=st.integers(1, 5),
    size=st.integers(3, 7),
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
    offset=st.sampled_from([0.0, 0.0, 1000.0]),
    gain=st.sampled_from([1.0, 0.0, -2.0]),
)
def test_no_worse_than_plain_float32(batch: int, groups: int, slices: int, **case: Any) -> None:
    case |= {"batch": batch, "groups": groups, "channels": groups * slices}
    truth = _results(_DOUBLE, False, case)
    plain, ours = _results(torch.float32, False, case), _results(torch.float32, True, case)
    for true, theirs, own in zip(truth, plain, ours, strict=True):
        scale = float(true.abs().max()) + 1e-3
        allowed = float((theirs - true).abs().max()) * 2 + scale * (2e-5 + 2e-7 * case["offset"])
        assert float((own - true).abs().max()) <= allowed


def test_saves_what_it_reads_and_vectors_alone() -> None:
    x, weight = _leaf(2, 3, 8, 8, dtype=torch.float32), _leaf(3, 3, 1, 1, dtype=torch.float32)
    vectors = [_leaf(3, seed=seed, dtype=torch.float32) for seed in (5, 6, 7)]
    saved: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, *_ = norm_conv([x], *vectors, True, weight, None, ConvWindow([1, 1], [0, 0], [1, 1], 1), True)
    large = sorted(nbytes for nbytes in saved.values() if nbytes > 1000)
    assert large == [x.nbytes, y.nbytes]


def test_a_kernel_that_applies_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    forward, backward = norm_conv_native.forward, norm_conv_native.backward
    monkeypatch.setattr(norm_conv_native, "forward", lambda *a, **b: (called.append("forward"), forward(*a, **b))[1])
    monkeypatch.setattr(norm_conv_native, "backward", lambda *a, **b: (called.append("backward"), backward(*a, **b))[1])
    expected = ["forward", "backward"] if levels() else []
    for dtype, calls in ((_DOUBLE, []), (torch.float32, expected)):
        x, weight = _leaf(1, 2, 3, 3, dtype=dtype).to(memory_format=torch.channels_last), _leaf(2, 2, 1, 1, dtype=dtype)
        y, *_ = norm_conv([x], None, None, None, True, weight, None, ConvWindow([1, 1], [0, 0], [1, 1], 1), False)
        y.sum().backward()
        assert called == calls
        assert weight.grad is not None
        torch.testing.assert_close(y, F.conv2d(x.relu(), weight))


@pytest.mark.skipif(not levels(), reason="the native library was not built")
@pytest.mark.parametrize(
    ("channels", "side", "stride"),
    [(8, 4, 1), (8, 70, 1), (256, 4, 1), (8, 9, 2)],
    ids=["small", "many pixels", "wide", "strided"],
)
@pytest.mark.parametrize("normalises", [False, True])
def test_the_numbers_are_the_same_whoever_computes(
    channels: int, side: int, stride: int, normalises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [_leaf(1, channels, side, side), _leaf(channels, channels, 3, 3, seed=1)]
    vectors = [_leaf(channels, seed=seed, dtype=torch.float32) if normalises else None for seed in (2, 3, 4)]
    window = ConvWindow([stride, stride], [1, 1], [1, 1], 1)
    found = []
    for whole, weight_alone in ((True, False), (False, False), (False, True), (None, None)):
        if whole is not None:
            for name, pays in (("_FORWARD", whole), ("_BACKWARD", whole), ("_WEIGHT_GRAD", weight_alone)):
                op = getattr(norm_conv_module, name)
                (native_kernel,) = op.implementations
                said = replace(native_kernel, pays=lambda *_, pays=pays: pays)
                monkeypatch.setattr(norm_conv_module, name, replace(op, implementations=(said,)))
        else:
            monkeypatch.undo()
        x, weight = (
            leaf.detach().float().contiguous(memory_format=torch.channels_last).requires_grad_() for leaf in drawn
        )
        y, mean_y, _ = norm_conv([x], *vectors, True, weight, None, window, True)
        found.append([y, *torch.autograd.grad(y.square().mean() + mean_y.sum(), [x, weight])])
    for native, library, *others in zip(*found, strict=True):
        for other in (native, *others):
            torch.testing.assert_close(other, library, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernels", ["reference", None])
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_and_a_sum_are_those_of_the_products_whoever_computes(
    dtype: torch.dtype,
    layout: torch.memory_format,
    statistics: bool,
    kernels: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels is not None:
        monkeypatch.setenv(VARIABLE, kernels)
    x, grad, onto = (_leaf(2, n, 5, 5, seed=n).detach().to(dtype).contiguous(memory_format=layout) for n in (3, 4, 3))
    weight = _leaf(4, 3, 3, 3).detach().to(dtype)
    y, factor, mean_y = torch.conv2d(x, weight, padding=1), *(_leaf(4, seed=s).detach().to(dtype) for s in (5, 6))
    gradients = [_leaf(4, seed=s).detach().to(dtype) for s in (7, 8)] if statistics else [None, None]
    read = (*gradients, [x], *((y, mean_y) if statistics else (None, None)))
    around = (None, None, None, False, weight, [1, 1], [1, 1], [1, 1], 1, [True, False, True, True])
    op = torch.ops.shoal.norm_conv_backward.default
    of_x, *others = op(grad * factor.view(1, -1, 1, 1), *read, *around)
    for ours, theirs in zip(op(grad, *read, *around, factor, onto), (onto + of_x, *others), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_flops_are_those_of_the_convolution() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, weight = _leaf(1, 2, 4, 4), _leaf(3, 2, 1, 1)
    with FlopCounterMode(display=False) as counter:
        y, *_ = norm_conv([x], None, None, None, True, weight, None, ConvWindow([1, 1], [0, 0], [1, 1], 1), True)
        y.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (3 * 16) * 2
