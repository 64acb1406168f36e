"""Where a forward storage waits between its producer and its last reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Keep:
    """It stays on the device from its first computation to its last reader."""


@dataclass(frozen=True)
class Recompute:
    """It is freed after its last reader of the forward pass and computed again just before backward ops.

    Attributes:
        before: names of the backward ops right before which it is computed again, in the order they run: the first
            that needs it, or an earlier one. Between two of them it is freed after its last reader, so naming an op
            more than the first trades time for memory. Empty: no one needs it again.
    """

    before: tuple[str, ...] = ()


Residence = Keep | Recompute


def residence_to_json(residence: Residence) -> dict[str, Any]:
    """A tagged dict."""
    if isinstance(residence, Recompute):
        return {"residence": "recompute", "before": list(residence.before)}
    return {"residence": "keep"}


def residence_from_json(value: dict[str, Any]) -> Residence:
    """The inverse of `residence_to_json`; KeyError or ValueError on anything else."""
    match value["residence"]:
        case "recompute":
            return Recompute(tuple(value["before"]))
        case "keep":
            return Keep()
        case other:
            raise ValueError(f"no residence is called {other!r}")
