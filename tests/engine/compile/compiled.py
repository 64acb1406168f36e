"""A model compiled so that all it can is recomputed, and a residual block."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import shoal
from tests.engine.keywords import keywords
from tests.engine.training_laws import conv_bn_relu, keep_nothing

ROOMY = "1TiB"


class Residual(nn.Module):
    """Adds its input in place, as ResNets may."""

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.body = conv_bn_relu(channels, channels, dims)[:2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += x
        return y.relu_()


def compiled(net: nn.Module, **options: Any) -> nn.Module:
    return shoal.compile(copy.deepcopy(net), **keywords({"budget": ROOMY, "planner": keep_nothing, **options}))
