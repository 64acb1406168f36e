"""Whether the plan of a step may encode storages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncodeNothing:
    """The plan keeps exact values only."""


@dataclass(frozen=True)
class EncodeIfFaster:
    """The plan is the fastest of all, exact or not."""


IF_FASTER = EncodeIfFaster()


@dataclass(frozen=True)
class EncodeBelow:
    """A plan is known, and one that encodes is looked for that takes less.

    Attributes:
        seconds: what the step takes that is known.
    """

    seconds: float


Encoding = EncodeNothing | EncodeIfFaster | EncodeBelow


class NotFaster(Exception):
    """No plan with encoded storages is faster than the one that is known."""
