"""At the border of compiled regions: writes, views, running statistics, random numbers, drawn cuts, other sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.engine import compiled_regions
from tests.engine.compile.compiled import compiled
from tests.engine.training_laws import (
    costs_that_do_not_matter,
    images,
    offload_by_chance,
    ordered_by_chance,
    same_bits,
    train,
)
from tests.uncompiled import interpreted


@pytest.fixture(autouse=True)
def regions_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of any size are made, run op by op, and stay however long they take."""
    interpreted(monkeypatch)
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)


class Written(nn.Module):
    """Writes into what regions make and read: whole tensors, parts of them through views, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.conv(x))
        y[:, ::2].mul_(0.5)
        y.add_(y.mean((2, 3), keepdim=True))
        self.seen.add_(y.detach().sum((0, 2, 3)))
        z = 2 * torch.tanh(y)
        z.transpose(1, 2)[0].clamp_(max=0.5)
        return self.last(z).sigmoid_()


class Viewed(nn.Module):
    """What a region makes leaves it as views, several of one block, to ops, to the backward pass and to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(100, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = F.silu(self.conv(x)) * 1.5 + 1
        left, right = y.chunk(2, dim=1)
        rows = self.linear(y.flatten(2).transpose(1, 2).transpose(1, 2))
        return left.transpose(1, 2), (right * left.sigmoid()).unsqueeze(0), rows


class Random(nn.Module):
    """Masks between pointwise ops, one of which is drawn like a tensor that a region makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.silu(self.conv(x)), 0.3, self.training).sigmoid()
        return self.last(y * (1 + 0.1 * torch.rand_like(y))).tanh()


class Statistics(nn.Module):
    """Batch norms that move running statistics: with momentum, cumulative, without affine, and one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(a, 8, 3, padding=1) for a in (3, 8, 8)])
        self.norm, self.mean = nn.BatchNorm2d(8, momentum=0.3), nn.BatchNorm2d(8, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.convs[0](x)))
        z = F.silu(self.mean(self.convs[1](y)))
        return self.norm(self.convs[2](z)) + y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "written": Written,
    "viewed": Viewed,
    "random": Random,
    "statistics": Statistics,
}


def a_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def loss_of(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum((one.square().mean() for one in several), torch.zeros(()))


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return train(model, images(2, 4, 3, 12, 12), loss_of=loss_of)


@cache
def trained_with_everything_kept(name: str) -> dict[str, torch.Tensor]:
    return trained(compiled(a_model(name), kernels="compiled", planner="keep_all", budget=None))


@pytest.mark.parametrize("name", MODELS)
def test_kept_and_recomputed_are_equal_and_near_eager(name: str) -> None:
    """Running statistics too: they move once a step however often a norm is made again."""
    with costs_that_do_not_matter():
        again = compiled(a_model(name), kernels="compiled")
        found = trained(again)
        kept = trained_with_everything_kept(name)
    assert any("compiled_region" in op.target for op in again.shoal.plan.graph.ops) and again.shoal.plan.recomputed
    assert all(same_bits(found[key], kept[key]) for key in kept)
    for key, value in trained(a_model(name)).items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["viewed", "statistics"])
def test_a_region_is_offloaded_and_runs_in_another_order_as_any_op(name: str) -> None:
    with costs_that_do_not_matter():
        kept = trained_with_everything_kept(name)
        offloading = compiled(
            a_model(name), kernels="compiled", planner=offload_by_chance(1, 0.0, 0.0), offload_to="host"
        )
        offloaded = trained(offloading)
        ordering = compiled(a_model(name), kernels="compiled", planner=ordered_by_chance(1))
        ordered = trained(ordering)
    plan = offloading.shoal.plan
    assert any("compiled_region" in plan.graph.ops[plan.graph.producer[s.id]].target for s in plan.offloaded)
    assert ordering.shoal.plan.captured_order
    assert all(same_bits(offloaded[key], kept[key]) and same_bits(ordered[key], kept[key]) for key in kept)


def test_each_size_has_regions_of_its_own() -> None:
    planned, plain = shoal.compile(a_model("random"), options=shoal.Options(kernels="compiled")), a_model("random")
    for size in (12, 15, 12):
        (batch,) = images(1, 4, 3, size, size)
        torch.manual_seed(7)
        found = planned(batch)
        torch.manual_seed(7)
        torch.testing.assert_close(found, plain(batch), rtol=1e-4, atol=1e-5)
        found.sum().backward()
        planned.zero_grad()
    regions = [{op.target for op in plan.graph.ops if "compiled_region" in op.target} for plan in planned.shoal.plans]
    assert len(regions) == 2 and all(regions) and not regions[0] & regions[1]


@pytest.mark.slow
def test_cuts_that_are_drawn_anew_train_as_with_eager_kernels() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(a, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for a in (3, 8)]
    net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    batches = images(2, 4, 3, 12, 12)

    def trained_with(kernels: str) -> tuple[dict[str, torch.Tensor], nn.Module]:
        model = shoal.compile(
            shoal.split(copy.deepcopy(net), 0.5, (2, 1), stochastic=0.3), options=shoal.Options(kernels=kernels)
        )
        return train(model, batches, loss_of=loss_of), model

    (found, planned), (expected, _) = trained_with("compiled"), trained_with("eager")
    assert planned.shoal.plan.compiled
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_one_region_that_cannot_be_compiled_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def each(graphs: object) -> list[object]:
        def one(module: torch.fx.GraphModule) -> object:
            if "sigmoid" in module.code:
                return RuntimeError("no such op\nand more")
            return lambda arguments: module(*arguments)

        return [one(module) for module, _ in graphs]

    monkeypatch.setattr("shoal.kernels.compiled_region.compile_each", each)
    (batch,) = images(1, 4, 3, 12, 12)
    planned = shoal.compile(a_model("statistics"), options=shoal.Options(kernels="compiled"))
    planned(batch).sum().backward()
    regions, *failed = planned.shoal.plan.compiled
    assert "regions of" in regions
    assert failed == ["not silu_backward, native_batch_norm_backward: no such op; run one by one"]
    assert any("silu" in op.target for op in planned.shoal.plan.graph.ops)
    assert any("compiled_region" in op.target for op in planned.shoal.plan.graph.ops)
