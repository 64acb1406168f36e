"""The networks of the papers: `shoal plan --model examples.networks.vgg:vgg19`, or here by name, for `bench`.

Their parameters and buffers carry torchvision's names and shapes, so its checkpoints load with
`load_state_dict(..., strict=True)`, and they are initialised as torchvision does. torchvision is not needed. The U-Nets
and the CIFAR forms have no counterpart there.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch
from torch import nn

from examples.networks import vgg
from examples.networks.alexnet import AlexNet
from examples.networks.densenet import densenet121
from examples.networks.googlenet import GoogLeNet
from examples.networks.mobilenet import MobileNetV2
from examples.networks.unet import check_spatial, unet, unet3d
from shoal.app import models
from shoal.errors import InputError

_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": AlexNet,
    "vgg11": vgg.vgg11,
    "vgg16": vgg.vgg16,
    "vgg16_bn": vgg.vgg16_bn,
    "vgg19": vgg.vgg19,
    "vgg19_bn": vgg.vgg19_bn,
    "vgg19_cifar": vgg.vgg19_cifar,
    **models.RESNETS,
    "densenet121": densenet121,
    "mobilenet_v2": MobileNetV2,
    "googlenet": GoogLeNet,
    "unet": unet,
    "unet3d": unet3d,
}
_LEVELS = {"unet": 4, "unet3d": 3}  # how often a network halves its input


def names() -> tuple[str, ...]:
    """Every name that `build` knows."""
    return tuple(_NETWORKS)


def build(name: str, *, num_classes: int | None = None, in_channels: int = 3, seed: int | None = None) -> nn.Module:
    """A freshly initialised network in training mode. Replaces `torchvision.models.<name>()`.

    Args:
        name: one of `names()`.
        num_classes: size of the last layer; by default 1000, 10 for the CIFAR forms, 2 for the U-Nets.
        in_channels: channels of the input.
        seed: draws the weights from a generator of their own; None draws from PyTorch's CPU generator.

    Raises:
        InputError: no such network.

    >>> model = build("resnet18", num_classes=10, seed=0)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    make = _network(name)
    classes = {} if num_classes is None else {"num_classes": num_classes}
    if seed is None:
        return make(in_channels=in_channels, **classes)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return make(in_channels=in_channels, **classes)


def example_shape(name: str, batch: int, image: int, *, in_channels: int = 3) -> tuple[int, ...]:
    """The shape of a batch of square images (cubes for a network of three dimensions) for this network.

    Raises:
        InputError: no such network, or it cannot take that side.

    >>> example_shape("unet3d", 2, 64)
    (2, 3, 64, 64, 64)
    """
    _network(name)
    spatial = (image,) * (3 if name == "unet3d" else 2)
    check_spatial(spatial, _LEVELS.get(name, 0))
    return (batch, in_channels, *spatial)


def _network(name: str) -> Callable[..., nn.Module]:
    if name in _NETWORKS:
        return _NETWORKS[name]
    close = difflib.get_close_matches(str(name).lower(), _NETWORKS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(f"unknown model {name!r}: {hint}known are {', '.join(_NETWORKS)}")
