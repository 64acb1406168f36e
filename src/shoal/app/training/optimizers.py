"""The optimizers a run may use, and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from shoal.errors import InputError

NAMES = ("sgd", "adamw")


def optimizer_of(
    name: str,
    model: nn.Module,
    *,
    lr: float = 0.02,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    groups: list[dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer called `name` over `model`'s parameters, or over `groups` of them; `momentum` is SGD's.

    Raises:
        InputError: there is none of that name.
    """
    parameters = model.parameters() if groups is None else groups
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    raise InputError(f"unknown optimizer {name!r}: give one of {', '.join(NAMES)}")


def state_names(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the optimizer keeps for a parameter after a step: tensors of the parameter's shape, and single numbers.

    >>> state_names(optimizer_of("adamw", nn.Linear(2, 2)))
    (('exp_avg', 'exp_avg_sq'), ('step',))
    """
    if isinstance(optimizer, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq"), ("step",)
    return ("momentum_buffer",) if optimizer.defaults["momentum"] else (), ()


def learning_rate(highest: float, step: int, steps: int) -> float:
    """A linear warm-up over the first tenth of all steps, then a cosine to zero. `step` counts from 0.

    `torch.optim.lr_scheduler.SequentialLR` computes each rate from the one before and differs in the last bit in most
    steps; of this form a resumed run needs no state.

    >>> [round(learning_rate(1.0, step, 20), 2) for step in (0, 1, 10, 19)]
    [0.5, 1.0, 0.54, 0.01]
    """
    rising = max(1, steps // 10)
    if step < rising:
        return highest * (step + 1) / rising
    return highest * (1 + math.cos(math.pi * (step - rising + 1) / (steps - rising + 1))) / 2
