"""The training step of a network that segments volumes: deep supervision, autocast, and checkpointing by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.volumes_catalogue import CLASSES, Entry, Size, build
from bench.workload import Forward, Workload

FLOAT32, BFLOAT16 = "float32", "bfloat16"
PRECISIONS = (FLOAT32, BFLOAT16)


def autocasting(precision: str) -> torch.autocast:
    """Around the network's call, as a training loop has it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == BFLOAT16)


def scales(outputs: Any) -> list[torch.Tensor]:
    """The outputs of deep supervision, the whole patch first: MONAI stacks them, nnU-Net lists them.

    >>> [tuple(one.shape) for one in scales(torch.zeros(1, 3, 2, 8, 8, 8))]
    [(1, 2, 8, 8, 8), (1, 2, 8, 8, 8), (1, 2, 8, 8, 8)]
    """
    if isinstance(outputs, torch.Tensor):
        return list(outputs.unbind(1)) if outputs.dim() == 6 else [outputs]
    return list(outputs)


@dataclass
class VolumeStep(Workload):
    """A step on volumes: cross entropy at each scale, half as much at each lower one, as in nnU-Net.

    The target, eight bytes a voxel, is the caller's: no contender's peak counts it.

    Attributes:
        precision: of the network's call; the loss is in float32.
    """

    precision: str = FLOAT32

    @property
    def resident_bytes(self) -> int:
        return super().resident_bytes - self.target.nbytes

    def outputs(self, forward: Forward) -> list[torch.Tensor]:
        """Of a forward pass, in float32."""
        with autocasting(self.precision):
            found = forward(self.images)
        return [one.to(self.images.dtype) for one in scales(found)]

    def step(self, forward: Forward) -> torch.Tensor:
        loss = self.loss(self.outputs(forward))
        loss.backward()
        return loss.detach()

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
    draw = torch.Generator().manual_seed(seed)
    sides = (size.side,) * 3
    volumes = torch.randn(size.batch, 1, *sides, generator=draw)
    target = torch.randint(CLASSES, (size.batch, *sides), generator=draw)
    return VolumeStep(name, build(size, seed), volumes, target, seed, precision)


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
