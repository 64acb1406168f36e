"""How far decoded values are from what was encoded: on the distributions of table 1 of the paper, and for any tensors.

Dettmers, "8-bit approximations for parallelism in deep learning" (ICLR'16), section 3.4: 25 million numbers each; the
exponent offset of the mantissa and the static tree is 10, and 100 for N(0, 10²); the others take the largest magnitude.
`recorded` takes gradients, activations and weights of a network that trains on CIFAR-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from bench.split_accuracy import Pace, train

SAMPLES = 25_000_000
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Errors:
    """Means over all values; relative ones over those that are not zero."""

    elems: int
    absolute: float
    relative_percent: float
    bias_percent: float  # mean of (decoded - x) / x
    root_mean_square_percent: float  # of the root mean square of x


@dataclass(frozen=True)
class Distribution:
    """What is drawn.

    Attributes:
        name: in the paper.
        draw: so many numbers.
        offset: the exponent offset, a power of ten, of mantissa and static tree.
        least_absolute: the least mean absolute error of any 256 values. For N(0, s²) the limit for many values (Gersho
            1979): with density f, (∫ sqrt f)² / (4 · 256).
    """

    name: str
    draw: Callable[[int, torch.Generator], torch.Tensor]
    offset: int
    least_absolute: float


def normal(name: str, deviation: float, offset: int) -> Distribution:
    least = math.sqrt(8 * math.pi) * deviation / (4 * 256)
    return Distribution(name, lambda count, draw: torch.randn(count, generator=draw) * deviation, offset, least)


DISTRIBUTIONS = (
    Distribution("U(0,1)", lambda count, draw: torch.rand(count, generator=draw), 1, 1 / (4 * 256)),
    normal("N(0,1)", 1.0, 1),
    normal("N(0,10²)", 10.0, 2),
    normal("N(0,0.2²)", 0.2, 1),
)
_TYPES = ("dynamic_tree", "linear", "mantissa", "static_tree")
# Mean absolute error, mean relative error in percent, of each of `_TYPES`.
_PAPER = {
    "U(0,1)": ((0.00004, 1.39), (0.0024, 2.16), (0.0017, 7.22), (0.0007, 4.82)),
    "N(0,1)": ((0.0005, 2.46), (0.0004, 6.47), (0.0104, 6.89), (0.0093, 6.3)),
    "N(0,10²)": ((0.049, 2.49), (0.041, 6.44), (1.066, 7.19), (0.926, 6.28)),
    "N(0,0.2²)": ((0.000018, 2.45), (0.000015, 6.15), (0.00055, 8.26), (0.00022, 6.58)),
}
PAPER = {(name, kind): two for name, row in _PAPER.items() for kind, two in zip(_TYPES, row, strict=True)}


def errors_of(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Errors:
    """The errors over all values of some tensors, each beside what it was decoded to; in float64.

    >>> x = torch.tensor([0.0, 1.0, -2.0])
    >>> found = errors_of([(x, torch.tensor([0.0, 1.1, -1.9]))])
    >>> round(found.absolute, 4), round(found.relative_percent, 3), round(found.bias_percent, 3)
    (0.0667, 7.5, 2.5)
    """
    elems = nonzero = 0
    absolute = relative = bias = square = of_x = 0.0
    for x, decoded in pairs:
        for values, theirs in zip(x.reshape(-1).split(_CHUNK), decoded.reshape(-1).split(_CHUNK), strict=True):
            values = values.double()
            off = theirs.double() - values
            elems += values.numel()
            absolute += float(off.abs().sum())
            square += float(off.square().sum())
            of_x += float(values.square().sum())
            there = values != 0
            share = off[there] / values[there]
            nonzero += share.numel()
            relative += float(share.abs().sum())
            bias += float(share.sum())
    return Errors(
        elems=elems,
        absolute=absolute / max(elems, 1),
        relative_percent=100 * relative / max(nonzero, 1),
        bias_percent=100 * bias / max(nonzero, 1),
        root_mean_square_percent=100 * math.sqrt(square / of_x) if of_x else 0.0,
    )


Split = tuple[torch.Tensor, torch.Tensor]
KINDS = ("gradients", "activations", "weights")


def recorded(build: Callable[[], nn.Module], pace: Pace, data: Split, seed: int) -> dict[str, list[torch.Tensor]]:
    """Train a network and record one more step.

    Args:
        build: makes the network.
        pace: how long it is trained before.
        data: images (N, 3, 32, 32) and labels (N,).
        seed: of its start and of the order of the images.

    Returns:
        By kind, one tensor for each convolution and linear layer: the gradient of its weight; what it reads, which is
        what a saved activation is; its weight. Images are left out: the first layer reads those.
    """
    torch.manual_seed(seed)
    model = build().to(data[0].device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(model, pace, data, seed)
    model.train()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    model.zero_grad()
    images, labels = (tensor[: pace.batch] for tensor in data)
    with _inputs_of(layers) as inputs:
        F.cross_entropy(model(images), labels).backward()
    inputs.pop(next(iter(inputs)))
    return {
        "gradients": [layer.weight.grad.clone() for layer in layers.values() if layer.weight.grad is not None],
        "activations": list(inputs.values()),
        "weights": [layer.weight.detach().clone() for layer in layers.values()],
    }


@contextmanager
def _inputs_of(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """What each layer reads while this is open, in the order of the calls."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda module, given: found.__setitem__(name, given[0].detach().clone())

    hooks = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
