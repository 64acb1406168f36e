"""A captured step: which other step AOTAutograd can be given in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured


class Net(nn.Module):
    def __init__(self, result: Callable[[torch.Tensor], Any], *, counts: bool = False) -> None:
        super().__init__()
        self.conv, self.result, self.counts = nn.Conv2d(3, 4, 3), result, counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.counts:
            self.calls += 1
        return self.result(self.conv(x))


def captured(result: Callable[[torch.Tensor], Any], *, counts: bool = False) -> Captured:
    return capture_step(Net(result, counts=counts), torch.randn(2, 3, 8, 8), name="net")[0]


def test_a_step_that_computes_the_same_results_otherwise_can_take_its_place() -> None:
    whole, halves = captured(torch.relu), captured(lambda y: torch.cat([y[:1].relu(), y[1:].relu()]))
    assert halves.can_replace(whole) and whole.can_replace(halves)


@pytest.mark.parametrize(
    "result",
    [
        lambda y: (y.relu(), y.mean()),
        lambda y: y.relu()[:1],
        lambda y: y.relu().double(),
        lambda y: y.relu().contiguous(memory_format=torch.channels_last),
    ],
    ids=["one more", "shape", "dtype", "layout"],
)
def test_a_step_with_other_results_cannot(result: Callable[[torch.Tensor], Any]) -> None:
    assert not captured(result).can_replace(captured(torch.relu))


def test_a_step_that_writes_other_buffers_cannot() -> None:
    assert not captured(torch.relu, counts=True).can_replace(captured(torch.relu))
