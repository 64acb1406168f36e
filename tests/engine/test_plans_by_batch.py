"""Plans of any batch, most of them of steps that are not captured, are those of `shoal.plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.engine import plans_by_batch as module
from shoal.engine.plans_by_batch import PlansByBatch
from shoal.engine.pricing import Pricing
from shoal.errors import CaptureError
from tests.engine.training_laws import blocks

HOW: dict[str, Any] = {
    "hardware": "p100-nvlink",
    "offload_to": None,
    "allow": "recompute, fuse",
}


def images(batch: int) -> torch.Tensor:
    return torch.empty(batch, 3, 8, 8, device="meta")


@pytest.fixture
def net() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*blocks(3, 8, 8), nn.Flatten())


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches of all steps that are captured."""
    batches: list[int] = []
    original = module.in_dynamo

    def counting(model: nn.Module, example: torch.Tensor, *rest: Any, **options: Any) -> Any:
        batches.append(example.shape[0])
        return original(model, example, *rest, **options)

    monkeypatch.setattr(module, "in_dynamo", counting)
    monkeypatch.setattr("shoal.engine.plan.in_dynamo", counting)
    return batches


def plans_of(
    net: nn.Module,
    budget: int,
    make_example: Callable[[int], torch.Tensor] = images,
    max_batch: int = 2**16,
    optimizer: torch.optim.Optimizer | None = None,
) -> PlansByBatch:
    return PlansByBatch(
        Pricing.of(net, budget, optimizer=optimizer, name=None, options=None, **HOW), make_example, max_batch
    )


@pytest.mark.slow
def test_each_is_the_plan_of_its_batch_and_few_steps_are_captured(net: nn.Module, captured: list[int]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    plans = plans_of(net, 400_000, optimizer=optimizer)
    made = {batch: plans(batch) for batch in (1, 9, 5, 16, 17)}
    assert sorted(captured) == [1, 4, 16, 64]
    for batch, plan in made.items():
        assert plan == shoal.plan(net, images(batch), 400_000, optimizer=optimizer, **HOW)
    assert made[17].graph.static_bytes > 0
    captured.clear()
    assert plans(9) is made[9] and not captured


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_example",
    [
        lambda side: torch.empty(2, 3, side, side, device="meta"),  # bytes grow with its square
        lambda batch: images(batch)[:30],  # has no more
    ],
    ids=["sides", "no more"],
)
def test_what_does_not_grow_evenly_is_captured(
    net: nn.Module, make_example: Callable[[int], torch.Tensor], captured: list[int]
) -> None:
    assert plans_of(net, 2**20, make_example)(9) == shoal.plan(net, make_example(9), 2**20, **HOW)
    assert captured.count(len(make_example(9))) >= 2  # by the search and by `shoal.plan`


def test_make_example_is_asked_for_none_above_the_most(net: nn.Module) -> None:
    asked: list[int] = []

    def make_example(batch: int) -> torch.Tensor:
        asked.append(batch)
        return images(batch)

    plans_of(net, 2**20, make_example, max_batch=63)(9)
    assert asked == [9]


@pytest.mark.slow
def test_maps_that_are_large_in_some_batches_alone_have_their_own_variant(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 4 images all are small, at 16 all are large: those in between have a variant that neither has."""
    with torch.device("meta"):
        net = nn.Sequential(*blocks(3, 8, 12), nn.Flatten())
    monkeypatch.setattr("shoal.engine.search.variants.MIN_ELEMS", 8 * 8 * 8 * 10)
    monkeypatch.setattr("shoal.transforms.fuse.fusion_size.MIN_ELEMS", 8 * 8 * 8 * 10)
    plan = plans_of(net, 2**20)(8)
    assert [candidate.variant.large_only for candidate in plan.candidates].count(True) == 1
    assert plan == shoal.plan(net, images(8), 2**20, **HOW)


def test_a_batch_that_the_network_cannot_take_is_told() -> None:
    with torch.device("meta"):
        narrow = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten())
    with pytest.raises(CaptureError):
        plans_of(narrow, 2**20)(1)


def test_nothing_is_allocated(net: nn.Module) -> None:
    """A batch of a quarter of a terabyte."""
    plan = plans_of(net, 2**50, lambda batch: torch.empty(batch, 3, 512, 512, device="meta"), 2**18)(2**16 + 1)
    assert plan.graph.resident_bytes > 2**37
    assert all(parameter.is_meta and parameter.grad is None for parameter in net.parameters())


@pytest.mark.slow
def test_slices_of_the_batch_are_looked_at_too(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.search.split_variants._PARTS", ())  # patches take long to plan
    with torch.device("meta"):
        net = nn.Sequential(*blocks(3, 24, 24), nn.MaxPool2d(4), nn.Flatten())
    how = HOW | {"allow": "recompute, exact_split"}

    def images_of(batch: int) -> torch.Tensor:
        return torch.empty(batch, 3, 16, 16, device="meta")

    plans = PlansByBatch(Pricing.of(net, 1_000_000, optimizer=None, name=None, options=None, **how), images_of, 2**16)
    made = plans(18)
    assert made.variant.slices > 1 and sorted(set(captured)) == [4, 16, 18, 64]
    assert made == shoal.plan(net, images_of(18), 1_000_000, **how)
