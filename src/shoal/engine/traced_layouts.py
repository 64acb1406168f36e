"""Ops whose results were not laid out as traced: which ones are known, and planned with a copy after them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shoal.capture.captured import Captured
from shoal.capture.traced_strides import Departure, with_copies
from shoal.core.sizes import format_bytes
from shoal.errors import CaptureError, PlanError

log = logging.getLogger("shoal")


class TracedLayouts:
    """The departures that were seen of each step, by its fingerprint as captured."""

    def __init__(self) -> None:
        self._departures: dict[str, dict[str, Departure]] = {}

    def restored(self, captured: Captured) -> Captured:
        """The step with copies after the ops whose results were not laid out as traced."""
        return with_copies(captured, self._departures.get(captured.graph.fingerprint, {}))

    def learn(
        self,
        name: str,
        fingerprint: str,
        departures: Mapping[str, Departure],
        *,
        plan_is_given: bool,
        can_plan_again: bool,
    ) -> None:
        """Have the copies counted, from the next plan on, that put tensors into their traced layout, and say so.

        Args:
            name: the model's.
            fingerprint: of the step as captured.
            departures: by the name of the node.
            plan_is_given: whether a plan was given, which is run as it is.
            can_plan_again: whether the next step can be planned with the copies.

        Raises:
            PlanError: the plan was given.
            CaptureError: the copies cannot be counted: planning again would not change the next step, or did not.
        """
        first = next(iter(departures.values()))
        others = f" (and {len(departures) - 1} others)" if len(departures) > 1 else ""
        if plan_is_given:
            raise PlanError(
                f"{first}{others}: the plan does not count the copy that puts it right; give budget= instead of plan=, "
                "or correct the fake kernel"
            )
        known = self._departures.setdefault(fingerprint, {})
        if departures.keys() <= known.keys() or not can_plan_again:
            raise CaptureError(
                f"{first}{others}; use shoal.compile(model, budget=...), which plans a copy, or correct the fake "
                "kernel (torch.library.register_fake)"
            )
        known.update(departures)
        log.warning(
            "%s: %s%s; copies of %s put that right and are planned from the next step on; later kernels may round "
            "otherwise than in eager PyTorch",
            name,
            first,
            others,
            format_bytes(sum(departure.nbytes for departure in departures.values())),
        )
