"""The step with any set of its storages encoded, with costs: traced twice at most, with nothing and with all encoded.

Every other set is put together from these two, which takes a hundredth of tracing it; see `capture.partly_encoded`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import Offer, encoded, offers
from shoal.capture.partly_encoded import PartlyEncoded
from shoal.core.lossy import LossyOptions
from shoal.core.step import StepGraph


class EncodedSteps:
    """The steps that encode some of what may be encoded.

    Args:
        graphs: those of the step as it is, by what the names of their storages begin with in it: "" if it is one.
        lossy: how to encode.
        timed: such graphs → the step with seconds, workspaces, static memory and link.

    Attributes:
        graphs, lossy: as given.
    """

    def __init__(
        self, graphs: Mapping[str, Captured], lossy: LossyOptions, timed: Callable[[Mapping[str, Captured]], StepGraph]
    ) -> None:
        self.graphs, self.lossy = graphs, lossy
        self._timed = timed

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """What may be encoded."""
        found = ((label, offer) for label, graph in self.graphs.items() for offer in offers(graph, self.lossy))
        return tuple(replace(offer, storage=label + offer.storage) for label, offer in found)

    @cached_property
    def exact(self) -> StepGraph:
        """The step with nothing encoded."""
        return self._timed(self.graphs)

    def traced(self, chosen: Collection[str]) -> Mapping[str, Captured]:
        """The graphs with these encoded, to be run.

        Raises:
            PlanError: one of them cannot be.
        """

        def own(label: str) -> list[str]:
            return [storage.removeprefix(label) for storage in chosen if storage.startswith(label)]

        return {
            label: encoded(graph, own(label), self.lossy) if own(label) else graph
            for label, graph in self.graphs.items()
        }

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
