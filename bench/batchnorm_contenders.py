"""Who takes part in `bench.batchnorm`: data, and how each is made of the network.

`pool_first` puts the average pools of DenseNet's transitions before their 1x1 convolutions: the same function, fewer
FLOPs. A 1x1 convolution mixes the channels of a pixel and an average pool the pixels of a channel, each with
weights that do not depend on the other's position, so they commute, up to rounding. It saves FLOPs for whoever does it,
PyTorch included, so a benchmark gives it to every contender or to none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

import shoal
from bench.workload import Forward

EAGER, A_A, INDUCTOR, FUSED = "eager", "twin", "inductor", "fused"
COMPILED, COMPILED_FUSED = "compiled", "compiled_fused"
LEVELS = ("rcf", "mvf", "bnff", "icf")


@dataclass(frozen=True)
class Contender:
    """One way to train the network.

    Attributes:
        title: what tables call it.
        make: the network (which becomes the contender's own) → what is called.
        compiles: whether its first step compiles for seconds to minutes.
        arena: whether its steps run in an arena (`bench.cpu_arena`).
        fuses: whether only PyTorch's ops around fused kernels run: then it is held in float64 too.
    """

    title: str
    make: Callable[[nn.Module], Forward]
    compiles: bool = False
    arena: bool = False
    fuses: bool = False


def _fused(level: str | None) -> Contender:
    def make(model: nn.Module) -> Forward:
        # A level is shown whole; the default is what a user gets, small maps unfused.
        return shoal.fuse_batchnorm(model, cast(Any, level), when="pays" if level is None else "always")

    return Contender(f"fuse_batchnorm, {level or 'default'}", make, fuses=True)


CONTENDERS: Mapping[str, Contender] = {
    EAGER: Contender("eager", lambda model: model),
    A_A: Contender("eager, A/A", lambda model: model),
    INDUCTOR: Contender("Inductor", lambda model: torch.compile(model, dynamic=False), compiles=True),
    **{level: _fused(level) for level in LEVELS},
    FUSED: _fused(None),
    COMPILED: Contender("compile, arena", lambda model: shoal.compile(model), compiles=True, arena=True),
    COMPILED_FUSED: Contender(
        "fuse_batchnorm, compile, arena",
        lambda model: shoal.compile(shoal.fuse_batchnorm(model)),
        compiles=True,
        arena=True,
    ),
}
DEFAULT = (EAGER, INDUCTOR, *LEVELS, COMPILED, COMPILED_FUSED)
QUICK = (EAGER, *LEVELS)  # none that compiles
ZOO = (EAGER, A_A, FUSED)


@dataclass(frozen=True)
class Asked:
    """What one process measures.

    Attributes:
        network, batch, image: of `examples.networks`; images in the batch, pixels along each side.
        contenders: names of `CONTENDERS`; eager is the first.
        rounds: steps of each that count.
        threads: of OpenMP.
        pool_first: whether every contender has its average pools before its 1x1 convolutions.
        limit_side: of the largest matrices whose product is the machine's limit.
        seed: of weights, images and targets.
    """

    network: str
    batch: int
    image: int
    contenders: Sequence[str]
    rounds: int
    threads: int
    pool_first: bool = False
    limit_side: int = 3072
    seed: int = 0


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
