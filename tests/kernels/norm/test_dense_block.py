"""`shoal::dense_block`: a concatenating network's results and gradients, and nothing saved twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shoal.kernels.norm.dense_block import DenseLayer, dense_block

_DOUBLE = torch.float64


def _layers(
    channels: int,
    count: int,
    growth: int,
    inner: int | None,
    sides: Sequence[int],
    dtype: torch.dtype,
    gain: float = 1.0,
) -> list[list[DenseLayer]]:
    """Layers of one step, or of a 1x1 convolution to `inner` channels and another."""
    generator = torch.Generator().manual_seed(0)

    def step(reads: int, makes: int, sides: Sequence[int]) -> DenseLayer:
        draw = [torch.randn(shape, generator=generator, dtype=_DOUBLE) for shape in ((reads,), (reads,))]
        weight = torch.randn((makes, reads, *sides), generator=generator, dtype=_DOUBLE) / reads**0.5
        leaves = [leaf.to(dtype).requires_grad_() for leaf in (draw[0] * gain, draw[1], weight)]
        return DenseLayer(leaves[0], leaves[1], leaves[2], 1e-5, True)

    layers = []
    for _ in range(count):
        first = [] if inner is None else [step(channels, inner, [1] * len(sides))]
        layers.append([*first, step(channels if inner is None else inner, growth, sides)])
        channels += growth
    return layers


def _parameters(layers: list[list[DenseLayer]]) -> list[torch.Tensor]:
    return [leaf for layer in layers for step in layer for leaf in (step.gamma, step.beta, step.weight)]


def _plain(x: torch.Tensor, layers: list[list[DenseLayer]]) -> torch.Tensor:
    convolution = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    for layer in layers:
        y = x
        for step in layer:
            y = F.relu(F.batch_norm(y, None, None, step.gamma, step.beta, True, 0.1, step.eps))
            y = convolution(y, step.weight, padding=[side // 2 for side in step.weight.shape[2:]])
        x = torch.cat([x, y], 1)
    return x


def _ours(x: torch.Tensor, layers: list[list[DenseLayer]], measured: bool = True) -> torch.Tensor:
    mean, variance = (None, None) if measured else torch.ops.shoal.statistics(x)
    return dense_block(x, mean, variance, layers)[0]


@pytest.mark.parametrize("inner", [None, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradcheck(inner: int | None, layout: torch.memory_format) -> None:
    layers = _layers(2, 2, 2, inner, (3, 3), _DOUBLE)
    x = torch.randn((2, 2, 3, 4), generator=torch.Generator().manual_seed(1), dtype=_DOUBLE)
    x = x.contiguous(memory_format=layout).requires_grad_()

    def call(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *parameters: torch.Tensor) -> Any:
        leaves = iter(parameters)
        steps = [[DenseLayer(next(leaves), next(leaves), next(leaves), 0.1, True) for _ in layer] for layer in layers]
        features, moments, _ = dense_block(x, mean, variance, steps)
        return features, *moments

    mean, variance = torch.tensor([0.1, -0.2], dtype=_DOUBLE), torch.tensor([0.9, 1.2], dtype=_DOUBLE)
    operands = [x, mean.requires_grad_(), variance.requires_grad_(), *_parameters(layers)]
    assert torch.autograd.gradcheck(call, operands)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_equals_concatenation_in_every_dimension(dims: int, measured: bool) -> None:
    layers = _layers(3, 3, 2, 4, [3] * dims, _DOUBLE)
    x = torch.randn((2, 3, *[5] * dims), generator=torch.Generator().manual_seed(1), dtype=_DOUBLE, requires_grad=True)
    theirs, ours = _plain(x, layers), _ours(x, layers, measured)
    torch.testing.assert_close(ours, theirs)
    leaves, grad = [x, *_parameters(layers)], torch.randn_like(theirs)
    pairs = zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(theirs, leaves, grad), strict=True)
    for own, other in pairs:
        torch.testing.assert_close(own, other)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 19),
    count=st.integers(1, 4),
    growth=st.integers(1, 9),
    inner=st.sampled_from([None, 5, 16]),
    size=st.integers(2, 9),
    side=st.sampled_from([1, 3]),
    layout=st.sampled_from([torch.contiguous_format, torch.channels_last]),
    offset=st.sampled_from([0.0, 1000.0]),
    gain=st.sampled_from([1.0, 0.0, -2.0]),
)
def test_no_worse_than_plain_float32(
    batch: int,
    channels: int,
    count: int,
    growth: int,
    inner: int | None,
    size: int,
    side: int,
    layout: torch.memory_format,
    offset: float,
    gain: float,
) -> None:
    drawn = torch.randn((batch, channels, size, size), generator=torch.Generator().manual_seed(1)) + offset
    found = {}
    for name, run, dtype in (
        ("true", _plain, _DOUBLE),
        ("plain", _plain, torch.float32),
        ("ours", _ours, torch.float32),
    ):
        layers = _layers(channels, count, growth, inner, (side, side), torch.float32, gain)
        layers = [
            [
                DenseLayer(
                    *(leaf.detach().to(dtype).requires_grad_() for leaf in (one.gamma, one.beta, one.weight)),
                    1e-5,
                    True,
                )
                for one in layer
            ]
            for layer in layers
        ]
        x = drawn.to(dtype).contiguous(memory_format=layout).requires_grad_()
        y = run(x, layers)
        weights = torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)
        grads = torch.autograd.grad((y * weights).sum(), [x, *_parameters(layers)])
        found[name] = [value.detach().double() for value in (y, *grads)]
    # A weight whose result is normalised has next to no gradient: what is left of sums as large as the other gradients.
    largest = max(float(true.norm()) for true in found["true"])
    for true, plain, ours in zip(*found.values(), strict=True):
        allowed = 2 * float((plain - true).norm()) + (1e-4 + 1e-6 * offset) * (float(true.norm()) + 1) + 1e-5 * largest
        assert float((ours - true).norm()) <= allowed


def test_statistics_are_those_of_all_channels_and_of_what_is_between() -> None:
    layers = _layers(3, 2, 2, 4, (3, 3), _DOUBLE)
    x = torch.randn((2, 3, 5, 5), generator=torch.Generator().manual_seed(1), dtype=_DOUBLE)
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    features, (means, variances), between = dense_block(x, mean, variance, layers)
    true_variances, true_means = torch.var_mean(features, (0, 2, 3), correction=0)
    torch.testing.assert_close((means, variances), (true_means, true_variances))
    first = layers[1][0]
    y = F.relu(F.batch_norm(features[:, :5], None, None, first.gamma, first.beta, True, 0.1, first.eps))
    variance, mean = torch.var_mean(F.conv2d(y, first.weight), (0, 2, 3), correction=0)
    assert [len(layer) for layer in between] == [1, 1]
    torch.testing.assert_close(between[1][0], (mean, variance))


def test_what_it_saves_is_every_channel_once() -> None:
    layers = _layers(8, 3, 4, 6, (3, 3), torch.float32)
    x = torch.randn(2, 8, 16, 16).contiguous(memory_format=torch.channels_last).requires_grad_()
    parameters = {leaf.data_ptr() for leaf in _parameters(layers)}
    saved: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        if tensor.data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dense_block(x, None, None, layers)
    channels, pixels = 8 + 3 * 4, 2 * 16 * 16
    assert sum(saved.values()) == 4 * ((channels + 3 * 6) * pixels + 2 * channels + 3 * 2 * 6)


@pytest.mark.parametrize(("measured", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_the_compiler_believes_is_so(layout: torch.memory_format, dtype: torch.dtype, measured: bool) -> None:
    layers = _layers(4, 2, 3, 5, (3, 3), dtype)
    x = torch.randn(2, 4, 5, 5, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    eps, relu = [1e-5] * 4, [True] * 4
    vectors = (None, None) if measured else (torch.zeros(4), torch.ones(4))
    arguments = (x, *vectors, _parameters(layers), eps, relu, 2)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.library.opcheck(torch.ops.shoal.dense_block.default, arguments, atol=tolerance, rtol=tolerance)
    features = torch.ops.shoal.dense_block(*arguments)[0]
    assert features.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("which", ["features", "mean"])
def test_gradients_of_one_result_alone(which: str) -> None:
    layers = _layers(3, 2, 2, None, (3, 3), _DOUBLE)
    x = torch.randn((2, 3, 4, 4), generator=torch.Generator().manual_seed(1), dtype=_DOUBLE, requires_grad=True)
    mean, variance = torch.ops.shoal.statistics(x)
    features, (means, _), _ = dense_block(x, mean, variance, layers)
    truth = _plain(x, layers)
    ours, theirs = (features, truth) if which == "features" else (means, truth.mean((0, 2, 3)))
    leaves = [x, *_parameters(layers)]
    pairs = zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
        strict=True,
    )
    for own, other in pairs:
        torch.testing.assert_close(own, other)


def test_flops_are_those_of_the_convolutions() -> None:
    layers = _layers(3, 2, 2, 4, (3, 3), torch.float32)
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    forward = 2 * 50 * (4 * 3 + 2 * 4 * 9 + 4 * 5 + 2 * 4 * 9)
    with FlopCounterMode(display=False) as counter:
        features, _, _ = dense_block(x, torch.zeros(3), torch.ones(3), layers)
        assert counter.get_total_flops() == forward
        features.sum().backward()
    assert counter.get_total_flops() == 3 * forward
