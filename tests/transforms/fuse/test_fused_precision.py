"""A fused network is about as far from float64 as the network itself, where gradients cancel."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.transforms.fuse.fuse_graph import LEVELS, Level


def _errors(net: nn.Module, exact: nn.Module) -> float:
    pairs = zip(net.parameters(), exact.parameters(), strict=True)
    return max(float((p.grad - q.grad).abs().max()) for p, q in pairs if p.grad is not None and q.grad is not None)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("native", [True, False])
def test_before_a_mean_over_the_image(
    level: Level, layout: torch.memory_format, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pixels have the same gradient, and what the statistics take off leaves nothing of it but roundings."""
    if not native:
        monkeypatch.setenv("SHOAL_KERNELS", "reference")
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ).to(memory_format=layout)
    x = torch.randn(4, 3, 32, 32).contiguous(memory_format=layout)
    factors = 10 * torch.randn(8)
    exact = copy.deepcopy(net).double()
    fused = shoal.fuse_batchnorm(copy.deepcopy(net), level, when="always")
    for model in (exact, net, fused):
        kind = next(model.parameters()).dtype
        (model(x.to(kind)) * factors.to(kind)).sum().backward()
    assert _errors(fused, exact) <= 1.5 * _errors(net, exact) + 2e-5, (_errors(fused, exact), _errors(net, exact))


class Joined(nn.Module):
    """A batch norm of two tensors side by side, and one that adds a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (8, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.second(F.relu(self.norms[0](x)))
        y = self.last(F.relu(self.norms[1](torch.cat([x, y], 1))))
        return F.relu(self.norms[2](y) + x).mean((2, 3))


def _chain() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize("make", [_chain, Joined], ids=["chain", "joined"])
@pytest.mark.parametrize("level", ["mvf", "icf"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_in_mixed_precision_however_many_pixels(
    make: Callable[[], nn.Module], level: Level, layout: torch.memory_format
) -> None:
    """What rounding takes off each pixel's gradient to the same side adds up to more than the weight's own."""
    net = make().to(memory_format=layout)
    x = torch.randn(16, 3, 64, 64).contiguous(memory_format=layout)
    factors = torch.randn(16, 8)
    exact = copy.deepcopy(net).double()
    fused = shoal.fuse_batchnorm(copy.deepcopy(net), level, when="always")
    for model in (exact, net, fused):
        kind = next(model.parameters()).dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=model is not exact):
            y = model(x.to(kind))
        (y * factors).sum().backward()
    for (name, ours), plain, right in zip(fused.named_parameters(), net.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None and right.grad is not None
        error, own = ((p.grad.double() - right.grad).norm() for p in (plain, ours))  # type: ignore[union-attr]
        assert own <= 1.5 * error + 2e-3 * right.grad.norm(), name
