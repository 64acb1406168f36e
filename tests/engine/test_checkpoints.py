"""Regions under `torch.utils.checkpoint` are a hint: they run once, and the plan decides what is computed again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.core.plan import Plan
from tests.engine.keywords import keywords
from tests.engine.training_laws import costs_that_do_not_matter, images, keep_nothing, mean_square

STEPS = 3


class Block(nn.Module):
    """Random, and it counts its calls."""

    def __init__(self, inputs: int, channels: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(inputs, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.GELU())
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.dropout(self.layers(x), 0.2)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool | None, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(3), Block(8), Block(8)])
        self.head = nn.Linear(8, 5)
        self.reentrant = reentrant
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)  # its input needs no gradient: reentrant checkpoints would give it none
        if self.breaks:
            print(end="")
        x = self.through(self.blocks[1], x)
        return self.head(self.through(self.blocks[2], x).mean((2, 3)))

    def through(self, block: nn.Module, x: torch.Tensor) -> Any:
        return block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of all steps, each with the random numbers of its own seed."""
    found: list[torch.Tensor] = []
    for seed, batch in enumerate(images(STEPS, 4, 3, 16, 16)):
        torch.manual_seed(seed)
        mean_square(model(batch)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad)
            parameter.grad = None
    return found


def planned(model: nn.Module, **how: Any) -> nn.Module:
    return shoal.compile(copy.deepcopy(model), allow="bitwise" if "budget" in how else None, **keywords(how))


@pytest.mark.parametrize(("reentrant", "breaks"), [(False, False), (True, False), (True, True)])
def test_a_region_runs_once_and_gradients_are_those_of_plain_checkpoints(reentrant: bool, breaks: bool) -> None:
    torch.manual_seed(0)
    plain = Checkpointed(reentrant=reentrant, breaks=breaks)
    model = planned(plain, budget="1GiB", planner=keep_nothing)
    with costs_that_do_not_matter():
        ours = gradients(model)
    assert all(map(torch.equal, ours, gradients(plain)))
    assert [block.calls for block in plain.blocks] == [STEPS, 2 * STEPS, 2 * STEPS]
    assert [block.calls for block in model.blocks] == [STEPS] * 3
    assert [int(block.layers[1].num_batches_tracked) for block in model.blocks] == [STEPS] * 3
    assert model.shoal.plan.checkpoints == 2
    assert model.shoal.plan.recomputed


def test_every_means_of_the_default_may_be_used_beside_checkpoints() -> None:
    """Dynamo's path to a layer in a region leads through the function that holds it."""
    torch.manual_seed(0)
    plain = Checkpointed(reentrant=False)
    model = shoal.compile(copy.deepcopy(plain), budget="1GiB")
    with costs_that_do_not_matter():
        for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert model.shoal.plan.checkpoints == 2


def test_the_plan_has_the_ops_of_the_model_without_checkpoints(tmp_path: Any) -> None:
    torch.manual_seed(0)
    plans: list[Plan] = []
    for reentrant in (None, False, True):
        model = planned(Checkpointed(reentrant=reentrant))
        with costs_that_do_not_matter():
            mean_square(model(images(1, 4, 3, 16, 16)[0])).backward()
        plans.append(model.shoal.plan)
    without, *checkpointed = plans
    assert without.checkpoints == 0 and "checkpoints" not in without.explain()
    for plan in checkpointed:
        assert [op.target for op in plan.graph.ops] == [op.target for op in without.graph.ops]
        assert plan.predicted_peak_bytes == without.predicted_peak_bytes
        assert plan.explain().count("checkpoints     2 of torch.utils.checkpoint, taken as hints") == 1
        assert Plan.load(plan.save(tmp_path / "plan.json")).checkpoints == 2


@pytest.mark.usefixtures("real_machine")
def test_a_budget_between_the_least_and_keeping_everything_is_met() -> None:
    torch.manual_seed(0)
    plain = Checkpointed(reentrant=False)
    kept = planned(plain)
    gradients(kept)
    model = planned(plain, budget=int(0.7 * kept.shoal.predicted_peak_bytes))
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert 0 < model.shoal.measured_peak_bytes <= model.shoal.budget_bytes
