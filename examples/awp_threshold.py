"""A threshold for `AdaptivePrecision` from the norms of a while of training (A2DTWP, section V-A)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from shoal.distributed import AdaptivePrecision
from shoal.distributed.weights.precision import relative_change
from shoal.errors import InputError


class NormMonitor:
    """Watches norms for a short while of training and derives the threshold T from them (section V-A).

    Args:
        model_or_groups, by: as of `AdaptivePrecision`.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> monitor = NormMonitor(model)
    >>> for _ in range(3):
    ...     monitor.update()
    ...     _ = model.weight.data.mul_(0.5)
    >>> monitor.threshold()
    -0.5
    """

    def __init__(self, model_or_groups: nn.Module | Mapping[str, Sequence[torch.Tensor]], by: str = "layer") -> None:
        self._watched = AdaptivePrecision(model_or_groups, threshold=0.0, interval=1, by=by)
        self.history: list[list[float]] = []

    def update(self) -> None:
        """Call it once a batch, after the optimizer's step."""
        self.history.append(self._watched.norms())

    def threshold(self) -> float:
        """The mean relative change of the norms since it began, with its sign.

        Raises:
            InputError: fewer than two batches were watched.
        """
        return threshold_from(self.history)


def threshold_from(history: Sequence[Sequence[float]]) -> float:
    """T as the paper finds it: the mean relative change of the norms, over all layers and batches of a short while.

    Section V-A: watch a few epochs until the validation error drops, then take the average change in that while.

    Args:
        history: the norms of all layers after each batch.

    Returns:
        The mean with its sign. At or above 0 the norms grew, and "falls faster than that" means little: watch a
        later while, or a run with weight decay.

    Raises:
        InputError: fewer than two batches, or no layer.

    >>> threshold_from([[10.0, 100.0], [9.9, 99.0], [9.801, 98.01]])
    -0.01
    """
    if len(history) < 2 or not history[0]:
        raise InputError(f"got norms of {len(history)} batches, expected 2 or more of at least one layer")
    changes = [
        relative_change(before, now)
        for norms, later in pairwise(history)
        for before, now in zip(norms, later, strict=True)
    ]
    return round(math.fsum(changes) / len(changes), 12)
