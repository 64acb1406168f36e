"""A forward pass that is begun again finds buffers and generators as they were."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

from shoal.engine.snapshot import Snapshot


class Drawing(nn.Module):
    """Draws from every generator that a forward pass may draw from, and moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self) -> tuple[float, ...]:
        self.calls += 1  # type: ignore[operator]
        return float(self.calls), float(torch.rand(())), float(numpy.random.rand()), random.random()  # type: ignore[arg-type]


def test_a_forward_pass_that_is_begun_anew_does_the_same() -> None:
    model = Drawing()
    before = Snapshot(model)
    once = model()
    assert model() != once
    before.restore()
    assert model() == once


class Growing(nn.Module):
    """Its buffers get their sizes in the first call: one is resized, the other replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("resized", torch.zeros(0))
        self.register_buffer("replaced", torch.zeros(0))
        self.resized: torch.Tensor

    def forward(self) -> None:
        self.resized.resize_(1000).fill_(1.0)
        self.replaced = torch.ones(1000)


def test_buffers_that_have_grown_are_as_small_as_before() -> None:
    model = Growing()
    buffers = list(model.buffers())
    before = Snapshot(model)
    model()
    before.restore()
    assert all(now is then for now, then in zip(model.buffers(), buffers, strict=True))
    assert all(not buffer.numel() and not buffer.untyped_storage().nbytes() for buffer in buffers)
