"""Buffers that a planned step changes in place are written once in each step, as eager PyTorch writes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shoal


class ReadsItsMean(nn.Module):
    """A batch norm whose running mean is read before and after: it is changed by a copy when the forward pass ends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.norm.running_mean.sum()  # type: ignore[union-attr]
        y = self.norm(x)
        return y + before + self.norm.running_mean.sum()  # type: ignore[no-any-return,union-attr]


class Counts(nn.Module):
    """A buffer that is replaced by a new value, of no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5).add_(x.detach().abs().amax((0, 2, 3)) * 0.5)
        return self.layer(x / self.scale.clone().view(1, -1, 1, 1))  # type: ignore[no-any-return]


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 6, 6)


def trained(model: nn.Module, x: torch.Tensor, n_steps: int = 3) -> dict[str, tuple[Any, int]]:
    """Each buffer and how often it was written, after some steps."""
    for _ in range(n_steps):
        model.zero_grad()
        model(x).square().sum().backward()
    return {name: (buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}


def assert_as_eager(model: nn.Module, x: torch.Tensor, *, written_as_often: bool) -> None:
    plain = copy.deepcopy(model)
    ours, theirs = trained(shoal.compile(model, budget="1GiB", allow="bitwise"), x), trained(plain, x)
    for name, (value, writes) in theirs.items():
        assert torch.equal(ours[name][0], value), name
        if written_as_often:
            assert ours[name][1] == writes, name


def test_running_statistics_and_counters_are_written_as_often_as_by_eager_pytorch(x: torch.Tensor) -> None:
    body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
    assert_as_eager(nn.Sequential(*body), x, written_as_often=True)


class MakesTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return TwoTensor(x, x * 2)


def test_before_a_result_that_is_made_of_other_tensors_statistics_get_their_values(x: torch.Tensor) -> None:
    assert_as_eager(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), MakesTwo()), x, written_as_often=False)


def test_beside_a_parameter_that_is_made_of_other_tensors_statistics_get_their_values(x: torch.Tensor) -> None:
    last = nn.Conv2d(4, 3, 1)
    last.weight = nn.Parameter(TwoTensor(last.weight.detach(), last.weight.detach().clone()))
    assert_as_eager(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), last), x, written_as_often=False)


@pytest.mark.parametrize("layer", [ReadsItsMean, Counts])
def test_what_cannot_be_changed_in_place_still_gets_its_new_value(layer: type[nn.Module], x: torch.Tensor) -> None:
    assert_as_eager(nn.Sequential(nn.Conv2d(3, 4, 3), layer(), nn.BatchNorm2d(4)), x, written_as_often=False)
