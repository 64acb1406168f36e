"""Networks of every kind are captured whole and train as in plain PyTorch, whatever is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from examples import networks as models
from examples.networks import mobilenet
from examples.networks.densenet import DenseNet
from examples.networks.googlenet import GoogLeNet, Inception
from examples.networks.unet import UNet
from examples.networks.vgg import VGG
from shoal.app.models import BasicBlock, Bottleneck, ResNet
from tests.engine.training_laws import assert_same_training, images, keep_by_chance

SIDES = {"alexnet": 67, "unet3d": 8, "densenet121": 32, "unet": 16, "resnet18_cifar": 8}
OTHER_DEPTHS = ("vgg16", "vgg16_bn", "vgg19", "vgg19_bn", "resnet18", "resnet34")  # of networks that are here


def shallow_googlenet(**options: Any) -> nn.Module:
    net = GoogLeNet(**options)
    for name in ("4b", "4c", "4d", "4e", "5a"):
        setattr(net, f"inception{name}", nn.Identity())
    net.inception5b = Inception(512, 384, (192, 384), (48, 128), 128)
    return net


def shallow_mobilenet(**options: Any) -> nn.Module:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mobilenet, "STAGES", ((1, 16, 1, 1), (6, 24, 2, 2), (6, 64, 2, 2), (6, 320, 1, 1)))
        return mobilenet.MobileNetV2(**options)


SHALLOW: dict[str, Callable[..., nn.Module]] = {
    "densenet121": partial(DenseNet, (2, 2, 1, 1)),
    "googlenet": shallow_googlenet,
    "mobilenet_v2": shallow_mobilenet,
    "resnet18_cifar": partial(ResNet, BasicBlock, (1, 2, 1, 1), cifar=True),
    "resnet50": partial(ResNet, Bottleneck, (1, 2, 1, 1)),
    "unet": partial(UNet, 2, 2, 8, in_channels=3),
    "unet3d": partial(UNet, 3, 2, 4, in_channels=3),
    "vgg19_cifar": partial(VGG, 11, True, cifar=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in models.names() if name not in OTHER_DEPTHS])
def test_every_network_trains_like_plain_pytorch(name: str) -> None:
    with torch.device("meta"):
        net = SHALLOW.get(name, partial(models.build, name))(num_classes=5)
    for module in net.modules():
        if isinstance(module, nn.Linear):  # 32 hidden features instead of 4096: 100 million weights take their time
            rows, columns = (32 if size == 4096 else size for size in (module.out_features, module.in_features))
            module.__init__(columns, rows, device="meta")
    net.to_empty(device="cpu")
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    batches = images(2, *models.example_shape(name, 2, SIDES.get(name, 32)))
    trained = assert_same_training(net, batches, keep_by_chance(1, 0.6, 0.2))
    assert len(trained.shoal.plan.recomputed) > 3
    assert [name for name, parameter in trained.named_parameters() if parameter.grad is None] == []
