"""Networks by name: ResNets, those of torchvision and timm where they are installed, and the user's own functions.

ResNet: He, Zhang, Ren and Sun, "Deep residual learning for image recognition" (2016). The bottleneck block strides in
its 3x3 convolution, not in its first 1x1 ("ResNet v1.5"), as torchvision's does. Parameters and buffers carry
torchvision's names, shapes and initial values, so its checkpoints load with `load_state_dict(..., strict=True)`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from shoal.core.named import described, function_named
from shoal.errors import InputError, brief

_ADDRESSABLE_BYTES = 2**47  # what x86-64 and AArch64 leave a process with pages of four levels


def build(name: str, *, num_classes: int | None = None, seed: int | None = None) -> nn.Module:
    """A freshly initialised network in training mode.

    Args:
        name: resnet18, resnet34, resnet50, resnet18_cifar; a name of torchvision or timm, where it is installed; or
            FILE.py:FUNCTION or MODULE:FUNCTION, which returns a module, or a pair of one and an input.
        num_classes: passed to a function that takes it; None for the network's own.
        seed: draws the weights from a generator of their own, so they depend on nothing else and PyTorch's CPU
            generator stays where it was; None draws from that generator. Not for weights made on another device
            (under `with torch.device("cuda"):`).

    Raises:
        InputError: there is no such network, its function raised, or it returned no module.

    >>> model = build("resnet18", num_classes=10, seed=0)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    make = find(name)
    parameters = inspect.signature(make).parameters.values()
    takes = any(each.name == "num_classes" or each.kind is each.VAR_KEYWORD for each in parameters)
    arguments = {} if num_classes is None or not takes else {"num_classes": num_classes}
    if seed is None:
        return made_by(name, make, **arguments)[0]
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return made_by(name, make, **arguments)[0]


def find(name: str) -> Callable[..., Any]:
    """The function that makes the network of that name; see `build`.

    Raises:
        InputError: there is none.
    """
    if name in RESNETS:
        return RESNETS[name]
    if ":" in name:
        return function_named(name)
    for library, making in (("torchvision.models", "get_model"), ("timm", "create_model")):
        try:
            zoo = importlib.import_module(library)
        except (ImportError, RuntimeError):  # a build of torchvision for another torch raises either
            continue
        if name in zoo.list_models():
            return partial(getattr(zoo, making), name)
    close = difflib.get_close_matches(str(name).lower(), RESNETS, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError(
        f"unknown model {brief(name)}: {hint}type a name below, or a function of yours, such as train.py:make_model",
        details={"names": ", ".join(RESNETS), "if installed": "the names of torchvision.models and timm"},
    )


def made_by(where: str, make: Callable[..., Any], **arguments: Any) -> tuple[nn.Module, Any]:
    """The module that a function returns, and the input that it returns with it, None without one.

    Raises:
        InputError: it raised, or returned something else.
    """
    try:
        made = make(**arguments)
    except Exception as error:  # whatever a user's code raises
        raise InputError(f"{where}() raised {described(error)}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        kind = "None" if model is None else f"{type(model).__name__} ({brief(model)})"
        raise InputError(f"{where}() returned {kind}; expected a torch.nn.Module, or a pair of one and its input")
    return model, example


def example_shape(model: nn.Module, batch: int, image: int) -> tuple[int, ...]:
    """The shape of a batch of square images, or cubes, with the channels and the dimensions of the first convolution.

    A network without one gets images of three channels.

    Raises:
        InputError: a number is not positive, or the batch is larger than memory can ever be.

    >>> example_shape(nn.Conv3d(1, 8, 3), 2, 64)
    (2, 1, 64, 64, 64)
    """
    for what, number in (("batch", batch), ("image", image)):
        if number < 1:
            raise InputError(f"{what}={number!r}: expected a positive int")
    first = next((each for each in model.modules() if isinstance(each, _ConvNd)), None)
    channels, dims = (3, 2) if first is None else (first.in_channels, len(first.kernel_size))
    shape = (batch, channels, *(image,) * dims)
    if 4 * math.prod(shape) > _ADDRESSABLE_BYTES:
        raise InputError(f"batch={brief(batch)}, image={brief(image)}: no process can address so many bytes; give less")
    return shape


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


RESNETS = {
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet18_cifar": partial(ResNet, BasicBlock, (2, 2, 2, 2), num_classes=10, cifar=True),
}
