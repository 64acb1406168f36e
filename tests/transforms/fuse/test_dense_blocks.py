"""Dense blocks in a fused graph: found by structure, one op, and the same numbers whoever else reads their channels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from examples.networks.densenet import DenseNet
from shoal.transforms.fuse.fused_layers import DenseBlock

fuse_batchnorm = partial(shoal.fuse_batchnorm, when="always")  # tests have small maps


class Layered(nn.Module):
    """A stem, dense layers of one or two convolutions, a head; `also` makes something else of the list of features."""

    def __init__(
        self,
        steps: int = 1,
        count: int = 3,
        also: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
        **changes: Any,
    ) -> None:
        super().__init__()
        self.also = also
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList()
        for layer in range(count):
            reads, made = 4 + 3 * layer, []
            for makes in [5] * (steps - 1) + [3]:
                convolution = nn.Conv2d(reads, makes, **{"kernel_size": 3, "padding": 1, "bias": False, **changes})
                made += [nn.BatchNorm2d(reads), nn.ReLU(inplace=True), convolution]
                reads = makes
            self.layers.append(nn.Sequential(*made))
        self.norm, self.head = nn.BatchNorm2d(4 + 3 * count), nn.Conv2d(4 + 3 * count, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        y = self.head(F.relu(self.norm(torch.cat(features, 1))))
        return y if self.also is None else y.mean() + self.also(features)


def _images(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn((3, 3, 6, 6), generator=torch.Generator().manual_seed(1), dtype=dtype)


def _pair(make: Callable[[], nn.Module], prepare: Callable[[nn.Module], object] = lambda net: None) -> Any:
    """The network and its fused copy."""
    torch.manual_seed(0)
    net = make().double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    fused = fuse_batchnorm(copy.deepcopy(net))
    prepare(net)
    prepare(fused)
    return net, fused


def _same_step(net: nn.Module, fused: nn.Module) -> None:
    """Results, gradients and buffers of a step."""
    results = []
    for model in (net, fused):
        y = model(_images())
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters()), *model.buffers()])
    for own, other in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-8)


def _blocks(fused: Any) -> list[DenseBlock]:
    return [module for module in fused._fused[0].modules() if isinstance(module, DenseBlock)]


def _ops_called(fused: nn.Module) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fused(_images())
    return {event.key for event in profile.key_averages() if event.key.startswith("shoal::")}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_block_is_one_op(steps: int) -> None:
    net, fused = _pair(lambda: Layered(steps))
    (block,) = _blocks(fused)
    assert [len(layer) for layer in block.layers] == [steps] * 3
    last = f"layers.2.{3 * steps - 1}"
    assert fused.summary.blocks == (("layers.0.2", last),)
    assert f"layers.0.2 to {last}: one buffer" in str(fused.summary)
    assert "shoal::dense_block" in _ops_called(copy.deepcopy(fused))
    _same_step(net, fused)


def test_every_block_of_densenet() -> None:
    net, fused = _pair(lambda: DenseNet((3, 2, 4), 3))
    assert [len(block.layers) for block in _blocks(fused)] == [3, 2, 4]
    assert not any(node.target is torch.cat for node in fused._fused[0].graph.nodes)
    x = torch.randn((2, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(fused(x), net(x))


@pytest.mark.parametrize(
    "also",
    [
        lambda features: features[0].sum() + features[2].square().sum(),
        lambda features: torch.cat(features[1:3], 1).square().sum(),
        lambda features: torch.cat([*features, features[1] * 2], 1).square().sum(),
        lambda features: features[-1].square().sum(),
    ],
    ids=["some of it", "two side by side", "all and more", "the last"],
)
def test_others_may_read_its_channels(also: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    net, fused = _pair(lambda: Layered(also=also))
    assert _blocks(fused)
    _same_step(net, fused)


class Branching(Layered):
    """Another batch norm and convolution read two of the tensors, and their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.other_norm, self.other = nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        other = self.other(F.relu(self.other_norm(torch.cat(features[1:3], 1))))
        return self.head(F.relu(self.norm(torch.cat(features, 1)))) + other


def test_statistics_of_some_channels_are_read_by_others() -> None:
    net, fused = _pair(Branching)
    assert _blocks(fused)
    _same_step(net, fused)


@pytest.mark.parametrize(
    "changes",
    [{"bias": True}, {"dilation": 2, "padding": 2}, {"padding_mode": "reflect"}],
    ids=str,
)
def test_other_layers_stay_apart(changes: dict[str, Any]) -> None:
    net, fused = _pair(lambda: Layered(**changes))
    assert not _blocks(fused)
    _same_step(net, fused)


def test_only_at_the_level_that_does_without_concatenation() -> None:
    net = Layered()
    assert not _blocks(fuse_batchnorm(net, "bnff")) and _blocks(fuse_batchnorm(net, "icf"))


def test_a_batch_norm_without_parameters_stays_apart() -> None:
    def bare() -> nn.Module:
        net = Layered()
        net.layers[1][0] = nn.BatchNorm2d(7, affine=False)  # type: ignore[index,operator]
        return net

    net, fused = _pair(bare)
    assert not _blocks(fused)
    _same_step(net, fused)


@pytest.mark.parametrize("which", ["one", "all"])
def test_with_frozen_batch_norms_layer_by_layer(which: str) -> None:
    def freeze(net: nn.Module) -> None:
        norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms if which == "all" else norms[1:2]:
            norm.eval()

    net, fused = _pair(lambda: Layered(2), freeze)
    assert _blocks(fused) and "shoal::dense_block" not in _ops_called(copy.deepcopy(fused))
    _same_step(net, fused)


def test_running_statistics_are_equal_after_ten_steps_and_move_once_under_checkpointing() -> None:
    net, fused = _pair(lambda: Layered(2))
    for _ in range(10):
        net(_images())
        checkpoint(fused, _images().requires_grad_(), use_reentrant=False).sum().backward()
    for own, other in zip(fused.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(own, other)


def test_under_autocast_layer_by_layer() -> None:
    net, fused = _pair(lambda: Layered(2))
    truth, net, fused = net, copy.deepcopy(net).float(), fused.float()
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = net(_images(torch.float32)), fused(_images(torch.float32))
    true = truth(_images())
    assert ours.dtype == theirs.dtype
    assert (ours - true).norm() <= 2 * (theirs - true).norm() + 0.02 * true.norm()


def test_a_network_in_bfloat16_trains_in_bfloat16() -> None:
    net, fused = _pair(lambda: Layered(2))
    truth, net, fused = net, copy.deepcopy(net).bfloat16(), fused.bfloat16()
    results = [model(_images(dtype)) for model, dtype in ((truth, torch.float64), (net, torch.bfloat16))]
    ours = fused(_images(torch.bfloat16))
    assert ours.dtype == torch.bfloat16
    assert (ours - results[0]).norm() <= 2 * (results[1] - results[0]).norm() + 0.02 * results[0].norm()
    ours.square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in fused.parameters())


def test_no_gradient_of_frozen_weights_is_kept() -> None:
    net, fused = _pair(lambda: Layered(2), lambda net: net.get_submodule("layers.1").requires_grad_(False))
    for model in (net, fused):
        model(_images()).square().sum().backward()
    for own, other in zip(fused.parameters(), net.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad)
