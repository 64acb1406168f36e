"""What the tests of a session's loops share: the true peak of a stretch of a training loop, counted independently."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn

from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes


def true_peak(
    model: nn.Module, stretch: Callable[[], object], batches: Iterable[torch.Tensor], *optimizers: torch.optim.Optimizer
) -> int:
    """Most bytes in use while `stretch` runs, by PyTorch's own memory events on top of what is in use before it."""
    gc.collect()  # what an earlier test left must not be freed meanwhile
    there = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    there += [v for optimizer in optimizers for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return distinct_bytes([*there, *batches]) + allocations.peak_bytes(allocations.record(stretch)[1])
