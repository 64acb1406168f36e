"""GoogLeNet (Inception v1): Szegedy et al., "Going deeper with convolutions" (2015), with batch norm.

Like torchvision's, ported from TensorFlow: the "5x5" branch has a 3x3 kernel, and batch norm has eps 0.001.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class _Convolution(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four branches side by side, concatenated.

    Args:
        in_channels: of the input.
        one: channels of the 1x1 branch.
        three, five: channels of the reduction and of the convolution in the two middle branches.
        pool: channels after the pooled branch.
    """

    def __init__(self, in_channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.branch1 = _Convolution(in_channels, one)
        self.branch2 = nn.Sequential(_Convolution(in_channels, three[0]), _Convolution(*three, kernel=3))
        self.branch3 = nn.Sequential(_Convolution(in_channels, five[0]), _Convolution(*five, kernel=3))
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), _Convolution(in_channels, pool)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, in_channels, H, W) → (N, one + three[1] + five[1] + pool, H, W)."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    """Nine inception blocks, without the two auxiliary classifiers, so the output is one tensor; torchvision's names.

    torchvision's checkpoints hold the auxiliary classifiers too (untrained in its ImageNet weights): their keys,
    `aux1.*` and `aux2.*`, are dropped as a state dict is loaded. Those ImageNet weights also expect pixels in
    [-1, 1], that is `(pixel - 0.5) / 0.5`, where the other networks expect ImageNet's mean and deviation.
    """

    def __init__(self, num_classes: int = 1000, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = _Convolution(in_channels, 64, kernel=7, stride=2)
        self.maxpool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.conv2 = _Convolution(64, 64)
        self.conv3 = _Convolution(64, 192, kernel=3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception3a = Inception(192, 64, (96, 128), (16, 32), 32)
        self.inception3b = Inception(256, 128, (128, 192), (32, 96), 64)
        self.maxpool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception4a = Inception(480, 192, (96, 208), (16, 48), 64)
        self.inception4b = Inception(512, 160, (112, 224), (24, 64), 64)
        self.inception4c = Inception(512, 128, (128, 256), (24, 64), 64)
        self.inception4d = Inception(512, 112, (144, 288), (32, 64), 64)
        self.inception4e = Inception(528, 256, (160, 320), (32, 128), 128)
        self.maxpool4 = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.inception5a = Inception(832, 256, (160, 320), (32, 128), 128)
        self.inception5b = Inception(832, 384, (192, 384), (48, 128), 128)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(1024, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.01, a=-2, b=2)
        self.register_load_state_dict_pre_hook(_drop_auxiliary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) → (N, num_classes)."""
        x = self.maxpool1(self.conv1(x))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        x = self.inception4c(self.inception4b(self.inception4a(x)))
        x = self.maxpool4(self.inception4e(self.inception4d(x)))
        x = self.avgpool(self.inception5b(self.inception5a(x)))
        return self.fc(self.dropout(torch.flatten(x, 1)))


def _drop_auxiliary(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for key in [key for key in state if key.startswith((f"{prefix}aux1.", f"{prefix}aux2."))]:
        del state[key]
