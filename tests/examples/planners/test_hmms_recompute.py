"""HMMS with batch norms' results made again: a legal plan of fewer bytes, and the same training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import nn

import shoal
from examples.planners.hmms import hmms, theoretical_limit
from examples.planners.hmms_recompute import hmms_recompute, normalised
from shoal.core import presets
from shoal.core.residence import Recompute
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError, InputError
from shoal.transforms.fuse.fuse_batchnorm import fuse_batchnorm
from shoal.transforms.invert.invert_norm import invert_norm
from tests.joint_graphs import captured_step
from tests.raising import raising
from tests.random_steps import HARDWARE, SLOW_LINK, plain_chain, steps


def residual_blocks() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
            self.first_norm, self.second_norm = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.first_norm(self.first(x)))
            return torch.relu(self.second_norm(self.second(y)) + x)

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    p100 = presets.get("p100-nvlink")
    return shoal.plan(
        residual_blocks(), torch.randn(16, 3, 16, 16), hardware=p100, options=shoal.Options(planner="keep_all")
    ).graph


def test_what_batch_norms_return_is_made_again_and_what_they_normalise_leaves(graph: StepGraph) -> None:
    plan = hmms_recompute(graph, HARDWARE, 0)
    again = {name for name, residence in plan.residences.items() if isinstance(residence, Recompute)}
    readers_in_blocks = [op for op in graph.ops[: graph.n_forward] if op.target.startswith("aten.relu.")][::2]
    assert {graph.storages[op.writes[0]].name for op in readers_in_blocks} <= again
    assert again <= {graph.storages[s].name for s in normalised(graph)}


class ByRunningStatistics(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False), ByRunningStatistics(4)],
    ids=["running statistics too", "the batch's only", "running ones only"],
)
def test_every_batch_norm_of_pytorch_is_one_and_so_is_the_activation_behind_it(norm: nn.Module) -> None:
    graph = captured(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.LeakyReLU(), nn.Conv2d(4, 4, 3)))
    assert [target.split(".")[1].split("_legit")[0] for target in targets_of(graph, normalised(graph))] == [
        "_native_batch_norm",
        "leaky_relu",
    ]


def test_what_only_has_batch_norm_in_its_name_is_none() -> None:
    net = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())))
    for model, op in ((fuse_batchnorm(net), "batch_norm_scale"), (invert_norm(net), "inverted_batch_norm")):
        graph = captured(model)
        assert any(op in target for target in targets_of(graph, range(len(graph.storages))))
        assert not any(op in target for target in targets_of(graph, normalised(graph)))


def captured(model: nn.Module) -> StepGraph:
    return captured_step(model, torch.randn(2, 3, 8, 8)).graph


def targets_of(graph: StepGraph, storages: Collection[int]) -> list[str]:
    """Of the forward ops that make these storages, in order."""
    return [op.target for op in graph.ops[: graph.n_forward] if op.writes and op.writes[0] in storages]


def test_the_link_carries_a_larger_share_of_what_is_left(graph: StepGraph) -> None:
    assert graph.link is not None
    slow = replace(graph.link, to_host_bytes_per_second=graph.link.to_host_bytes_per_second / 100)
    graph = replace(graph, link=slow)
    assert 0 < theoretical_limit(graph, slow) < theoretical_limit(graph, slow, normalised(graph)) <= 1
    assert hmms_recompute(graph, HARDWARE, 0).predicted_peak_bytes < hmms(graph, HARDWARE, 0).predicted_peak_bytes


@given(steps())
def test_its_plan_is_legal(graph: StepGraph) -> None:
    graph = replace(graph, link=SLOW_LINK)
    plan = hmms_recompute(graph, HARDWARE, 0)
    assert check_runs(graph, plan.residences, schedule(graph, plan.residences)) == plan.predicted_peak_bytes


def test_under_a_budget_the_device_waits_and_what_cannot_be_is_said(graph: StepGraph) -> None:
    peak_bytes = hmms_recompute(graph, HARDWARE, 0).predicted_peak_bytes
    assert hmms_recompute(graph, HARDWARE, peak_bytes).predicted_peak_bytes <= peak_bytes
    with pytest.raises(BudgetError):
        hmms_recompute(graph, HARDWARE, graph.resident_bytes + 1)
    with raising(InputError, "hmms_recompute"):
        hmms_recompute(plain_chain(3), HARDWARE, 0)


def test_it_trains_as_plain_pytorch_does_bit_for_bit() -> None:
    plain, planned = residual_blocks(), residual_blocks()
    shoal.compile(planned, budget="1GiB", options=shoal.Options(planner=hmms_recompute, rehearse="p100-nvlink"))
    for seed in range(3):
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        for model in (plain, planned):
            model.zero_grad()
            model(images).square().sum().backward()
        for (name, expected), got in zip(plain.named_parameters(), planned.parameters(), strict=True):
            assert torch.equal(expected.grad, got.grad), name  # type: ignore[arg-type]
    for (name, expected), got in zip(plain.named_buffers(), planned.buffers(), strict=True):
        assert torch.equal(expected, got), name
