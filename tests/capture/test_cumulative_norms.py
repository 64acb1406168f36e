"""Batch norms whose running statistics are means over all batches train in one graph, with the bits of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import shoal
from shoal.capture import traced_functions
from shoal.kernels.batch_norm_vectors import cumulative_statistics
from tests.engine.training_laws import differences, images, train


@pytest.fixture(autouse=True)
def none_met_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_functions, "_admitted", False)


def network(momentum: float | None, memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU())
        for inputs in (3, 8, 8)
    ]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(8, momentum=momentum, affine=False), nn.Linear(8, 5)
    return nn.Sequential(*blocks, *head).to(memory_format=memory_format)  # type: ignore[call-overload,no-any-return]


def average_from_here(model: nn.Module) -> None:
    """What SWA does to a model's batch norms before it gathers their statistics again."""
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            norm.reset_running_stats()
            norm.momentum = None


def nothing(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("momentum", "later", "captures"), [(None, nothing, 1), (0.1, average_from_here, 2)])
def test_a_step_with_them_is_one_graph_inside_its_budget_and_moves_the_same_statistics(
    momentum: float | None, later: Callable[[nn.Module], None], captures: int, memory_format: torch.memory_format
) -> None:
    net = network(momentum, memory_format)
    planned = shoal.compile(copy.deepcopy(net), budget="1500KiB", allow="bitwise", options=shoal.Options(strict=True))
    for batches in (images(2, 8, 3, 32, 32), images(3, 8, 3, 32, 32)):
        ours, theirs = train(planned, batches), train(net, batches)
        assert not differences(ours, theirs)
        for name, buffer in net.named_buffers():
            assert torch.equal(dict(planned.named_buffers())[name], buffer), name
        for model in (planned, net):
            later(model)
    status = planned.shoal
    assert status.captures == captures
    assert status.plan.recomputed
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert status.measured_peak_bytes <= status.budget_bytes


def test_the_plan_of_a_model_with_them_is_made_without_training_it() -> None:
    net = network(None)
    plan = shoal.plan(net, torch.randn(8, 3, 32, 32), budget="1500KiB")
    assert plan.predicted_peak_bytes <= 1500 * 1024
    assert all(norm.num_batches_tracked == 0 for norm in net.modules() if isinstance(norm, _BatchNorm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_counted_batch_moves_statistics_with_the_bits_of_the_layer(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm2d(6, momentum=None).to(dtype)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    for n_batches, x in enumerate(images(4, 5, 6, 7, 7), 1):
        norm(x.to(dtype))
        mean, var = cumulative_statistics(x.to(dtype), mean, var, torch.tensor(n_batches))
        assert torch.equal(mean, norm.running_mean) and torch.equal(var, norm.running_var)


def test_pytorchs_layer_is_its_own_again_behind_a_step() -> None:
    plain = _BatchNorm.forward
    shoal.compile(network(None), budget="4MiB")(torch.randn(8, 3, 32, 32)).sum().backward()
    assert _BatchNorm.forward is plain and plain.__module__.startswith("torch.")


def test_layers_with_a_momentum_are_captured_as_they_are() -> None:
    model = shoal.compile(network(0.1), budget="4MiB")
    model(torch.randn(8, 3, 32, 32)).sum().backward()
    assert not traced_functions._admitted
