"""U-Net in one, two or three dimensions: Ronneberger, Fischer and Brox (2015); Cicek et al., "3D U-Net" (2016).

With batch norm and padded convolutions, so the output has the input's size. Each encoder level's output is saved from
its forward op to its decoder's, across everything in between: the long-lived storages that make these networks large.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.fx
from torch import nn

from shoal.errors import InputError

_CONVOLUTION = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_MAX_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


def check_spatial(spatial: Sequence[int], levels: int) -> None:
    """Raise InputError unless every side can be halved `levels` times."""
    multiple = 2**levels
    if any(side < multiple or side % multiple for side in spatial):
        padded = [-(-side // multiple) * multiple for side in spatial]
        cropped = [side // multiple * multiple for side in spatial]
        would_do = [sides for sides in (cropped, padded) if min(sides) > 0]
        got, *named = ("x".join(map(str, sides)) for sides in (spatial, *would_do))
        raise InputError(
            f"a U-Net of {levels} levels got size {got}: every side must be a multiple of {multiple}; give "
            f"{' or '.join(named)}"
        )


torch.fx.wrap("check_spatial")  # asked when the network runs, not while it is traced


class UNet(nn.Module):
    """An encoder of `levels` halvings, a decoder of as many doublings, and a skip by concatenation at every level.

    Args:
        dims: spatial dimensions, 1, 2 or 3.
        levels: halvings; every side of the input must be a multiple of `2**levels`.
        base_channels: of the first level; each level down has twice as many.
        num_classes: channels of the output.
        in_channels: channels of the input.
    """

    def __init__(self, dims: int, levels: int, base_channels: int, num_classes: int = 2, in_channels: int = 3) -> None:
        super().__init__()
        self.dims = dims
        self.levels = levels
        widths = [base_channels * 2**level for level in range(levels + 1)]
        self.pool = _MAX_POOL[dims](2)
        self.encoders = nn.ModuleList(
            _two_convolutions(dims, below, width)
            for below, width in zip([in_channels, *widths], widths[:-1], strict=False)
        )
        self.bottom = _two_convolutions(dims, widths[-2], widths[-1])
        self.ups = nn.ModuleList(_TRANSPOSED[dims](2 * width, width, 2, stride=2) for width in reversed(widths[:-1]))
        self.decoders = nn.ModuleList(_two_convolutions(dims, 2 * width, width) for width in reversed(widths[:-1]))
        self.head = _CONVOLUTION[dims](base_channels, num_classes, 1)
        for module in self.modules():
            if isinstance(module, _CONVOLUTION[dims]) and module is not self.head:
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, *spatial) → (N, num_classes, *spatial).

        Raises:
            InputError: a side is no multiple of `2**levels`.
        """
        check_spatial(x.shape[2:], self.levels)
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x = decoder(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def _two_convolutions(dims: int, in_channels: int, out_channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers.append(_CONVOLUTION[dims](channels, out_channels, 3, padding=1, bias=False))
        layers.append(_BATCH_NORM[dims](out_channels))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


unet = partial(UNet, 2, 4, 64)
unet3d = partial(UNet, 3, 3, 32)
