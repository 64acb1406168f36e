"""A budget holds on every rank of data parallel training: the wrapper's buckets of gradients count in it."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.app.training.ranks import Ranks
from shoal.app.training.strategy import DataParallel
from shoal.memory.limit import memory_limit
from tests.ranks import run_on_ranks

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)
GRADIENT_BYTES = 4 * (3 * 48 * 9 + 48 + 5 * (48 * 48 * 9 + 48) + 6 * 2 * 48 + 48 * 10 + 10)


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for place in range(6):
        layers += [nn.Conv2d(48 if place else 3, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU()]
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def train(budget: str | None, wrapped_first: bool, codec: str | None = None) -> dict[str, Any]:
    with memory_limit(None) as meter:
        model: Any = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if budget is not None and not wrapped_first:
            shoal.compile(model, budget=budget, optimizer=optimizer)
        called: Any = (
            DistributedDataParallel(model, gradient_as_bucket_view=True)
            if codec is None
            else DataParallel(model, optimizer, Ranks(torch.distributed.get_rank(), 2, grouped=True), codec).called
        )
        if budget is not None and wrapped_first:
            assert shoal.compile(called, budget=budget, optimizer=optimizer) is called
        torch.manual_seed(torch.distributed.get_rank())
        images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
        losses = []
        for step in range(4):
            if step == 2:
                meter.reset_peak()
            loss = nn.functional.cross_entropy(called(images), labels)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            del loss
        status = getattr(model, "shoal", None)
        return {
            "losses": losses,
            "peak": meter.peak_bytes,
            "weights": [p.detach().clone() for p in model.parameters()],
            "predicted": status and status.predicted_peak_bytes,
            "measured": status and status.measured_peak_bytes,
            "repairs": status and status.repairs,
        }


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    """What each rank finds without a budget."""
    return run_on_ranks(train, 2, None, False)


@needs_compiler
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_a_budget_is_met_and_nothing_else_changes(plain: list[dict[str, Any]], wrapped_first: bool) -> None:
    budget_bytes = int(0.8 * plain[0]["peak"])
    planned = run_on_ranks(train, 2, f"{budget_bytes}B", wrapped_first)
    for rank, other in zip(planned, plain, strict=True):
        assert rank["losses"] == other["losses"]
        assert all(map(torch.equal, rank["weights"], other["weights"]))
        assert rank["repairs"] == 0
        assert rank["peak"] <= budget_bytes < other["peak"]
        assert rank["measured"] == pytest.approx(rank["predicted"], rel=0.02)
        assert rank["measured"] == pytest.approx(rank["peak"], rel=0.02)
        assert rank["peak"] > 3 * GRADIENT_BYTES  # weights, momentum, buckets
    assert all(map(torch.equal, planned[0]["weights"], planned[1]["weights"]))


@needs_compiler
def test_a_budget_is_met_where_gradients_travel_as_codes() -> None:
    plain = run_on_ranks(train, 2, None, False, "dynamic_tree")
    budget_bytes = int(0.8 * plain[0]["peak"])
    planned = run_on_ranks(train, 2, f"{budget_bytes}B", False, "dynamic_tree")
    for rank, other in zip(planned, plain, strict=True):
        assert rank["losses"] == other["losses"]
        assert rank["peak"] <= budget_bytes < other["peak"]
    assert all(map(torch.equal, planned[0]["weights"], planned[1]["weights"]))
