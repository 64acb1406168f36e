"""MobileNetV2: Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks" (2018)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

# (expansion of the hidden layer, output channels, blocks, stride of the first block)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def _convolution(
    in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """Widen by a 1x1 convolution, filter each channel by a 3x3, narrow by a linear 1x1; identity where shapes allow."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(_convolution(in_channels, hidden, kernel=1))
        layers.append(_convolution(hidden, hidden, stride=stride, groups=hidden))
        layers.append(nn.Conv2d(hidden, out_channels, 1, bias=False))
        layers.append(nn.BatchNorm2d(out_channels))
        self.conv = nn.Sequential(*layers)
        self.residual = stride == 1 and in_channels == out_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, in_channels, H, W) → (N, out_channels, H/stride, W/stride)."""
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Seventeen inverted residuals at width 1; torchvision's names."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(in_channels, 32, stride=2)]
        channels = 32
        for expansion, out_channels, blocks, stride in STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, out_channels, stride if block == 0 else 1, expansion))
                channels = out_channels
        layers.append(_convolution(channels, 1280, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, num_classes)."""
        x = F.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(torch.flatten(x, 1))
