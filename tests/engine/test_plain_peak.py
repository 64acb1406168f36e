"""What is called plain PyTorch's peak is the peak of plain PyTorch, whose step nothing has rewritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.plan import Plan
from shoal.core.variant import WHOLE
from shoal.errors import BudgetError
from tests.engine.training_laws import needs_compiler

SIGNALS = 4, 16, 4096
IMAGES = 8, 16, 32, 32


def leaky() -> nn.Module:
    """Of each leaky ReLU eager PyTorch saves the input, and the next layer its output."""
    layers = (layer for _ in range(4) for layer in (nn.Conv1d(16, 16, 3, padding=1), nn.LeakyReLU(0.1)))
    return nn.Sequential(*layers, nn.Conv1d(16, 16, 1))


def clipped() -> nn.Module:
    layers = (layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6()))
    return nn.Sequential(*layers)


def dropped() -> nn.Module:
    """On the CPU eager PyTorch saves noise of 4 bytes an element, where `native_dropout` is traced."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 1), nn.Dropout(0.1))))


def gated() -> nn.Module:
    """In place, SiLU copies its input in the forward pass: only the backward pass reads the copy."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(16, 16, 1), nn.SiLU(inplace=True))))


class Folded(nn.Module):
    """Eager PyTorch leaves what it folds, and the gradient of what it unfolds, in the memory of all windows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.fold(F.unfold(x, 7, padding=3), x.shape[2:], 7, padding=3)


def folded() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 4, 1), Folded(), nn.Sigmoid(), nn.Conv2d(4, 4, 1))


def peak_of_plain_pytorch(model: nn.Module, x: torch.Tensor) -> int:
    """By the allocator's events in the second step, without Shoal's meter."""

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak + sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), x))


@pytest.mark.parametrize(
    ("network", "shape"), [(leaky, SIGNALS), (clipped, IMAGES), (dropped, IMAGES), (gated, IMAGES), (folded, IMAGES)]
)
def test_the_peak_of_the_step_as_it_is_written(network: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    model: Any = shoal.compile(network(), budget="1GiB", optimizer="sgd", allow="exact")
    model(x).square().mean().backward()
    plan = model.shoal.plan
    assert plan.plain_peak_bytes == pytest.approx(peak_of_plain_pytorch(network(), x), rel=0.02)
    assert plan.rewritten_peak_bytes == plan.plain_timeline.peak_bytes


def volumes() -> nn.Module:
    """Between volumes PyTorch's convolutions take scratch, which ours do not."""
    layers = (layer for _ in range(3) for layer in (nn.Conv3d(8, 8, 3, padding=1), nn.LeakyReLU(0.1)))
    return nn.Sequential(*layers)


def bags() -> nn.Module:
    """At the minimum its ops run in another order than captured."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.max = nn.EmbeddingBag(50, 64, mode="mean"), nn.EmbeddingBag(50, 64, mode="max")
            self.layers = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.layers(self.mean(words) + self.max(words))

    return Bags()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("network", "x", "share"), [(volumes, torch.randn(4, 8, 12, 12, 12), 16), (bags, torch.randint(0, 50, (64, 12)), 2)]
)
def test_it_is_the_same_in_another_variant_or_order_once_the_loop_is_known(
    network: Callable[[], nn.Module], x: torch.Tensor, share: int
) -> None:
    plain_bytes = peak_of_plain_pytorch(network(), x)
    with pytest.raises(BudgetError) as refused:
        shoal.compile(network(), plain_bytes // share, optimizer="sgd", allow="exact")(x)
    torch._dynamo.reset()
    model: Any = shoal.compile(network(), refused.value.least_feasible_bytes, optimizer="sgd", allow="exact")
    for _ in range(3):
        model(x).square().mean().backward()
        model.zero_grad()
        plan = model.shoal.plan
    assert plan.plain_peak_bytes == pytest.approx(plain_bytes, rel=0.02)
    if plan.variant != WHOLE:
        assert any(one.variant == WHOLE for one in plan.candidates)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return shoal.plan(leaky(), torch.randn(SIGNALS), budget="1GiB", allow="recompute")


def test_both_figures_are_shown_where_they_differ(plan: Plan) -> None:
    assert plan.rewritten_peak_bytes < 0.8 * plan.plain_peak_bytes
    assert plan.plain_peak in plan.explain()
    unchanged = shoal.plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 8), budget="1GiB")
    assert unchanged.rewritten_peak_bytes == unchanged.plain_peak_bytes


def test_a_saved_plan_still_knows_it(plan: Plan, tmp_path: Path) -> None:
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert (loaded.plain_peak_bytes, loaded.rewritten_peak_bytes) == (plan.plain_peak_bytes, plan.rewritten_peak_bytes)
