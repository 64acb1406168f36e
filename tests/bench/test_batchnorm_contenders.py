"""Pools before 1x1 convolutions: the same function under the same names, and only where it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bench import batchnorm_steps
from bench.batchnorm_contenders import pool_first
from bench.frame import WrongResult
from bench.workload import Workload
from examples import networks as models
from examples.networks.densenet import DenseNet
from tests.raising import raising


def transition(bias: bool) -> nn.Sequential:
    convolution = nn.Conv2d(6, 4, 1, bias=bias)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), convolution, nn.AvgPool2d(2), nn.BatchNorm2d(4))


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_equal_in_float64(bias: bool) -> None:
    torch.manual_seed(0)
    net = transition(bias).double()
    swapped = copy.deepcopy(net)
    assert pool_first(swapped) == 1
    assert [type(layer).__name__ for layer in swapped] == ["Conv2d", "ReLU", "AvgPool2d", "Conv2d", "BatchNorm2d"]
    assert swapped.state_dict().keys() == net.state_dict().keys()
    images, grad = torch.randn(2, 3, 9, 9, dtype=torch.float64), torch.randn(2, 4, 4, 4, dtype=torch.float64)
    for model in (net, swapped):
        (model(images) * grad).sum().backward()
    torch.testing.assert_close(swapped(images), net(images), rtol=1e-12, atol=1e-12)
    theirs = dict(swapped.named_parameters())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-10, atol=1e-12)


def test_the_transitions_of_a_densenet_are_swapped_and_nothing_of_a_resnet_is() -> None:
    net = DenseNet((1, 1, 1))
    names = list(net.state_dict())
    assert pool_first(net) == 2 and sorted(net.state_dict()) == sorted(names)
    assert pool_first(net) == 0, "once"
    assert pool_first(models.build("resnet18")) == 0


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(3, 4, 3), nn.AvgPool2d(2)),
        (nn.Conv2d(3, 4, 1, stride=2), nn.AvgPool2d(2)),
        (nn.Conv2d(3, 4, 1, padding=1), nn.AvgPool2d(2)),
        (nn.Conv2d(3, 4, 1), nn.AvgPool2d(2, padding=1)),
        (nn.Conv2d(3, 4, 1), nn.AvgPool2d(2, ceil_mode=True)),
        (nn.Conv2d(3, 4, 1), nn.AvgPool2d(2, divisor_override=3)),
        (nn.Conv2d(3, 4, 1), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AvgPool2d(2)),
    ],
)
def test_what_does_not_commute_stays(layers: tuple[nn.Module, ...]) -> None:
    net = nn.Sequential(*layers)
    assert pool_first(net) == 0 and list(net) == list(layers)


def test_the_benchmark_holds_the_rewrite_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(name: str, batch: int, image: int) -> Workload:
        torch.manual_seed(0)
        net = nn.Sequential(transition(bias=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return Workload(name, net, torch.randn(batch, 3, image, image), torch.arange(batch))

    monkeypatch.setattr(batchnorm_steps, "make_workload", small)
    batchnorm_steps.assert_pools_first_are_exact("densenet121", 32)

    def pools_to_the_largest(model: nn.Module) -> int:
        model[0][3] = nn.MaxPool2d(2)  # type: ignore[index,operator]
        return 1

    monkeypatch.setattr(batchnorm_steps, "pool_first", pools_to_the_largest)
    with raising(WrongResult, "densenet121", "float64"):
        batchnorm_steps.assert_pools_first_are_exact("densenet121", 32)
