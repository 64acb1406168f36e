"""The step with any set of its storages encoded, with costs: traced twice at most, with nothing and with all encoded.

Every other set is put together from these two, which takes a hundredth of tracing it; see `capture.partly_encoded`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import Offer, encoded, offers
from shoal.capture.partly_encoded import PartlyEncoded
from shoal.core.lossy import LossyOptions
from shoal.core.step import StepGraph


class EncodedSteps:
    """The steps that encode some of what may be encoded.

    Args:
        captured: the step as it is.
        lossy: how to encode.
        timed: a captured step → its graph with seconds, workspaces, static memory and link.

    Attributes:
        captured, lossy: as given.
    """

    def __init__(self, captured: Captured, lossy: LossyOptions, timed: Callable[[Captured], StepGraph]) -> None:
        self.captured, self.lossy = captured, lossy
        self._timed = timed

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """What may be encoded."""
        return offers(self.captured, self.lossy)

    @cached_property
    def exact(self) -> StepGraph:
        """The step with nothing encoded."""
        return self._timed(self.captured)

    def traced(self, chosen: Collection[str]) -> Captured:
        """The step with these encoded, to be run.

        Raises:
            PlanError: one of them cannot be.
        """
        return encoded(self.captured, chosen, self.lossy) if chosen else self.captured

    def graph(self, chosen: Collection[str]) -> StepGraph:
        """The step with these encoded, with costs.

        Raises:
            PlanError: one of them cannot be.
        """
        if not chosen:
            return self.exact
        offered = {offer.storage for offer in self.offers}
        if offered == set(chosen):
            return self._everything
        parts = self._parts if offered.issuperset(chosen) else None
        return parts.step(chosen) if parts is not None else self._timed(self.traced(chosen))

    @cached_property
    def _everything(self) -> StepGraph:
        return self._timed(self.traced([offer.storage for offer in self.offers]))

    @cached_property
    def _parts(self) -> PartlyEncoded | None:
        return PartlyEncoded.of(self.exact, self._everything)
