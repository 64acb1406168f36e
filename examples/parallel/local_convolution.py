"""A locally connected layer: a convolution without shared weights, a kernel for each position of its output."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import InputError


class LocalConv2d(nn.Module):
    """A convolution whose every output place has its own kernel and bias (cuda-convnet's local layer).

    The two locally connected layers of the CIFAR-10 network in Dettmers 2016, section 3.4, are these. In plain PyTorch:
    `torch.nn.functional.unfold`, then a product of matrices for each place.

    Args:
        in_channels, out_channels: of the maps.
        size: (height, width) of the input, which fixes the number of kernels.
        kernel_size, stride, padding: along both sides.
        bias: whether a bias is added, one for each output value.

    Attributes:
        weight: (out_channels, out_height, out_width, in_channels * kernel_size**2) float32.
        bias: (out_channels, out_height, out_width) float32, or None.

    Raises:
        InputError: a number is out of its range, or the kernel does not fit.

    >>> layer = LocalConv2d(64, 32, (8, 8), 3, padding=1)
    >>> layer(torch.zeros(2, 64, 8, 8)).shape, tuple(layer.weight.shape)
    (torch.Size([2, 32, 8, 8]), (32, 8, 8, 576))

    Limits: the memory of `unfold`, kernel_size² times the input's; no groups, no dilation.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: tuple[int, int],
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if min(in_channels, out_channels, *size, kernel_size, stride) < 1 or padding < 0:
            raise InputError(
                f"got {in_channels}, {out_channels}, {size=}, {kernel_size=}, {stride=}, {padding=}; expected "
                "positive numbers"
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.size = (size[0], size[1])
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        height, width = ((side + 2 * padding - kernel_size) // stride + 1 for side in size)
        if height < 1 or width < 1:
            raise InputError(f"got a kernel of {kernel_size} on {size} pixels, padding {padding}; take a smaller one")
        self.out_size = (height, width)
        self.weight = nn.Parameter(torch.empty(out_channels, height, width, in_channels * kernel_size**2))
        self.bias = nn.Parameter(torch.empty(out_channels, height, width)) if bias else None
        bound = 1 / math.sqrt(in_channels * kernel_size**2)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, in_channels, height, width) → (N, out_channels, out_height, out_width)."""
        if tuple(x.shape[1:]) != (self.in_channels, *self.size):
            raise InputError(
                f"got an input of shape {tuple(x.shape)}, expected (N, {self.in_channels}, {self.size[0]}, "
                f"{self.size[1]}); a local layer has a kernel for each place"
            )
        return self.on_all_rows(x, self.weight, self.bias)

    def input_rows(self, first: int, last: int) -> tuple[int, int]:
        """The rows of the input that the rows from `first` to before `last` of the result read; of padding none.

        >>> LocalConv2d(1, 1, (8, 8), 3, padding=1).input_rows(0, 4)
        (0, 5)
        >>> LocalConv2d(1, 1, (3, 3), 1, padding=1).input_rows(4, 5)  # the last row is all padding
        (3, 3)
        """
        height = self.size[0]
        start, stop = (min(max(row, 0), height) for row in self._padded_rows(first, last))
        return start, stop

    def on_all_rows(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The whole result, or the feature maps that `weight` and `bias` have kernels of."""
        height = self.out_size[0]
        start, stop = self.input_rows(0, height)
        return self.on_rows(x[:, :, start:stop], weight, bias, 0, height)

    def on_rows(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, first: int, last: int
    ) -> torch.Tensor:
        """Rows from `first` to before `last` of the result.

        Args:
            x: (N, in_channels, rows, width), the rows that `input_rows(first, last)` names.
            weight: (O, last - first, out_width, C * kernel_size**2), channels first: of those rows of the result.
            bias: (O, last - first, out_width), or None.
        """
        if first >= last:  # a result of no rows; gradients of no values, as every rank's optimizer expects some
            y = x.sum() * 0 + weight.sum(3)
            return (y if bias is None else y + bias).expand(len(x), -1, -1, -1)
        start, stop = self._padded_rows(first, last)
        # Of what these rows read: how much lies above the input, and how much below it. Both may be all of it.
        above = min(stop, 0) - min(start, 0)
        below = max(stop, self.size[0]) - max(start, self.size[0])
        x = F.pad(x, (self.padding, self.padding, above, below))
        out_channels, height, width, length = weight.shape
        columns = F.unfold(x, self.kernel_size, stride=self.stride)  # (N, C k², places)
        kernels = weight.reshape(out_channels, height * width, length).permute(1, 2, 0)
        y = torch.bmm(columns.permute(2, 0, 1), kernels).permute(1, 2, 0).reshape(len(x), out_channels, height, width)
        return y if bias is None else y + bias

    def _padded_rows(self, first: int, last: int) -> tuple[int, int]:
        """As `input_rows`, padding and all: rows of it are below 0, or from the height on."""
        if first >= last:
            return (0, 0)
        start = first * self.stride - self.padding
        return start, start + (last - 1 - first) * self.stride + self.kernel_size

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, size={self.size}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )
