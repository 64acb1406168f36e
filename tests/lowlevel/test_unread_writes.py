"""What a model writes into a float64 buffer without dimensions is there after a step, as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal


class Centred(nn.Module):
    """Subtracts a running mean, which nothing reads as the result of the op that moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x - self.mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_buffer_that_is_a_number_moves(dtype: torch.dtype) -> None:
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model, x = Centred().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
        if compiled:
            shoal.compile(model, "1GiB", optimizer="sgd")
        outputs = [model(x) for _ in range(2)]
        outputs[1].square().sum().backward()
        assert model.mean  # has moved
        found.append([model.mean, *outputs, model.conv.weight.grad])
    torch.testing.assert_close(*found)
