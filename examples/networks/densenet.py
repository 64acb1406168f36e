"""DenseNet: Huang, Liu, van der Maaten and Weinberger, "Densely connected convolutional networks" (2017).

Every layer reads the concatenation of all earlier outputs of its block and normalises it again, so the bytes that plain
training saves grow with the square of a block's depth: recomputation pays most here.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

GROWTH = 32
BOTTLENECK = 4 * GROWTH


class _DenseLayer(nn.Module):
    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(in_channels, BOTTLENECK, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(BOTTLENECK, GROWTH, 3, padding=1, bias=False)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        out = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(out)))


class _DenseBlock(nn.ModuleDict):
    def __init__(self, layers: int, in_channels: int) -> None:
        super().__init__({f"denselayer{i + 1}": _DenseLayer(in_channels + i * GROWTH) for i in range(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def _transition(in_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(in_channels),
            relu=nn.ReLU(inplace=True),
            conv=nn.Conv2d(in_channels, in_channels // 2, 1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )


class DenseNet(nn.Module):
    """DenseNet-BC with growth 32; torchvision's names. Images from 32 pixels.

    `blocks` is the number of layers in each dense block: (6, 12, 24, 16) is DenseNet-121. The published torchvision
    file of 2017 has keys of the form `denselayer1.norm.1`; torchvision rewrites them as it loads, so save its
    `state_dict()` once to get the names of today.
    """

    def __init__(self, blocks: tuple[int, ...], num_classes: int = 1000, in_channels: int = 3) -> None:
        super().__init__()
        channels = 64
        self.features = nn.Sequential(
            OrderedDict(
                conv0=nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False),
                norm0=nn.BatchNorm2d(channels),
                relu0=nn.ReLU(inplace=True),
                pool0=nn.MaxPool2d(3, stride=2, padding=1),
            )
        )
        for i, layers in enumerate(blocks, 1):
            self.features.add_module(f"denseblock{i}", _DenseBlock(layers, channels))
            channels += layers * GROWTH
            if i < len(blocks):
                self.features.add_module(f"transition{i}", _transition(channels))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, num_classes)."""
        x = F.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


densenet121 = partial(DenseNet, (6, 12, 24, 16))
