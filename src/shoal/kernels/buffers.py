"""Buffers of a model that are changed where they lie."""

from __future__ import annotations

import torch


def add_to(buffer: torch.Tensor, count: int) -> None:
    """Add to a counter, as `buffer.add_(count)`, and return nothing: a step's op that makes no tensor."""
    buffer.add_(count)
