"""Layers of every kind train as in plain PyTorch, bit for bit, whatever is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engine.compile.compiled import Residual, compiled
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    conv_bn_relu,
    costs_that_do_not_matter,
    images,
    keep_by_chance,
    mean_square,
    same_bits,
)


class Dense(nn.Module):
    """Its input in addition to what a block makes of it."""

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.body = conv_bn_relu(channels, 2, dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, list[torch.Tensor]]:
    """A small network of one to three dimensions, and batches for it."""
    dims = draw(st.integers(1, 3))
    max_pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims]
    layers: dict[str, Callable[[int], nn.Module]] = {
        "block": lambda channels: conv_bn_relu(channels, 5, dims),
        "dense": lambda channels: Dense(channels, dims),
        "residual": lambda channels: Residual(channels, dims),
        "dropout": lambda channels: nn.Dropout(0.3),
        "max pool": lambda channels: max_pool(3, 2, 1),
        "silu": lambda channels: nn.SiLU(),
        # In-place activations may not follow what saves its output, so each comes after a convolution.
        "leaky relu": lambda channels: nn.Sequential(conv_bn_relu(channels, 5, dims)[0], nn.LeakyReLU(0.1, True)),
        "relu6": lambda channels: nn.Sequential(conv_bn_relu(channels, 5, dims)[0], nn.ReLU6(inplace=True)),
    }
    torch.manual_seed(draw(st.integers(0, 99)))
    net, channels = nn.Sequential(conv_bn_relu(2, 4, dims)), 4
    for kind in draw(st.lists(st.sampled_from(sorted(layers)), min_size=1, max_size=5)):
        net.append(layers[kind](channels))
        channels = {"block": 5, "leaky relu": 5, "relu6": 5, "dense": channels + 2}.get(kind, channels)
    return net, images(2, 3, 2, *(6,) * dims)


@pytest.mark.slow
# Every example is compiled: to make a failing one smaller would take longer than a test may.
@settings(max_examples=settings().max_examples // 4, phases=set(Phase) - {Phase.shrink})
@given(networks(), st.integers(0, 999), st.floats(0, 1), st.floats(0, 1))
def test_any_choice_of_what_to_keep_and_how_often_to_recompute_trains_like_plain_pytorch(
    drawn: tuple[nn.Module, list[torch.Tensor]], seed: int, kept_share: float, again_share: float
) -> None:
    torch._dynamo.reset()
    net, batches = drawn
    assert_same_training(net, batches, keep_by_chance(seed, kept_share, again_share))


def test_recomputed_batch_norms_move_their_statistics_once_a_step() -> None:
    net = nn.Sequential(*blocks(3, 8, 8, 8))
    trained = assert_same_training(net, images(3, 4, 3, 8, 8))
    assert {s.layer for s in trained.shoal.plan.recomputed} >= {"0.1", "1.1"}
    assert trained[0][1].num_batches_tracked == 3


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float16, True)])
def test_mixed_precision_trains_like_plain_pytorch(dtype: torch.dtype, scaled: bool) -> None:
    net = nn.Sequential(*blocks(3, 8, 8), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 64, 4))
    assert_same_training(
        net, images(3, 4, 3, 8, 8), around_forward=partial(torch.autocast, "cpu", dtype), scaled=scaled
    )


@pytest.mark.parametrize(("dims", "layout"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_channels_last_trains_like_plain_pytorch(dims: int, layout: torch.memory_format) -> None:
    pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims](2)
    net = nn.Sequential(*blocks(3, 8, dims=dims), Residual(8, dims), pool, nn.Dropout(0.3)).to(memory_format=layout)
    batches = [batch.to(memory_format=layout) for batch in images(3, 4, 3, *(8,) * dims)]
    assert_same_training(net, batches)


def test_recomputed_dropouts_of_different_rates_replay_their_masks_and_leave_the_generator_where_it_belongs() -> None:
    drops = [nn.Dropout(0.1), nn.Dropout2d(0.5), nn.Dropout(0.9), nn.AlphaDropout(0.3), nn.Dropout(0.0)]
    convolutions = blocks(3, 8, 8, 8, 8, 8)
    net = nn.Sequential(*(module for pair in zip(convolutions, drops, strict=True) for module in pair))
    assert_same_training(net, images(3, 4, 3, 8, 8))


class Twice(nn.Module):
    """One block used two times, and a classifier whose weight is that of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv_bn_relu(3, 6)
        self.block = conv_bn_relu(6, 6)
        self.one = nn.Conv2d(6, 6, 1)
        self.other = nn.Conv2d(6, 6, 1, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(self.block(self.block(self.first(x)))).relu())


def test_layers_used_twice_and_shared_weights_train_like_plain_pytorch() -> None:
    assert_same_training(Twice(), images(3, 4, 3, 8, 8))


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)])
def test_frozen_layers_train_like_plain_pytorch(frozen: Sequence[int]) -> None:
    """Their parameters get no gradient and their batch norms, in eval mode, normalise by the running statistics."""
    net = nn.Sequential(*blocks(3, 8, 8), nn.Conv2d(8, 8, 3))
    for place in frozen:
        net[place].requires_grad_(False).eval()
    trained = assert_same_training(net, images(3, 4, 3, 8, 8), keep_by_chance(1, 0.3))
    for place in (0, 1):
        assert trained[place][1].num_batches_tracked == (0 if place in frozen else 3)


def test_a_batch_norm_in_eval_mode_inside_a_training_model_still_learns_its_scale() -> None:
    net = nn.Sequential(*blocks(3, 8, 8))
    net[0][1].eval()
    assert_same_training(net, images(3, 4, 3, 8, 8))


def test_batch_norms_without_scale_or_without_statistics_train_like_plain_pytorch() -> None:
    norms = [nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False)]
    norms += [nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8)]
    convolutions = [nn.Conv2d(3 if place == 0 else 8, 8, 3, padding=1) for place in range(len(norms))]
    net = nn.Sequential(*(module for pair in zip(convolutions, norms, strict=True) for module in (*pair, nn.ReLU())))
    assert_same_training(net, images(3, 4, 3, 8, 8))


def test_residual_additions_and_activations_in_place_train_like_plain_pytorch() -> None:
    net = nn.Sequential(*blocks(3, 8), Residual(8), nn.MaxPool2d(2), Residual(8), Residual(8))
    assert_same_training(net, images(3, 4, 3, 8, 8))


def test_a_tensor_read_in_two_layouts_at_once_and_the_batch_itself_are_not_overwritten() -> None:
    class Symmetric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x.relu() * 2)
            return self.norm(y + y.transpose(2, 3))

    batches = images(2, 4, 3, 8, 8)
    assert_same_training(Symmetric(), batches)
    assert all(same_bits(used, fresh) for used, fresh in zip(batches, images(2, 4, 3, 8, 8), strict=True))


def test_a_model_that_writes_into_its_own_buffers_trains_like_plain_pytorch() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*blocks(3, 8, 8))
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layers[0](x) * (1 + self.mean).view(1, -1, 1, 1)
            self.mean.mul_(0.9).add_(y.detach().mean((0, 2, 3)))
            return self.layers[1](y)

    assert_same_training(Counting(), images(3, 4, 3, 8, 8))


class ManyEnds(nn.Module):
    """Several inputs, one of them no tensor and one with a default, and a nest of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = conv_bn_relu(3, 6), conv_bn_relu(2, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float, *, bias: torch.Tensor | None = None) -> Any:
        a, b = self.left(x), self.right(y) * factor
        if bias is not None:
            b = b + bias
        return {"sum": a + b, "parts": (a, b.mean((2, 3))), "nothing": None, "input": [x]}


def test_several_inputs_and_nested_outputs_train_like_plain_pytorch() -> None:
    batches = [(x, x[:, :2].clone(), factor) for x, factor in zip(images(3, 4, 3, 8, 8), (1.0, 2.0, 2.0), strict=True)]
    trained = assert_same_training(ManyEnds(), batches)
    outputs = trained(*batches[0], bias=torch.ones(1))
    assert list(outputs) == ["sum", "parts", "nothing", "input"]
    assert isinstance(outputs["parts"], tuple) and outputs["nothing"] is None
    assert outputs["input"][0] is batches[0][0]


def test_inputs_that_want_a_gradient_get_the_one_of_plain_pytorch() -> None:
    net, (batch,) = nn.Sequential(*blocks(3, 8, 8)), images(1, 4, 3, 8, 8)
    wanted = []
    with costs_that_do_not_matter():
        for model in (net, compiled(net)):
            x = batch.clone().requires_grad_()
            mean_square(model(x)).backward()
            wanted.append(x.grad)
    assert same_bits(*wanted)
