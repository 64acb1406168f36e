"""Small networks to invert, and batch norms as training leaves them."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.engine.training_laws import conv_bn_relu


class Residual(nn.Module):
    """A block with one ReLU for two places, as torchvision's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + x)


def small_resnet() -> nn.Sequential:
    """Four batch norms, of which two are before an addition."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        Residual(8),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def with_trained_layers(net: nn.Module, least: float = 0.2) -> nn.Module:
    """Batch norms as training leaves them, negative scales included."""
    generator = torch.Generator().manual_seed(3)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            drawn = torch.randn(module.num_features, generator=generator)
            nn.init.zeros_(module.bias)
            with torch.no_grad():
                module.weight.copy_(torch.where(drawn < 0, drawn - least, drawn + least))
                module.bias.copy_(torch.randn(module.num_features, generator=generator) / 2)
                module.running_mean.copy_(drawn / 4)
                module.running_var.copy_(drawn.abs() + 0.5)
    return net


def with_leaky(net: nn.Sequential, slope: float = 0.01) -> nn.Sequential:
    """The converted function in PyTorch's own modules; in `Residual` the first ReLU only."""

    class Leaky(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.bn2(self.conv2(F.leaky_relu(self.bn1(self.conv1(x)), slope)))
            return self.relu(out + x)

    net = copy.deepcopy(net)
    net[2] = nn.LeakyReLU(slope)
    net[3].__class__ = Leaky
    return net


def chain() -> nn.Sequential:
    return nn.Sequential(
        *(conv_bn_relu(a, b) for a, b in ((3, 16), (16, 16), (16, 16))), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
