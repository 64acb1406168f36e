"""Memory that runs out where no planned graph sees it (loss, eager code, optimizer) is learnt by the next call."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.repair import run_again_where_repaired
from shoal.memory.limit import memory_limit

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)
IMAGE = (4, 3, 32, 32)


class Broken(nn.Module):
    """A chain of layers, with a graph break in its middle where there is to be one."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        layers = [layer for n in range(8) for layer in (nn.Conv2d(8 if n else 3, 8, 3, padding=1), nn.Sigmoid())]
        self.first, self.second, self.breaks = nn.Sequential(*layers[:8]), nn.Sequential(*layers[8:]), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


def large_loss(outputs: torch.Tensor) -> torch.Tensor:
    """Takes more than the step is planned with before its loss is known."""
    return outputs.repeat(1, 6, 1, 1).sigmoid().sum()


def plain_peak_bytes() -> int:
    with memory_limit(None) as limit:
        model, batch = Broken(False), torch.randn(IMAGE)
        large_loss(model(batch)).backward()
        return limit.peak_bytes


def test_a_loss_that_ran_out_has_room_in_the_next_step() -> None:
    budget = int(0.8 * plain_peak_bytes())
    with memory_limit(budget) as limit:
        model, batch = Broken(False), torch.randn(IMAGE)
        model = shoal.compile(model, budget=budget, allow="recompute")
        trained = []
        for _ in range(6):
            try:
                large_loss(model(batch)).backward()
            except torch.OutOfMemoryError:
                trained.append(False)
            else:
                trained.append(True)
            model.zero_grad()
        assert not trained[0], "the test shows nothing"
        assert trained[3:] == [True] * 3
        assert 1 <= model.shoal.repairs <= 3
        assert limit.peak_bytes <= budget


def test_a_step_that_runs_out_in_its_loss_is_run_again_by_who_asks_for_that() -> None:
    budget = int(0.8 * plain_peak_bytes())
    with memory_limit(budget):
        model, batch = Broken(False), torch.randn(IMAGE)
        model = shoal.compile(model, budget=budget, allow="recompute")

        def step() -> None:
            model.zero_grad()
            large_loss(model(batch)).backward()

        run_again_where_repaired(model, model.shoal, step)
        assert model.shoal.repairs >= 1


def test_graphs_of_a_model_that_breaks_are_planned_again_too() -> None:
    peak_bytes = plain_peak_bytes()
    with memory_limit(None) as limit:
        model, batch = Broken(True), torch.randn(IMAGE)
        model = shoal.compile(model, budget=2 * peak_bytes, allow="recompute")
        limit.limit_bytes = int(0.5 * peak_bytes)
        trained = []
        for _ in range(8):
            try:
                model(batch).mean().backward()
            except torch.OutOfMemoryError:
                trained.append(False)
            else:
                trained.append(True)
            model.zero_grad()
        assert not trained[0], "the test shows nothing"
        assert trained[-2:] == [True, True]
        assert model.shoal.repairs >= 1


def test_what_runs_out_after_the_backward_pass_is_told_and_nothing_is_planned_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with memory_limit("64MiB"):
        model, batch = shoal.compile(Broken(False), budget="32MiB"), torch.randn(IMAGE)
        for _ in range(2):
            model(batch).mean().backward()
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(100 << 20)  # as an optimizer's state
        model(batch).mean().backward()
    assert model.shoal.repairs == 0
    assert any("after a step's backward pass" in record.getMessage() for record in caplog.records)
