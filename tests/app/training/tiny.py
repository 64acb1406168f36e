"""A network and a data set small enough to train whole runs in a test, under the name "tiny"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal.app.data
import shoal.app.models
from shoal.app.training.options import TrainOptions


class Tiny(nn.Module):
    """Convolutions, batch norm and dropout: everything that has state, and activations that outweigh the weights."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for channels in (in_channels, *[16] * (depth - 1)):
            self.layers.extend([nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()])
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.layers(images).mean((2, 3))))


def put_in_place(monkeypatch: pytest.MonkeyPatch, out: Path, depth: int = 2) -> Callable[..., TrainOptions]:
    """Arguments for runs of the tiny network: 20 training images in batches of 8 make 3 steps an epoch."""

    monkeypatch.setattr(shoal.app.models, "find", lambda name: partial(Tiny, depth=depth))
    monkeypatch.setattr(shoal.app.data, "open", partial(shoal.app.data.open, train_samples=20, test_samples=6))

    def options(**changed: Any) -> TrainOptions:
        given = {
            "model": "tiny",
            "data": "examples.data.synthetic:open_synthetic",
            "batch": 8,
            "epochs": 2,
            "planner": "none",
            "device": "cpu",
            "image": 16,
        }
        return TrainOptions(**{**given, "device": "cpu", "out": out, **changed})

    return options
