"""How far a normalised input that the inverted form makes again is from what it was, by slope, scale and shift.

It is read off the backward pass itself. A column of inputs stands in as many channels as it has rows; a gradient that
is 1 at one row of each channel and 0 elsewhere makes that channel's gradient of the scale the normalised input at this
row, times the slope where it is below zero. Held against the same column normalised in float64. Normalised inputs have
variance 1, so errors are in standard deviations.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from bench.frame import WrongResult
from bench.tables import new_table
from shoal.kernels.invertible_norm.inverted_batch_norm import (
    inverted_batch_norm,
    inverted_batch_norm_backward,
    reconstruction_error,
)

SLOPES = (0.001, 0.01, 0.1, 0.5, 1.0)
SCALES = (1e-3, 1e-2, 1e-1, 1.0, 1e1)
SHIFTS = (0.0, 1.0)
_EPS = 1e-5
_SPREAD = 4.0  # standard deviations that no input is further from the mean


@dataclass(frozen=True)
class Cell:
    """Errors of one slope, scale and shift, in standard deviations.

    Attributes:
        largest, median: over the inputs.
        predicted: `shoal.kernels.invertible_norm.inverted_batch_norm.reconstruction_error`, an upper bound.
    """

    slope: float
    scale: float
    shift: float
    largest: float
    median: float
    predicted: float


def measure(slope: float, scale: float, shift: float, rows: int = 512) -> Cell:
    """One cell, over `rows` inputs.

    Raises:
        WrongResult: the largest error is more than what is predicted.
    """
    column = torch.randn(rows, generator=torch.Generator().manual_seed(0)).clamp(-_SPREAD + 1, _SPREAD - 1)
    x = column[:, None].expand(rows, rows).contiguous()
    weight, bias = torch.full((rows,), scale - _EPS), torch.full((rows,), shift)
    options = (_EPS, "leaky_relu", slope)
    y, _, variance = inverted_batch_norm(x, weight, bias, None, None, *options)
    deviation = torch.rsqrt(variance + _EPS)
    _, of_weight, _ = inverted_batch_norm_backward(torch.eye(rows), y, weight, bias, deviation, False, *options)
    again = of_weight.double() / torch.where(y.diagonal() > 0, 1.0, slope).double()
    exact = column.double()
    exact = (exact - exact.mean()) * torch.rsqrt(exact.var(correction=0) + _EPS)
    errors = (again - exact).abs()
    predicted = float(reconstruction_error(weight[:1], bias[:1], *options, torch.float32, _SPREAD))
    found = Cell(slope, scale, shift, float(errors.max()), statistics.median(errors.tolist()), predicted)
    if not found.largest <= predicted:
        raise WrongResult(f"an input came back {found.largest:.1e} off, predicted {predicted:.1e}: {found}")
    return found


def measure_all(rows: int = 512) -> list[dict[str, Any]]:
    """Every slope, scale and shift."""
    return [asdict(measure(slope, scale, shift, rows)) for shift in SHIFTS for slope in SLOPES for scale in SCALES]


def table(cells: Sequence[dict[str, Any]]) -> Table:
    """Largest and median error for each slope and scale, and what is predicted, which does not depend on the slope."""
    shown = new_table(
        "What the inverted form makes again in float32: largest / median error, in standard deviations",
        f"shift | slope | {' | '.join(f'scale {scale:g}' for scale in SCALES)}",
    )
    for shift in SHIFTS:
        rows = {slope: [c for c in cells if (c["shift"], c["slope"]) == (shift, slope)] for slope in SLOPES}
        for slope, row in rows.items():
            shown.add_row(f"{shift:g}", f"{slope:g}", *(f"{c['largest']:.1e} / {c['median']:.1e}" for c in row))
        bound = [f"≤ {c['predicted']:.1e}" for c in rows[SLOPES[0]]]
        shown.add_row(f"{shift:g}", "predicted", *bound, end_section=True)
    return shown
