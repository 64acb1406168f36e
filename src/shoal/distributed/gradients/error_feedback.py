"""Error feedback: the error of encoding a gradient is added to the next one, by parameter (Seide et al. 2014).

Residuals are kept under the parameters' names, not by bucket: DDP rebuilds its buckets after the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.distributed.gradients.bucket_segments import ParameterGrad, Segment, Segments, any_nonzero
from shoal.errors import InputError


class ErrorFeedback:
    """The residuals of one rank, for the two roundings of an all-reduce on codes.

    Residuals of its own gradients: what they lost on the way to the ranks that sum them. Residuals of the means it
    encoded for all ranks: what they lost on the way back. A segment whose gradient is zero throughout (an unused
    parameter) is sent as zero and keeps its residual: DDP may discard such a result.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank
        self._gradients: dict[str, torch.Tensor] = {}  # (n,) float32, a whole parameter
        self._means: dict[tuple[str, int], torch.Tensor] = {}  # (n,) float32 of a segment, by name and start

    def add(self, gradients: Sequence[ParameterGrad], own: Segments, device: torch.device) -> set[Segment]:
        """Keep residuals for a bucket. Residuals of means that another rank encodes from now on move to the gradients.

        Args:
            gradients: of the bucket.
            own: the segments of it that this rank sums.
            device: of the gradients.

        Returns:
            Those of `own` with a residual, to `flush`: they are never encoded as gradients.
        """
        for gradient in gradients:
            if gradient.encoded and gradient.name not in self._gradients:
                self._gradients[gradient.name] = torch.zeros(gradient.elems, device=device)
        mine = {(segment.name, segment.start): segment for segment in own if segment.encoded}
        names = {gradient.name for gradient in gradients}
        for (name, start), left in list(self._means.items()):
            kept = mine.get((name, start))
            if name in names and (kept is None or kept.elems != left.numel()):
                # The mean of W gradients misses what one of them misses, divided by W.
                self._gradients[name][start : start + left.numel()].add_(left, alpha=self._ranks)
                del self._means[name, start]
        return {segment for segment in mine.values() if bool(self._residual(segment).any())}

    def flush(self, values: torch.Tensor, unflushed: set[Segment]) -> None:
        """Add the residuals of these segments to the rank's own values, once and exactly; those added leave the set."""
        for segment in list(unflushed):
            if any_nonzero(values[segment.values]):
                residual = self._residual(segment)
                values[segment.values].add_(residual)
                residual.zero_()
                unflushed.discard(segment)

    def of_gradient(self, segment: Segment) -> torch.Tensor | None:
        """The residual of a segment on the way to the rank that sums it, for `pack`; None where it is sent raw."""
        return self._residual(segment) if segment.encoded else None

    def of_mean(self, segment: Segment, device: torch.device) -> torch.Tensor | None:
        """The residual of the mean of a segment that this rank sums; None where it is sent raw."""
        if not segment.encoded:
            return None
        key = segment.name, segment.start
        if key not in self._means:
            self._means[key] = torch.zeros(segment.elems, device=device)
        return self._means[key]

    def state_dict(self) -> dict[str, Any]:
        """Of this rank; for the same rank of as many."""
        return {
            "ranks": self._ranks,
            "rank": self._rank,
            "gradients": {name: left.clone() for name, left in self._gradients.items()},
            "means": [(name, start, left.clone()) for (name, start), left in self._means.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any], elems: Mapping[str, int], device: torch.device) -> None:
        """
        Args:
            state: of `state_dict`.
            elems: of every parameter, by name.
            device: of the gradients.

        Raises:
            InputError: it is of another rank, number of ranks or model.
        """
        if (state["rank"], state["ranks"]) != (self._rank, self._ranks):
            raise InputError(
                f"got the state of rank {state['rank']} of {state['ranks']}, expected rank {self._rank} of "
                f"{self._ranks}; give each rank its own state, or none"
            )
        wrong = [name for name, left in state["gradients"].items() if elems.get(name) != left.numel()]
        if wrong:
            raise InputError(
                f"got the residual of {wrong[0]}, which this model lacks or has in another size; load its own"
            )
        self._gradients = {name: left.to(device, copy=True) for name, left in state["gradients"].items()}
        self._means = {(name, start): left.to(device, copy=True) for name, start, left in state["means"]}

    def _residual(self, segment: Segment) -> torch.Tensor:
        return self._gradients[segment.name][segment.start : segment.start + segment.elems]
