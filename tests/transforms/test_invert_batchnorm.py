"""Networks into the inverted form and back, checked: what is inexact or impossible is refused by name."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import CaptureError, InputError
from shoal.transforms.invert_batchnorm import invert_batchnorm, restore_batchnorm
from shoal.transforms.inverted_model import RestoredModel
from tests.inverted_networks import small_resnet, with_trained_layers
from tests.training_laws import conv_bn_relu


def test_hooks_of_a_module_that_is_taken_apart_are_refused_before_anything_changes() -> None:
    net = nn.Sequential(conv_bn_relu(3, 4), nn.Flatten())
    net[0].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="0 has hooks, which do not run in a converted network"):
        invert_batchnorm(net)
    assert torch.equal(net[0][1].weight, torch.ones(4))


def test_there_and_back_the_network_is_what_it_was() -> None:
    net = with_trained_layers(small_resnet()).eval()
    x = torch.randn(4, 3, 12, 12)
    before, state = net(x), copy.deepcopy(net.state_dict())
    restored = restore_batchnorm(invert_batchnorm(net), activation="relu")
    assert restored is net
    assert not restored.training
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)
    for name, value in restored.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_trained_inverted_network_is_restored_to_the_same_function(training: bool) -> None:
    net = small_resnet()
    net[4].p = 0.0
    converted = with_trained_layers(invert_batchnorm(net))
    with torch.no_grad():
        converted.get_parameter("1.weight")[:2] = torch.tensor([0.0, -1e-6])
    converted.train(training)
    x = torch.randn(4, 3, 12, 12)
    before = copy.deepcopy(converted)(x)
    names = list(converted.state_dict())
    restored = restore_batchnorm(converted)
    assert isinstance(restored, RestoredModel)
    assert list(restored.state_dict()) == names
    torch.testing.assert_close(restored(x), before, rtol=1e-5, atol=1e-5)


def test_a_network_whose_activations_did_not_change_is_restored_as_itself() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
    assert restore_batchnorm(invert_batchnorm(net)) is net


def inexact() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU())
    with torch.no_grad():
        net[1].weight[2:4] = 1e-5
        net[1].bias[2:12] = 1.0
    return net


def test_channels_over_the_limit_are_refused_by_name_and_nothing_changes() -> None:
    net = inexact()
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(InputError, match=r"inexact to more than limit=0.001 in 1: channels 2, 3: their scales"):
        invert_batchnorm(net, limit=1e-3)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    converted = invert_batchnorm(net, limit=1.0)
    with pytest.raises(InputError, match="channels 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"):
        restore_batchnorm(converted, limit=3.5e-6)
    assert converted.reconstruction_errors()["1"].argmax() in (2, 3)
    assert converted.reconstruction_errors(torch.bfloat16)["1"].min() > 1e-3


def test_inexact_channels_are_told_when_a_network_is_restored(caplog: pytest.LogCaptureFixture) -> None:
    converted = invert_batchnorm(inexact())
    assert "in channels 2, 3" in converted.describe()
    with caplog.at_level(logging.WARNING):
        restore_batchnorm(converted)
    assert "inverted batch norm was inexact in 1: channels 2, 3" in caplog.text


@pytest.mark.parametrize("slope", [0, -0.1, float("inf"), float("nan"), "0.1", True])
def test_a_slope_without_an_inverse_is_refused(slope: Any) -> None:
    with pytest.raises(InputError, match="a slope of 0 has no inverse"):
        invert_batchnorm(small_resnet(), slope)


def test_mistakes_are_told() -> None:
    converted = invert_batchnorm(small_resnet())
    for mistake, said in (
        (lambda: invert_batchnorm(converted), "inverted already"),
        (lambda: invert_batchnorm("resnet"), "model is a str"),  # type: ignore[arg-type]
        (lambda: invert_batchnorm(small_resnet(), limit=0), "limit=0: expected the largest error allowed"),
        (lambda: restore_batchnorm(small_resnet()), "expected what shoal.invert_batchnorm returned"),  # type: ignore[arg-type]
        (lambda: restore_batchnorm(converted, activation="elu"), "activation='elu'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=said):
            mistake()


class Control(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_traced_is_told() -> None:
    with pytest.raises(CaptureError, match=r"torch\.fx cannot trace Control"):
        invert_batchnorm(Control())
