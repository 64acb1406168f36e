"""The convolutions of a network, as they are called: collected from it by hooks, each shape once, with how often it is.

A convolution *normalises* where it reads a ReLU of a batch norm and nothing else came in between: then it can do both
itself. A residual sum before the ReLU comes in between.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from shoal.app import models


@dataclass(frozen=True)
class Layer:
    """One convolution of two dimensions at one size of its input.

    Attributes:
        in_channels, out_channels, groups: as of `nn.Conv2d`.
        kernel, stride, padding, dilation: along height and width.
        height, width: of the input, in pixels.
        normalises: whether it reads relu(batch_norm(...)).
        needs_input_gradient: not where it reads the images.
    """

    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    height: int
    width: int
    normalises: bool
    needs_input_gradient: bool

    @property
    def name(self) -> str:
        """Such as `norm 64>128 1x1 @56`; stride and groups where they are not 1.

        >>> ones = (1, 1)
        >>> Layer(64, 128, (3, 3), (2, 2), ones, ones, 1, 56, 56, True, True).name
        'norm 64>128 3x3 /2 @56'
        """
        side = f"{self.height}" if self.height == self.width else f"{self.height}x{self.width}"
        parts = ["norm"] if self.normalises else []
        parts += [f"{self.in_channels}>{self.out_channels}", f"{self.kernel[0]}x{self.kernel[1]}"]
        parts += [f"/{self.stride[0]}"] if self.stride != (1, 1) else []
        parts += [f"{self.groups} groups"] if self.groups != 1 else []
        return " ".join([*parts, f"@{side}"])

    def out_pixels(self) -> int:
        """Of one image's result."""
        sides = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        rows, columns = (
            (side + 2 * pad - reach * (size - 1) - 1) // step + 1 for side, size, step, pad, reach in sides
        )
        return rows * columns

    def flops(self, batch: int) -> int:
        """Of a forward pass; a backward pass takes one or two times as many."""
        taps = self.kernel[0] * self.kernel[1]
        return 2 * batch * self.out_pixels() * self.out_channels * taps * self.in_channels // self.groups


def layers_of(network: str, image: int) -> dict[Layer, int]:
    """Every convolution of a network of `shoal.app.models`, in the order of its forward pass, and how often it comes.

    Args:
        network: its name.
        image: pixels along each side of its input.

    Raises:
        InputError: there is no such network, or it does not take such images.

    >>> [(layer.name, count) for layer, count in layers_of("vgg19_bn", 32).items()][:3]
    [('3>64 3x3 @32', 1), ('norm 64>64 3x3 @32', 1), ('64>128 3x3 @16', 1)]
    """
    with torch.device("meta"):
        model = models.build(network)
        images = torch.empty(models.example_shape(network, 2, image))
    return collect(model, images)


def collect(model: nn.Module, images: torch.Tensor) -> dict[Layer, int]:
    """Every call of an `nn.Conv2d` in the forward pass of `model` on `images`; those with a padding mode left out."""
    found: Counter[Layer] = Counter()
    normalised: dict[int, int] = {}  # tensor → its version as the batch norm left it
    rectified: dict[int, int] = {}
    held: list[torch.Tensor] = []  # an address is used once

    reads_a_norm: dict[nn.Module, bool] = {}

    def before_relu(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        reads_a_norm[module] = normalised.get(id(inputs[0])) == inputs[0]._version

    def after_relu(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if reads_a_norm[module]:
            held.append(output)
            rectified[id(output)] = output._version

    def after_norm(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        held.append(output)
        normalised[id(output)] = output._version

    def before_convolution(module: nn.Conv2d, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0]
        if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            pairs = [module.kernel_size, module.stride, module.padding, module.dilation]
            kernel, stride, padding, dilation = ((pair[0], pair[1]) for pair in pairs)
            of = (module.in_channels, module.out_channels, kernel, stride, padding, dilation, module.groups)
            reads_both = rectified.get(id(x)) == x._version
            found[Layer(*of, x.shape[-2], x.shape[-1], reads_both, x.requires_grad)] += 1

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_pre_hook(before_convolution))
        elif isinstance(module, nn.BatchNorm2d):
            hooks.append(module.register_forward_hook(after_norm))
        elif isinstance(module, nn.ReLU):
            hooks += [module.register_forward_pre_hook(before_relu), module.register_forward_hook(after_relu)]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return dict(found)
