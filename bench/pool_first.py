"""DenseNet's transitions with their average pool before their 1x1 convolution: the same function, a quarter the FLOPs.

A 1x1 convolution mixes the channels of a pixel and an average pool the pixels of a channel, each with weights that do
not depend on the other's position, so they commute, up to rounding. It saves some of DenseNet-121's FLOPs for whoever
does it, PyTorch included, so a benchmark gives it to every contender or to none.
"""

from __future__ import annotations

from torch import nn


def pool_first(model: nn.Module) -> int:
    """Swap, in place, every 1x1 convolution and the average pool right after it in an `nn.Sequential`.

    Modules keep their names, so a state dict stays what it was. Only where the pool neither pads nor rounds up: then
    each of its windows is a true mean, and a bias passes through it unchanged.

    Returns:
        How many were swapped.

    >>> layers = nn.Sequential(nn.Conv2d(4, 2, 1), nn.AvgPool2d(2))
    >>> pool_first(layers), [type(layer).__name__ for layer in layers]
    (1, ['AvgPool2d', 'Conv2d'])
    """
    swapped = 0
    for module in model.modules():
        if not isinstance(module, nn.Sequential):
            continue
        layers = list(module._modules.items())
        for i in range(len(layers) - 1):
            if _mixes_channels(layers[i][1]) and _averages(layers[i + 1][1]):
                layers[i], layers[i + 1] = layers[i + 1], layers[i]
                swapped += 1
        module._modules = dict(layers)
    return swapped


def _mixes_channels(layer: nn.Module | None) -> bool:
    return (
        type(layer) is nn.Conv2d
        and layer.kernel_size == (1, 1)
        and layer.stride == (1, 1)
        and layer.padding in ((0, 0), "valid", "same")
    )


def _averages(layer: nn.Module | None) -> bool:
    return (
        type(layer) is nn.AvgPool2d
        and layer.padding in (0, (0, 0))
        and not layer.ceil_mode
        and layer.divisor_override is None
    )
