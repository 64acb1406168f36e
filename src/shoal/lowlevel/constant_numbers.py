"""Numbers of a graph that PyTorch takes as constants only, such as an epsilon: known to Dynamo by their names.

A float that changes from one call to the next becomes an input of Dynamo's graph. Where an op takes it as a constant,
AOTAutograd finds out, notes its name and lets Dynamo start over; Dynamo forgets the names with its next capture. A
graph that is compiled again after that would start a capture over that is long done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.symbolic_convert import TensorifyState


def constant_numbers() -> frozenset[str]:
    """The symbols' names of those in the capture under way."""
    return frozenset(TensorifyState.force_specializations)


@contextmanager
def as_constants(names: Collection[str]) -> Iterator[None]:
    """Within it numbers with these names are constants, also where the capture that found them is done.

    >>> with as_constants({"zf1"}):
    ...     constant_numbers() >= {"zf1"}
    True
    >>> "zf1" in constant_numbers()
    False
    """
    added = set(names) - TensorifyState.force_specializations
    TensorifyState.force_specializations.update(added)
    try:
        yield
    finally:
        TensorifyState.force_specializations.difference_update(added)


def is_number(given: Any) -> bool:
    """Whether an input of Dynamo's graph is a float, which comes as a tensor whose value AOTAutograd reads.

    >>> is_number(torch.tensor(0.5, dtype=torch.float64)), is_number(torch.tensor(0.5))
    (True, False)
    """
    return (
        isinstance(given, torch.Tensor)
        and given.dtype == torch.float64
        and given.dim() == 0
        and given.device.type == "cpu"
        and not given.requires_grad
    )
