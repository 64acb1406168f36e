"""A training that an arena can serve, and a step of given allocations."""

from __future__ import annotations

import shutil
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from bench.cpu_arena.arena import Arena

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the CPU's arena needs a C++ compiler"
)
MiB = 2**20
Batch = tuple[torch.Tensor, torch.Tensor]


def batches(sizes: list[int]) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 3, 16, 16, generator=draw), torch.randint(10, (n,), generator=draw)) for n in sizes]


class Training:
    """A small network with batch norm, dropout and momentum; the same numbers each time it is made."""

    def __init__(self, compiled: bool = False, budget: int | None = None) -> None:
        torch.manual_seed(3)
        self.model: nn.Module = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(1024, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        if compiled:
            self.model = shoal.compile(self.model, budget=budget, optimizer=self.optimizer)
        self.steps = 0

    def step(self, batch: Batch) -> torch.Tensor:
        """The loss."""
        torch.manual_seed(self.steps)  # so that two trainings may take turns
        self.steps += 1
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, steps: list[Batch], arena: Arena | None = None, keyed: bool = False) -> list[float]:
        losses = []
        for batch in steps:
            with arena.step(len(batch[0]) if keyed else None) if arena else nullcontext():
                loss = self.step(batch)
            losses.append(loss.item())
        return losses


def addresses_of_a_step(arena: Arena, sizes: list[int]) -> list[int]:
    with arena.step():
        return [tensor.data_ptr() for tensor in [torch.empty(size, dtype=torch.uint8) for size in sizes]]
