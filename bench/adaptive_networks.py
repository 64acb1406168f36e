"""The three networks of A2DTWP's table I, at full size and an eighth as wide for small images.

Both sizes have the same layers under the same names, so that the widths which AWP gives to the layers of one can be
given to the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.app.models.resnet import BasicBlock, ResNet

CLASSES = 200  # of the paper's ImageNet200
Convolution = tuple[int, int, int, bool]  # channels, kernel, stride, whether a 2x2 pool follows

_ALEXNET: Sequence[Convolution] = (
    (64, 11, 4, True),
    (192, 5, 1, True),
    (384, 3, 1, False),
    (384, 3, 1, False),
    (256, 3, 1, True),
)
_SMALL_ALEXNET: Sequence[Convolution] = (
    (8, 5, 1, True),
    (24, 5, 1, True),
    (48, 3, 1, False),
    (48, 3, 1, False),
    (32, 3, 1, True),
)
_VGG_A = ((64, True), (128, True), (256, False), (256, True), (512, False), (512, True), (512, False), (512, True))


@dataclass(frozen=True)
class Network:
    """One of the paper's.

    Attributes:
        full, narrow: make it, for images of 224 and 32 pixels.
        batch: the paper's, of its fastest 32-bit training.
        by: what AWP gives bits to.
        rate: learning rate of the narrow one.
    """

    full: Callable[[], nn.Module]
    narrow: Callable[[], nn.Module]
    batch: int
    by: str
    rate: float


def plain(convolutions: Sequence[Convolution], dense: Sequence[int], classes: int, image: int) -> nn.Module:
    """Convolutions, pools and dense layers in a row, ReLU between them; no batch norm, no dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for width, kernel, stride, pools in convolutions:
        layers += [nn.Conv2d(channels, width, kernel, stride, kernel // 2), nn.ReLU(inplace=True)]
        if pools:
            layers.append(nn.MaxPool2d(2))
        channels = width
    model = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        features = model(torch.zeros(1, 3, image, image)).shape[1]
    for width in dense:
        model.extend([nn.Linear(features, width), nn.ReLU(inplace=True)])
        features = width
    model.append(nn.Linear(features, classes))
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model


def _narrow_resnet() -> nn.Module:
    """ResNet-34 an eighth as wide, with the paper's stem."""
    torch_model = ResNet(BasicBlock, (3, 4, 6, 3), num_classes=10)
    for name, module in list(torch_model.named_modules()):
        parent, _, last = name.rpartition(".")
        holder = torch_model.get_submodule(parent)
        if isinstance(module, nn.Conv2d):
            inputs = 3 if module.in_channels == 3 else module.in_channels // 8
            narrow = nn.Conv2d(
                inputs, module.out_channels // 8, module.kernel_size, module.stride, module.padding, bias=False
            )
            nn.init.kaiming_normal_(narrow.weight, mode="fan_out", nonlinearity="relu")
            setattr(holder, last, narrow)
        elif isinstance(module, nn.BatchNorm2d):
            setattr(holder, last, nn.BatchNorm2d(module.num_features // 8))
    torch_model.fc = nn.Linear(64, 10)
    return torch_model


def _vgg(divisor: int) -> list[Convolution]:
    return [(width // divisor, 3, 1, pools) for width, pools in _VGG_A]


NETWORKS = {
    "alexnet": Network(
        lambda: plain(_ALEXNET, (4096, 4096, 4096), CLASSES, 224),
        lambda: plain(_SMALL_ALEXNET, (128, 128, 128), 10, 32),
        64,
        "layer",
        0.02,
    ),
    "vgg_a": Network(
        lambda: plain(_vgg(1), (4096, 4096), CLASSES, 224),
        lambda: plain(_vgg(8), (128, 128), 10, 32),
        64,
        "layer",
        0.02,
    ),
    "resnet34": Network(
        lambda: ResNet(BasicBlock, (3, 4, 6, 3), num_classes=CLASSES), _narrow_resnet, 128, "block", 0.1
    ),
}
