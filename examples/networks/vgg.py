"""VGG: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition" (2015)."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

# Convolutions per stage, by the network's depth in weight layers; every stage ends in a 2x2 pool.
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Module):
    """Stages of 3x3 convolutions and a classifier; torchvision's names. Images from 32 pixels.

    Args:
        depth: 11, 16 or 19.
        batch_norm: a batch norm after every convolution.
        cifar: one linear layer on the 512 channels that a 32-pixel image leaves, in place of the three large ones.
    """

    def __init__(
        self, depth: int, batch_norm: bool, num_classes: int = 1000, in_channels: int = 3, cifar: bool = False
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, convolutions in zip(WIDTHS, CONVOLUTIONS[depth], strict=True):
            for _ in range(convolutions):
                layers.append(nn.Conv2d(in_channels, width, 3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(width))
                layers.append(nn.ReLU(inplace=True))
                in_channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1 if cifar else 7)
        self.classifier: nn.Module
        if cifar:
            self.classifier = nn.Linear(512, num_classes)
        else:
            self.classifier = nn.Sequential(
                nn.Linear(512 * 7 * 7, 4096),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(4096, 4096),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(4096, num_classes),
            )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, num_classes)."""
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


vgg11 = partial(VGG, 11, False)
vgg16 = partial(VGG, 16, False)
vgg16_bn = partial(VGG, 16, True)
vgg19 = partial(VGG, 19, False)
vgg19_bn = partial(VGG, 19, True)
vgg19_cifar = partial(VGG, 19, True, num_classes=10, cifar=True)
