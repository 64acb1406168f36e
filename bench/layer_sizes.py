"""The parameters of networks as shapes alone, and a module whose backward pass is nothing but their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.app import models
from shoal.errors import InputError

Shape = tuple[int, ...]
_COLUMNS = 64


def shapes_of(name: str) -> list[Shape]:
    """The parameters of a network of `shoal.app.models`, in its order.

    `vgg11/2` is the network at half its widths: all sizes of all parameters but the pixels of kernels, the colours
    and the classes are divided by 2. A number is one matrix of about so many elements.

    Raises:
        InputError: no such network.

    >>> shapes_of("alexnet")[0], shapes_of("alexnet/2")[0], shapes_of("alexnet/2")[-2:], shapes_of("10000")
    ((64, 3, 11, 11), (32, 3, 11, 11), [(1000, 2048), (1000,)], [(156, 64)])
    """
    if name.isdigit():
        return [(max(1, int(name) // _COLUMNS), _COLUMNS)]
    network, _, by = name.partition("/")
    if by and not (by.isdigit() and int(by) >= 1):
        raise InputError(f"{name!r}: expected a whole number after the stroke, as in vgg11/2")
    with torch.device("meta"):
        model = models.build(network)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    return [_narrow(shape, int(by or 1), classes=shapes[-1][0]) for shape in shapes]


def _narrow(shape: Shape, by: int, classes: int) -> Shape:
    kept = (3, classes)
    channels, pixels = shape[:2], shape[2:]
    return (*(size if size in kept else max(1, size // by) for size in channels), *pixels)


def elems_of(shapes: Sequence[Shape]) -> int:
    """Of all together.

    >>> elems_of(shapes_of("resnet18"))
    11689512
    """
    return sum(math.prod(shape) for shape in shapes)


class ReadyGradients(nn.Module):
    """Parameters of some shapes; the backward pass of what `forward` returns hands their gradients over, ready made.

    Nobody reads the parameters' values, so they take no memory: the pages are never touched.
    """

    def __init__(self, shapes: Sequence[Shape], gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        self._gradients = list(gradients)

    def forward(self) -> torch.Tensor:
        """A zero with a history."""
        return _Hand.apply(self._gradients, *self.weights)


class _Hand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *(gradient.detach() for gradient in ctx.gradients)


def drawn(shapes: Sequence[Shape], seed: int) -> list[torch.Tensor]:
    """Normal numbers, of another deviation for each parameter, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(len(shapes), generator=torch.Generator().manual_seed(0)).mul_(3).neg_().exp_().tolist()
    return [torch.randn(shape, generator=generator).mul_(scale) for shape, scale in zip(shapes, scales, strict=True)]
