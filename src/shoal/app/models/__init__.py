"""The networks of the papers, by name.

Their parameters and buffers carry torchvision's names and shapes, so its checkpoints load with
`load_state_dict(..., strict=True)`, and they are initialised as torchvision does. torchvision is not needed. The U-Nets
and the CIFAR forms have no counterpart there.

Imports `shoal.errors` only.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shoal.app.models.alexnet import AlexNet
from shoal.app.models.densenet import DenseNet
from shoal.app.models.googlenet import GoogLeNet
from shoal.app.models.mobilenet import MobileNetV2
from shoal.app.models.resnet import BasicBlock, Bottleneck, ResNet
from shoal.app.models.unet import UNet, check_spatial
from shoal.app.models.vgg import VGG
from shoal.errors import InputError, brief

__all__ = ["build", "example_shape", "names"]

_ADDRESSABLE_BYTES = 2**47  # what x86-64 and AArch64 leave a process with pages of four levels


@dataclass(frozen=True)
class _Network:
    """How to make a network, its default classes, its spatial dimensions, and how often it halves its input."""

    make: Callable[..., nn.Module]
    num_classes: int = 1000
    dims: int = 2
    levels: int = 0


_NETWORKS = {
    "alexnet": _Network(AlexNet),
    "vgg11": _Network(partial(VGG, 11, False)),
    "vgg16": _Network(partial(VGG, 16, False)),
    "vgg16_bn": _Network(partial(VGG, 16, True)),
    "vgg19": _Network(partial(VGG, 19, False)),
    "vgg19_bn": _Network(partial(VGG, 19, True)),
    "vgg19_cifar": _Network(partial(VGG, 19, True, cifar=True), num_classes=10),
    "resnet18": _Network(partial(ResNet, BasicBlock, (2, 2, 2, 2))),
    "resnet34": _Network(partial(ResNet, BasicBlock, (3, 4, 6, 3))),
    "resnet50": _Network(partial(ResNet, Bottleneck, (3, 4, 6, 3))),
    "resnet18_cifar": _Network(partial(ResNet, BasicBlock, (2, 2, 2, 2), cifar=True), num_classes=10),
    "densenet121": _Network(partial(DenseNet, (6, 12, 24, 16))),
    "mobilenet_v2": _Network(MobileNetV2),
    "googlenet": _Network(GoogLeNet),
    "unet": _Network(partial(UNet, 2, 4, 64), num_classes=2, levels=4),
    "unet3d": _Network(partial(UNet, 3, 3, 32), num_classes=2, dims=3, levels=3),
}


def names() -> tuple[str, ...]:
    """Every name that `build` knows."""
    return tuple(_NETWORKS)


def build(name: str, *, num_classes: int | None = None, in_channels: int = 3, seed: int | None = None) -> nn.Module:
    """A freshly initialised network in training mode. Replaces `torchvision.models.<name>()`.

    Args:
        name: one of `names()`.
        num_classes: size of the last layer; by default 1000, 10 for the CIFAR forms, 2 for the U-Nets.
        in_channels: channels of the input.
        seed: draws the weights from a generator of their own, so they depend on nothing else and PyTorch's CPU
            generator stays where it was; None draws from that generator. Not for weights made on another device
            (under `with torch.device("cuda"):`).

    Raises:
        InputError: no such network, or a number is not positive.

    >>> model = build("resnet18", num_classes=10, seed=0)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    network = _network(name)
    num_classes = network.num_classes if num_classes is None else num_classes
    _check_positive(num_classes=num_classes, in_channels=in_channels)
    if seed is None:
        return network.make(num_classes=num_classes, in_channels=in_channels)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return network.make(num_classes=num_classes, in_channels=in_channels)


def example_shape(name: str, batch: int, image: int, *, in_channels: int = 3) -> tuple[int, ...]:
    """The shape of a batch of square images (cubes for a network of three dimensions) for this network.

    Args:
        name: one of `names()`.
        batch: samples in the batch.
        image: pixels along each side.
        in_channels: as given to `build`.

    Raises:
        InputError: no such network, a number is not positive, the batch is larger than memory can ever be, or the
            network cannot take that side.

    >>> example_shape("unet3d", 2, 64)
    (2, 3, 64, 64, 64)
    """
    network = _network(name)
    _check_positive(batch=batch, image=image, in_channels=in_channels)
    spatial = (image,) * network.dims
    if 4 * math.prod((batch, in_channels, *spatial)) > _ADDRESSABLE_BYTES:
        raise InputError(f"batch={brief(batch)}, image={brief(image)}: no process can address so many bytes; give less")
    check_spatial(spatial, network.levels)
    return (batch, in_channels, *spatial)


def _network(name: str) -> _Network:
    if name in _NETWORKS:
        return _NETWORKS[name]
    close = difflib.get_close_matches(str(name).lower(), _NETWORKS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(f"unknown model {name!r}: {hint}known are {', '.join(_NETWORKS)}")


def _check_positive(**numbers: int) -> None:
    for what, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{what}={number!r}: expected a positive int")
