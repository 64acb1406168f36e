"""nnU-Net's training step as one module: what its trainer trains and what its planner plans."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

DEFAULT_ALLOW = "recompute,order,pieces"  # nnU-Net's bits, and its host memory left to its data loaders


def allowed() -> str | None:
    """What a plan may use: SHOAL_ALLOW of the environment where it is set."""
    return None if os.environ.get("SHOAL_ALLOW") else DEFAULT_ALLOW


class NetworkAndLoss(nn.Module):
    """From a batch to its loss.

    Args:
        network: its outputs are a tensor, or one for each scale.
        loss: of nnU-Net, called with outputs and targets.
        half: whether the network is planned as under CUDA's autocast in float16, with tensors on the CPU. nnU-Net's
            training step brings its own autocast.
    """

    def __init__(self, network: nn.Module, loss: nn.Module, *, half: bool = False) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self._half = half
        weights = getattr(loss, "weight_factors", None)
        if weights is not None:  # NumPy's scalars are none that Dynamo keeps in a graph
            vars(loss)["weight_factors"] = tuple(map(float, weights))

    def forward(self, data: torch.Tensor, target: Any) -> torch.Tensor:
        """The loss."""
        if not self._half:
            return self.loss(self.network(data), target)
        with torch.autocast("cpu", torch.float16):
            outputs = self.network(data)
        if isinstance(outputs, Sequence):  # CUDA's autocast computes these losses in float32
            return self.loss([one.float() for one in outputs], target)
        return self.loss(outputs.float(), target)
