"""Gradients, activations and weights as they are in real training: of a ResNet and a VGG on CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from bench.split_accuracy import Pace, train

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
