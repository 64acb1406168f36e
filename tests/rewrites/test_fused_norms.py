"""A fused batch norm's backward multiplies and adds where the product is read, and no bit of the result changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.lowlevel.dispatch import VARIABLE
from shoal.lowlevel.native import levels
from tests.engine.training_laws import blocks

pytestmark = pytest.mark.skipif(not levels(), reason="the native library was not built")


class Residual(nn.Module):
    """Two residual blocks; the first has a convolution in its shortcut, `stride` apart."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*blocks(3, 16))
        self.before = nn.Sequential(nn.Conv2d(16, 16, 3, stride, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32))
        self.shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, stride, bias=False), nn.BatchNorm2d(32))
        self.again = nn.Sequential(*blocks(32, 16), nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(self.last(self.before(x)) + self.shortcut(x))
        return torch.relu(self.again(x) + x).mean((2, 3))


def network(stride: int) -> nn.Module:
    torch.manual_seed(0)
    model = Residual(stride)
    nn.init.zeros_(model.last[1].weight)  # type: ignore[arg-type]  # as ResNets begin
    return shoal.fuse_batchnorm(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def trained(model: nn.Module, budget_bytes: int = 1 << 30) -> tuple[Any, list[torch.Tensor]]:
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    x = x.to(memory_format=torch.channels_last)
    model = shoal.compile(model, budget_bytes, allow="bitwise")
    results: list[torch.Tensor] = []
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        results += [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return model.shoal, results


@pytest.mark.slow
@pytest.mark.parametrize(("stride", "kernels", "share"), [(1, "native", 0.9), (2, "reference", None)])
def test_the_bits_are_those_of_the_products_and_sums(
    stride: int, share: float | None, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, kernels)
    with monkeypatch.context() as unfolded:
        unfolded.setattr("shoal.rewrites.fused_norms.levels", lambda: ())
        theirs, expected = trained(network(stride))
    torch._dynamo.reset()
    ours, found = trained(network(stride), int(share * theirs.predicted_peak_bytes) if share else 1 << 30)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    sums = [sum(op.target == "aten.add.Tensor" for op in one.plan.graph.ops) for one in (ours, theirs)]
    assert sums[0] == sums[1] - 2
    assert ours.predicted_peak_bytes <= theirs.predicted_peak_bytes
    assert ours.measured_peak_bytes <= 1.02 * ours.predicted_peak_bytes
