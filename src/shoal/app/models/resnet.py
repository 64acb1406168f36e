"""ResNet: He, Zhang, Ren and Sun, "Deep residual learning for image recognition" (2016).

The bottleneck block strides in its 3x3 convolution, not in its first 1x1 ("ResNet v1.5"), as torchvision's does.
"""

from __future__ import annotations

import torch
from torch import nn


def _convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around an identity."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, in_channels, H, W) → (N, width, H/stride, W/stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a widening 1x1 convolution around an identity."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, in_channels, H, W) → (N, 4 * width, H/stride, W/stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, a mean and a linear layer; torchvision's names.

    Args:
        block: `BasicBlock` (18 and 34 layers) or `Bottleneck` (50 and more).
        blocks: how many of them in each stage.
        cifar: a 3x3 stem of stride 1 and no first pool, for 32-pixel images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        num_classes: int = 1000,
        in_channels: int = 3,
        cifar: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, 64, 3) if cifar else _convolution(in_channels, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if cifar else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, blocks[0], 1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, blocks[1], 2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, blocks[2], 2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_channels: int, width: int, count: int, stride: int
) -> nn.Sequential:
    out_channels = width * block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(_convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))
    first = block(in_channels, width, stride, downsample)
    return nn.Sequential(first, *(block(out_channels, width, 1, None) for _ in range(count - 1)))
