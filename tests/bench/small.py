"""A network small enough that whole benchmarks run in a test, under every name of `examples.networks`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples import networks as models


class Small(nn.Module):
    """Convolutions, batch norms and a pooling: the first layers are the largest, as in the networks it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for inputs, channels in ((3, 16), (16, 16), (16, 32)):
            if channels == 32:
                self.layers.append(nn.MaxPool2d(2))
            self.layers.extend([nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()])
        self.layers.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Small` is every network that `examples.networks` builds."""

    def build(name: str, *, seed: int | None = None) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0 if seed is None else seed)
            return Small()

    monkeypatch.setattr(models, "build", build)
    monkeypatch.setattr(models, "example_shape", lambda name, batch, image: (batch, 3, image, image))
