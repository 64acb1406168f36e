"""Values of every kind that a caller or a file may give where something else is expected."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import torch

NUMBERS: tuple[Any, ...] = (0, -1, 2, 1.5, nan, inf, -inf, 1e300, 1e-300, 2**63, 2**64, 10**400, -(10**400), 10**5000)
OTHERS: tuple[Any, ...] = (
    True,
    None,
    "",
    "8",
    "a\nb",
    b"8",
    [],
    [8],
    [None],
    ["a"],
    [nan, 2.5],
    [10**5000],
    (2, 2),
    {},
    {"a": 1},
    object(),
    int,
    complex(1, 2),
    range(2),
    torch.tensor(8),
    torch.tensor([1.0, 2.0]),
    np.int64(8),
    np.float32(0.5),
    np.array([1, 2]),
)
WRONG = NUMBERS + OTHERS


def is_readable(error: Exception) -> bool:
    """Whether a person can read it."""
    text = str(error)
    return 0 < len(text.splitlines()[0]) <= 160 and len(text) <= 400
