"""A fused network in float32 is about as far from float64 as the network itself, where gradients cancel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

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
