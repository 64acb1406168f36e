"""The training step of a network that segments volumes: deep supervision, autocast, and checkpointing by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from bench.volumes_catalogue import CLASSES, Entry, Size, build
from bench.workload import Forward, Workload

FLOAT32, BFLOAT16 = "float32", "bfloat16"
PRECISIONS = (FLOAT32, BFLOAT16)


class Autocast(nn.Module):
    """A network under bfloat16 autocast, whose outputs leave in the precision of its input.

    Args:
        device_type: of the tensors that it is called with.
    """

    def __init__(self, network: nn.Module, device_type: str = "cpu") -> None:
        super().__init__()
        self.network = network
        self._device_type = device_type

    def forward(self, volumes: torch.Tensor) -> Any:
        with torch.autocast(self._device_type, torch.bfloat16):
            outputs = self.network(volumes)
        return tree_map(lambda one: one.to(volumes.dtype), outputs)


def scales(outputs: Any) -> list[torch.Tensor]:
    """The outputs of deep supervision, the whole patch first: MONAI stacks them, nnU-Net lists them.

    >>> [tuple(one.shape) for one in scales(torch.zeros(1, 3, 2, 8, 8, 8))]
    [(1, 2, 8, 8, 8), (1, 2, 8, 8, 8), (1, 2, 8, 8, 8)]
    """
    if isinstance(outputs, torch.Tensor):
        return list(outputs.unbind(1)) if outputs.dim() == 6 else [outputs]
    return list(outputs)


class VolumeStep(Workload):
    """A step on volumes: cross entropy at each scale, half as much at each lower one, as in nnU-Net.

    The target, eight bytes a voxel, is the caller's: no contender's peak counts it.
    """

    @property
    def resident_bytes(self) -> int:
        return super().resident_bytes - self.target.nbytes

    def loss(self, outputs: Any) -> torch.Tensor:
        found = scales(outputs)
        weights = [2.0**-place for place in range(len(found))]
        total = torch.zeros(())
        for weight, one in zip(weights, found, strict=True):
            steps = [large // small for large, small in zip(self.target.shape[1:], one.shape[2:], strict=True)]
            target = self.target[:, :: steps[0], :: steps[1], :: steps[2]]
            total = total + weight / sum(weights) * F.cross_entropy(one, target)
        return total


def example(size: Size) -> torch.Tensor:
    """A batch without values."""
    return torch.empty(size.batch, 1, *(size.side,) * size.dims)


def make_step(name: str, size: Size, precision: str, seed: int) -> VolumeStep:
    """The step of a network of the catalogue on random volumes.

    Raises:
        Unavailable: its library does not import.
    """
    network = in_precision(build(size, seed), precision)
    draw = torch.Generator().manual_seed(seed)
    sides = (size.side,) * 3
    volumes = torch.randn(size.batch, 1, *sides, generator=draw)
    target = torch.randint(CLASSES, (size.batch, *sides), generator=draw)
    return VolumeStep(name, network, volumes, target, seed)


def in_precision(network: nn.Module, precision: str) -> nn.Module:
    """The network, or the network under autocast."""
    return Autocast(network) if precision == BFLOAT16 else network


def checkpointed(entry: Entry, step: VolumeStep) -> Iterator[tuple[str, Forward]]:
    """The network with each of its blocks checkpointed, or with the first half of them: the encoder's large ones."""
    n_blocks = len(_outermost(step.model, entry.blocks))
    for setting, count in (("every block", n_blocks), ("the first half of the blocks", n_blocks // 2)):
        model = step.shared_copy()
        for block in _outermost(model, entry.blocks)[:count]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield setting, model


def _outermost(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in model.children():
        found += [child] if type(child).__name__ in names else _outermost(child, names)
    return found
