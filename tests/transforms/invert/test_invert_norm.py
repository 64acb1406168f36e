"""Networks into the inverted form and back, checked: what is inexact or impossible is refused by name."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import CaptureError, InputError
from shoal.transforms.invert.invert_norm import invert_norm
from shoal.transforms.invert.inverted_model import RestoredModel
from tests.engine.training_laws import conv_bn_relu, same_bits
from tests.inverted_networks import small_resnet, with_trained_layers
from tests.raising import raising


def test_hooks_of_a_module_that_is_taken_apart_are_refused_before_anything_changes() -> None:
    net = nn.Sequential(conv_bn_relu(3, 4), nn.Flatten())
    net[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError):
        invert_norm(net)
    assert torch.equal(net[0][1].weight, torch.ones(4))


def test_there_and_back_the_network_is_what_it_was() -> None:
    net = with_trained_layers(small_resnet()).eval()
    x = torch.randn(4, 3, 12, 12)
    before, state = net(x), copy.deepcopy(net.state_dict())
    restored = invert_norm(net).restore(activation="relu")
    assert restored is net
    assert not restored.training
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)
    for name, value in restored.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_trained_inverted_network_is_restored_to_the_same_function(training: bool) -> None:
    net = small_resnet()
    net[4].p = 0.0
    converted = with_trained_layers(invert_norm(net))
    with torch.no_grad():
        converted.get_parameter("1.weight")[:2] = torch.tensor([0.0, -1e-6])
    converted.train(training)
    x = torch.randn(4, 3, 12, 12)
    before = copy.deepcopy(converted)(x)
    names = list(converted.state_dict())
    restored = converted.restore()
    assert isinstance(restored, RestoredModel)
    assert list(restored.state_dict()) == names
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)


def train_some(net: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, targets = torch.randn(10, 3, 12, 12), torch.arange(10) % 5
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), targets).backward()
        optimizer.step()
    return net


def test_trained_scales_at_below_and_near_zero_come_back_to_the_bit_and_are_told() -> None:
    torch.manual_seed(0)
    net = train_some(with_trained_layers(small_resnet())).eval()
    with torch.no_grad():
        net[1].weight[:5] = torch.tensor([0.0, -0.0, -1e-6, 1e-5, -0.5])
        net[1].bias[:5] = 0.5
    x = torch.randn(4, 3, 12, 12)
    before, state = net(x), copy.deepcopy(net.state_dict())
    with raising(InputError, "limit=0.001"):
        invert_norm(net, limit=1e-3)
    assert all(same_bits(value, state[name]) for name, value in net.state_dict().items())
    converted = invert_norm(net, slope=1e-6)
    assert "in channels 0, 1, 2, 3" in converted.describe().splitlines()[2]
    torch.testing.assert_close(converted(x), before, rtol=1e-3, atol=1e-3)  # the four scales are eps, or 2 eps
    restored = copy.deepcopy(converted).restore(activation="relu")
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)
    assert all(same_bits(value, state[name]) for name, value in restored.state_dict().items())


def test_a_network_trained_in_the_inverted_form_is_the_same_function_after_it_is_restored() -> None:
    torch.manual_seed(0)
    converted = train_some(invert_norm(with_trained_layers(small_resnet()))).eval()
    assert min(converted.get_parameter(f"{name}.weight").min() for name in ("1", "3.bn1", "6")) < 0
    x = torch.randn(4, 3, 12, 12)
    before = converted(x)
    torch.testing.assert_close(converted.restore()(x), before, rtol=1e-5, atol=1e-5)


def test_a_restored_network_is_inverted_again() -> None:
    restored = invert_norm(with_trained_layers(small_resnet()), slope=0.2).restore().eval()
    x = torch.randn(4, 3, 12, 12)
    before = restored(x)
    again = invert_norm(restored)
    assert [(site.layer, site.was, site.slope) for site in again.inverted] == [
        ("1", "LeakyReLU", 0.2),
        ("3.bn1", "LeakyReLU", 0.2),
        ("6", "ELU", 1.0),
    ]
    torch.testing.assert_close(again(x), before, rtol=1e-4, atol=1e-5)
    assert again.restore() is restored
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)


def test_a_network_whose_activations_did_not_change_is_restored_as_itself() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
    assert invert_norm(net).restore() is net


def inexact() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU())
    with torch.no_grad():
        net[1].weight[2:4] = 1e-5
        net[1].bias[2:12] = 1.0
    return net


def test_channels_over_the_limit_are_refused_by_name_and_nothing_changes() -> None:
    net = inexact()
    state = copy.deepcopy(net.state_dict())
    with raising(InputError, "limit=0.001"):
        invert_norm(net, limit=1e-3)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    converted = invert_norm(net, limit=1.0)
    with pytest.raises(InputError):
        converted.restore(limit=3.5e-6)
    assert converted.reconstruction_errors()["1"].argmax() in (2, 3)
    assert converted.reconstruction_errors(torch.bfloat16)["1"].min() > 1e-3


def test_inexact_channels_are_told_when_a_network_is_restored(caplog: pytest.LogCaptureFixture) -> None:
    converted = invert_norm(inexact())
    assert "in channels 2, 3" in converted.describe()
    with caplog.at_level(logging.WARNING):
        converted.restore()
    assert "inverted norms were inexact in 1: channels 2, 3" in caplog.text


@pytest.mark.parametrize("slope", [0, -0.1, float("inf"), float("nan"), "0.1", True])
def test_a_slope_without_an_inverse_is_refused(slope: Any) -> None:
    with pytest.raises(InputError):
        invert_norm(small_resnet(), slope)


def test_mistakes_are_told() -> None:
    converted = invert_norm(small_resnet())
    for mistake, said in (
        (lambda: invert_norm(converted), "inverted"),
        (lambda: invert_norm("resnet"), "str"),  # type: ignore[arg-type]
        (lambda: invert_norm(small_resnet(), limit=0), "limit=0"),
        (lambda: converted.restore(activation="elu"), "activation='elu'"),  # type: ignore[arg-type]
    ):
        with raising(InputError, said):
            mistake()


class Control(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_traced_is_told() -> None:
    with raising(CaptureError, "torch.fx"):
        invert_norm(Control())
