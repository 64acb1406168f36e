"""One rank's part of a network's dense layers: its share of every layer's output features, for one sub-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from examples.parallel.activation_exchange import ActivationExchange
from examples.parallel.activation_functions import gathered
from examples.parallel.dense_border import Border, Dense, Drop, Flatten, Pointwise
from examples.parallel.shares import Share, shares
from shoal.errors import InputError

_GOLDEN = 0x9E3779B97F4A7C15


class DenseLayers:
    """The dense steps of a `Border`, on features shared out over the ranks.

    Args:
        model: whose layers are already column-parallel.
        border: its parts.
        activations: gathers a layer's output for the next.
    """

    def __init__(self, model: nn.Module, border: Border, activations: ActivationExchange) -> None:
        self.activations = activations
        self._steps = border.dense
        self._modules: dict[str, Any] = {name: model.get_submodule(name) for name in border.layers}
        self._last = border.layers[-1]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the layers, in their order."""
        return [parameter for module in self._modules.values() for parameter in module.parameters(recurse=False)]

    @property
    def out_shares(self) -> tuple[Share, ...]:
        """Each rank's share of the last layer's features."""
        return shares(_features(self._modules[self._last]), self.activations.ranks)

    def drawn(self, device: torch.device) -> torch.Generator | None:
        """What dropout draws from in one forward pass: a stream of its own on each rank, which has features of its own.

        It follows from PyTorch's generator and the rank, so that a restored generator brings the same masks back.
        """
        if not any(isinstance(step, Drop) and step.module.training for step in self._steps):
            return None
        base = int(torch.randint(2**63 - 1, ()))
        return torch.Generator(device).manual_seed((base + _GOLDEN * (self.activations.rank + 1)) % 2**63)

    def __call__(
        self, x: torch.Tensor, parameters: Sequence[torch.Tensor], drawn: torch.Generator | None
    ) -> torch.Tensor:
        """This rank's share of the last layer's output.

        Args:
            x: (rows, ...) all input features of the first layer, the same on all ranks.
            parameters: this rank's parts, in the order of `parameters`.
            drawn: from `drawn()`.
        """
        left = list(parameters)
        have: tuple[Share, ...] | None = None
        for step in self._steps:
            if isinstance(step, Dense):
                module = self._modules[step.name]
                _check(module, x, step.name)
                if have is not None:
                    x = gathered(x, self.activations, 1, have, what=f"input of {step.name}")
                mine = [left.pop(0) for _ in module.parameters(recurse=False)]
                x = module.on_share(x, *mine)
                have = shares(_features(module), self.activations.ranks)
            elif isinstance(step, Flatten):
                places = x.shape[2:].numel()
                x = x.flatten(1)
                assert have is not None
                have = tuple((start * places, stop * places) for start, stop in have)
            elif isinstance(step, Drop):
                x = _dropped(x, step.module, drawn)
            elif isinstance(step, Pointwise):
                x = step.apply(x)
        return x


def _features(module: Any) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels


def _check(module: nn.Module, x: torch.Tensor, name: str) -> None:
    if isinstance(module, nn.Linear) and x.dim() != 2:
        raise InputError(
            f"got an input of {x.dim()} dimensions for {name}, expected (rows, features); flatten it before"
        )


def _dropped(x: torch.Tensor, module: Any, drawn: torch.Generator | None) -> torch.Tensor:
    if not module.training or module.p == 0:
        return x
    shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if isinstance(module, nn.Dropout2d) else x.shape
    kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - module.p, generator=drawn)
    return x * kept if module.p == 1 else x * kept.div_(1 - module.p)
