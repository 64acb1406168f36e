"""The 128 magnitudes that the seven bits beside the sign stand for, and where one gives way to the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import torch

MAGNITUDES = 128
SIGN = 0x80


@dataclass(frozen=True, eq=False)
class Table:
    """The values of an 8-bit type, on a scale where the largest is at most 1; code = sign bit | index.

    Attributes:
        name: of the data type.
        magnitudes: (128,) float32 on the CPU, strictly ascending from 0.
        thresholds: (127,) float32 on the CPU: `thresholds[i]` is the float32 nearest to the middle of magnitudes i and
            i + 1. A value on a threshold belongs to the magnitude above.
    """

    name: str
    magnitudes: torch.Tensor = field(repr=False)
    thresholds: torch.Tensor = field(repr=False)

    def values(self) -> torch.Tensor:
        """What each code stands for on a scale of 1, (256,) float32; code 128 is -0.0."""
        return torch.cat([self.magnitudes, -self.magnitudes])


def table_of(name: str, magnitudes: Iterable[Fraction]) -> Table:
    """The table of these exact values in any order, each rounded once to float32.

    >>> table_of("linear", (Fraction(i, 127) for i in range(128))).thresholds[:2].tolist()
    [0.003937007859349251, 0.011811023578047752]
    """
    exact = sorted(magnitudes)
    rounded = torch.tensor([float(value) for value in exact], dtype=torch.float64).float()
    if len(rounded) != MAGNITUDES or rounded[0] != 0 or rounded[-1] > 1 or not bool((rounded.diff() > 0).all()):
        raise ValueError(f"{name}: a table has {MAGNITUDES} magnitudes that ascend from 0 to at most 1")
    # The sum of two neighbours is exact in float64, so each threshold is rounded once.
    middles = (rounded[1:].double() + rounded[:-1].double()) / 2
    return Table(name, rounded, middles.float())
