"""Buffers of a model that are changed where they lie."""

from __future__ import annotations

import torch


def add_to(buffers: torch.Tensor | list[torch.Tensor], count: int) -> None:
    """Add to a counter, as `buffer.add_(count)`, or to several with one launch, and return nothing: a step's op that
    makes no tensor."""
    if isinstance(buffers, list):
        torch._foreach_add_(buffers, count)
    else:
        buffers.add_(count)
