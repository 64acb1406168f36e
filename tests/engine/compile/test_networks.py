"""Networks of `shoal.app.models`, of every kind, are captured whole and train as in plain PyTorch, whatever is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.app import models
from tests.engine.training_laws import assert_same_training, images, keep_by_chance

SIDES = {"alexnet": 67, "unet3d": 8, "densenet121": 32, "unet": 16, "resnet18_cifar": 8}
OTHER_DEPTHS = ("vgg11", "vgg16", "vgg16_bn", "vgg19_bn", "resnet34")  # of networks that are here


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in models.names() if name not in OTHER_DEPTHS])
def test_every_network_trains_like_plain_pytorch(name: str) -> None:
    with torch.device("meta"):
        net = models.build(name, num_classes=5)
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
