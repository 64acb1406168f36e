"""Memory that runs out where no planned graph sees it (loss, eager code, optimizer) is learnt by the next call."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.repair import run_again_where_repaired
from shoal.errors import BudgetError
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


def steps_of(losses: list[Callable[[], torch.Tensor]], models: Sequence[nn.Module]) -> list[str]:
    """What became of each step: "trained", "out of memory", or "refused"."""
    found = []
    for loss in losses:
        try:
            loss().backward()
        except torch.OutOfMemoryError:
            found.append("out of memory")
        except BudgetError:
            found.append("refused")
        else:
            found.append("trained")
        for model in models:
            model.zero_grad()
    return found


def test_a_loss_that_grows_has_room_in_the_next_step_of_several_graphs() -> None:
    budget = int(0.8 * plain_peak_bytes())
    with memory_limit(budget) as limit:
        model, batch = Broken(True), torch.randn(IMAGE)
        model = shoal.compile(model, budget=budget, allow="recompute")
        losses = [lambda: model(batch).mean()] + 4 * [lambda: large_loss(model(batch))]
        assert steps_of(losses, [model]) == ["trained", "out of memory", "trained", "trained", "trained"]
        assert model.shoal.repairs == 1
        assert limit.peak_bytes <= budget


def test_several_graphs_that_keep_as_little_as_can_be_are_refused_when_the_loss_runs_out() -> None:
    budget = int(0.7 * plain_peak_bytes())
    with memory_limit(budget):
        model, batch = Broken(True), torch.randn(IMAGE)
        model = shoal.compile(model, budget=budget, allow="recompute")
        found = steps_of(4 * [lambda: large_loss(model(batch))], [model])
    assert found == ["out of memory", "out of memory", "refused", "refused"]


def test_a_loss_that_grows_has_room_in_the_next_step_under_a_shared_budget() -> None:
    with memory_limit(None) as limit:
        models, batch = [Broken(False), Broken(False)], torch.randn(IMAGE)
        large_loss(models[0](batch) + models[1](batch)).backward()
        budget = int(0.8 * limit.peak_bytes)
    with memory_limit(budget) as limit:
        shared = shoal.Budget(budget)
        models = [shoal.compile(Broken(False), budget=shared, allow="recompute") for _ in range(2)]

        def outputs() -> torch.Tensor:
            return models[0](batch) + models[1](batch)

        losses = 2 * [lambda: outputs().mean()] + 4 * [lambda: large_loss(outputs())]
        found = steps_of(losses, models)
        assert found == ["trained", "trained", "out of memory", "trained", "trained", "trained"]
        assert shared.status is not None and shared.status.repairs == 1
        assert limit.peak_bytes <= budget


def test_a_graph_that_runs_out_under_a_shared_budget_is_planned_again() -> None:
    peak_bytes = plain_peak_bytes()
    with memory_limit(None) as limit:
        shared = shoal.Budget(2 * peak_bytes)
        model, batch = shoal.compile(Broken(False), budget=shared, allow="recompute"), torch.randn(IMAGE)
        limit.limit_bytes = int(0.5 * peak_bytes)
        found = steps_of(8 * [lambda: model(batch).mean()], [model])
    assert "out of memory" in found, "the test shows nothing"
    assert found[-2:] == ["trained", "trained"]
