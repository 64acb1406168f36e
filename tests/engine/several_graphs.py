"""Models that are several graphs, and what a step of one takes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn

from shoal.memory.limit import memory_limit
from tests.engine.training_laws import blocks, images

Between = Callable[[torch.Tensor], torch.Tensor | None]


class Chain(nn.Module):
    """Stages and a head, and something between them that Dynamo may not capture."""

    n_stages = 2

    def __init__(self, between: Between, stages: list[nn.Module] | None = None, channels: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages or blocks(3, *[channels] * self.n_stages))
        self.between = between
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.then(self.stages[0](x))
        return self.head(self.then(self.stages[1](x)).mean((2, 3)))

    def then(self, x: torch.Tensor) -> torch.Tensor:
        made = self.between(x)
        return x if made is None else made


class Looping(Chain):
    """Dynamo gives a function up whose loop breaks, and captures what that calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = self.then(stage(x))
        return self.head(x.mean((2, 3)))


class Prepared(Looping):
    """Eager code before the first graph saves tensors, and goes back after it."""

    def __init__(self, between: Between, stages: list[nn.Module] | None = None, channels: int = 4) -> None:
        super().__init__(between, stages, channels)
        self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(computes_eagerly(computes_eagerly(self.gain * x)))


def breaks(x: torch.Tensor) -> None:
    torch._dynamo.graph_break()


def prints(x: torch.Tensor) -> None:
    print(end="")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def computes_eagerly(x: torch.Tensor) -> torch.Tensor:
    return (x.sigmoid() * x).tanh()


def mean_square(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def peaks_of(model: nn.Module, step: Callable[[nn.Module, torch.Tensor], None] = mean_square) -> tuple[int, int]:
    """Device bytes of the first step and of later ones: what the step allocates, the batch, and what the model has."""
    (x,) = images(1, 8, 3, 32, 32)
    own_bytes = sum(t.nbytes for t in [x, *model.parameters(), *model.buffers()])
    peaks = []
    for _ in range(4):
        gc.collect()  # what was left must not be freed meanwhile
        with memory_limit(None) as meter:
            before_bytes = meter.live_bytes
            meter.reset_peak()
            step(model, x)
            peaks.append(meter.peak_bytes - before_bytes + own_bytes)
        for parameter in model.parameters():
            parameter.grad = None
    return peaks[0], max(peaks[1:])
