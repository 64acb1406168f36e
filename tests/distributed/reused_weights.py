"""A network whose gradients are awkward to exchange: weights used twice, and a layer that not every step uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Network(nn.Module):
    """With batch norm, weights used twice, and a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.sometimes = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = self.twice(torch.relu(self.twice(x))).mean((2, 3))
        return self.last(self.sometimes(x) if use else x)


def network() -> Network:
    torch.manual_seed(5)
    return Network()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return model(x, *args).logsumexp(1).mean()
