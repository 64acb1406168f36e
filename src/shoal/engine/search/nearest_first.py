"""Where no variant of a step fits by its bound: the order in which they are planned after all, or only for the least.

A search for the least takes as long as a plan, an estimate of it far less. So every variant, exact and with all encoded
that may be, is estimated by one plan that recomputes on demand, and those that come near the lowest by more of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic

from shoal.core.step import StepGraph
from shoal.core.variant import Variant
from shoal.engine.search.priced import Made, Priced
from shoal.engine.search.variants import Graph
from shoal.planners.estimates import about_least_bytes, quick_least
from shoal.planners.infeasible import fewest_bytes


@dataclass(frozen=True)
class PricedVariant(Generic[Graph, Made]):
    """A variant of the step that was captured and priced."""

    variant: Variant
    graph: Graph
    priced: Priced[Made]


@dataclass(frozen=True)
class Way(Generic[Graph, Made]):
    """A variant that does not fit by its bound, exact or encoded.

    Attributes:
        candidate: which.
        encoded: whether storages may be encoded.
        step: as it is then: with all encoded that may be.
        expected_bytes: what it is expected to need at least; where nothing can fit, about what it needs.
        found_bytes: the peak of a plan that was found in a moment.
    """

    candidate: PricedVariant[Graph, Made]
    encoded: bool
    step: StepGraph
    expected_bytes: int = 0
    found_bytes: int = 0


def nearest_first(ways: Iterable[Way[Graph, Made]], budget_bytes: int) -> list[Way[Graph, Made]]:
    """The ways with what they need filled in: what is expected to fit, the fastest first, then what needs least.

    Args:
        ways: all that there are.
        budget_bytes: most bytes in use at any position.
    """
    steps = [(about_least_bytes(way.step), way) for way in ways]
    enough_bytes = min((about_bytes for about_bytes, _ in steps), default=0)
    found = []
    for about_bytes, way in sorted(steps, key=lambda one: one[0]):
        expected_bytes = found_bytes = about_bytes
        if fewest_bytes(way.step) <= budget_bytes:
            least = quick_least(way.step, max(budget_bytes, enough_bytes))
            expected_bytes, found_bytes = least.expected_bytes, least.found_bytes
            enough_bytes = min(enough_bytes, found_bytes)
        found.append(replace(way, expected_bytes=expected_bytes, found_bytes=found_bytes))

    def place(way: Way[Graph, Made]) -> tuple[bool, float, bool]:
        may_fit = way.expected_bytes <= budget_bytes
        return not may_fit, way.step.plain_seconds if may_fit else way.expected_bytes, not way.encoded

    return sorted(found, key=place)
