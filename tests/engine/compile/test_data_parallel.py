"""A budget holds on every rank of data parallel training, the wrapper's buckets included, and these leave as early as
in plain PyTorch."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.app.training.ranks import Ranks
from shoal.app.training.strategy import DataParallel
from shoal.errors import InputError
from shoal.memory.limit import memory_limit
from tests.engine.training_laws import costs_that_do_not_matter
from tests.raising import raising
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


class Linears(nn.Module):
    """Weights that are used twice, or never."""

    def __init__(self, twice: bool, never: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())))
        self.middle = self.first if twice else nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)
        if never:
            self.never = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.body(torch.relu(self.first(x)))))


SMALL_BUCKETS = {"bucket_cap_mb": 0.005}
WAYS: dict[str, dict[str, Any]] = {
    "bucket views, accumulation, frozen weights, hooks on gradients": {"gradient_as_bucket_view": True},
    "unused and shared weights": {"find_unused_parameters": True},
    "static graph, scaled loss": {"static_graph": True},
    "compress_gradients": {},
}


def train_in(way: str, planned: bool) -> tuple[list[torch.Tensor], list[str]]:
    """Weights after some steps, and what happened in the last one: buckets sent, first layer's gradient found."""
    views, unused, scaled, compressed = (way == one for one in WAYS)
    events: list[str] = []
    model = Linears(twice=unused, never=unused)
    model.body[0].requires_grad_(not views)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if planned:
        shoal.compile(model, budget="64MiB", optimizer=optimizer)
    called = DistributedDataParallel(model, **SMALL_BUCKETS, **WAYS[way])
    if compressed:
        shoal.distributed.compress_gradients(called, codec="dynamic_tree")
    else:

        def all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
            events.append("sent")
            return torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(first)

        def first(done: torch.futures.Future[Any]) -> torch.Tensor:
            value: torch.Tensor = done.value()[0]
            return value

        called.register_comm_hook(None, all_reduce)

    def found(gradient: torch.Tensor) -> torch.Tensor | None:
        events.append("first")
        return 2 * gradient if views else None

    model.first.weight.register_hook(found)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    torch.manual_seed(10 + torch.distributed.get_rank())
    for _ in range(3):
        events.clear()
        for is_last in (False, True) if views else (True,):
            x, y = torch.randn(8, 32), torch.randint(4, (8,))
            with nullcontext() if is_last else called.no_sync():
                scaler.scale(nn.functional.cross_entropy(called(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], events


def train_all_ways() -> dict[str, tuple[list[torch.Tensor], list[str], list[torch.Tensor], list[str]]]:
    with costs_that_do_not_matter():
        return {way: (*train_in(way, planned=False), *train_in(way, planned=True)) for way in WAYS}


def test_buckets_leave_during_the_planned_backward_pass_with_plain_ddps_bits() -> None:
    for rank in run_on_ranks(train_all_ways, 2):
        for way, (theirs, their_events, ours, our_events) in rank.items():
            assert all(map(torch.equal, ours, theirs)), way
            assert our_events.count("sent") == their_events.count("sent"), way
            if way != "compress_gradients":
                assert our_events.index("sent") < len(our_events) - 1 - our_events[::-1].index("first"), our_events


def test_data_parallel_in_threads_works_on_one_device_and_is_refused_on_several() -> None:
    model = shoal.compile(Linears(twice=False, never=False), budget="64MiB")
    plain = Linears(twice=False, never=False)
    x = torch.ones(2, 32)
    with costs_that_do_not_matter():
        nn.DataParallel(model)(x).sum().backward()
    plain(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    with raising(InputError, "nn.DataParallel", "DistributedDataParallel"):
        nn.Sequential(model)[0]._replicate_for_data_parallel()  # as nn.DataParallel does, which needs two GPUs for it
    assert type(copy.deepcopy(model)._replicate_for_data_parallel()) is Linears
