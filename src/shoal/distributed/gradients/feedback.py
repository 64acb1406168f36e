"""Error feedback: what encoding a gradient lost is added to the next one, by parameter (Seide et al. 2014).

Kept under the parameters' names, not by bucket: DDP cuts its buckets anew after the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.codecs.codec import Codec
from shoal.distributed.gradients.layout import Piece, Segment
from shoal.distributed.gradients.segments import Segments, pack_one, places, unpack_one
from shoal.errors import InputError

_FIRST_VALUES = 64


class Feedback:
    """What one rank owes, for the two roundings of an all-reduce on codes.

    Of its own gradients: what they lost on the way to the ranks that sum them. Of the means it encoded for all: what
    they lost on the way back. A segment whose gradient is zero throughout (an unused parameter) is sent as zero, and
    what is owed waits: DDP may throw such a result away.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank
        self._gradients: dict[str, torch.Tensor] = {}  # (n,) float32, a whole parameter
        self._means: dict[tuple[str, int], torch.Tensor] = {}  # (n,) float32 of a segment, by name and start

    def adopt(self, pieces: Sequence[Piece], own: Segments, device: torch.device) -> set[Segment]:
        """Take up a bucket: what was owed for means that another rank makes from now on is owed as a gradient.

        Returns:
            Of the rank's own segments, which never are encoded as gradients, those to `settle`.
        """
        for piece in pieces:
            if piece.encoded and piece.name not in self._gradients:
                self._gradients[piece.name] = torch.zeros(piece.elems, device=device)
        mine = {(segment.name, segment.start): segment for segment in own if segment.encoded}
        names = {piece.name for piece in pieces}
        for (name, start), left in list(self._means.items()):
            kept = mine.get((name, start))
            if name in names and (kept is None or kept.elems != left.numel()):
                # The mean of W gradients misses what one of them misses, divided by W.
                self._gradients[name][start : start + left.numel()].add_(left, alpha=self._ranks)
                del self._means[name, start]
        return {segment for segment in mine.values() if bool(self._owed(segment).any())}

    def settle(self, values: torch.Tensor, unsettled: set[Segment]) -> None:
        """Add to the rank's own values what it owes of them, once and exactly."""
        for segment in list(unsettled):
            if _any(values[segment.values]):
                owed = self._owed(segment)
                values[segment.values].add_(owed)
                owed.zero_()
                unsettled.discard(segment)

    def pack_gradients(self, values: torch.Tensor, segments: Segments, codec: Codec, out: torch.Tensor) -> None:
        """As `segments.pack`, of the values and what is owed of them."""
        for segment, place in zip(segments, places(segments, codec), strict=True):
            left = self._owed(segment) if segment.encoded else None
            _pack(values[segment.values], segment, codec, out[place], left)

    def pack_means(self, values: torch.Tensor, segments: Segments, codec: Codec, out: torch.Tensor) -> None:
        """As `segments.pack`, of the means of the rank's own segments and what is owed of them."""
        for segment, place in zip(segments, places(segments, codec), strict=True):
            left = None
            if segment.encoded:
                key = segment.name, segment.start
                if key not in self._means:
                    self._means[key] = torch.zeros(segment.elems, device=values.device)
                left = self._means[key]
            _pack(values[segment.values], segment, codec, out[place], left)

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
                f"got the state of rank {state['rank']} of {state['ranks']}, expected that of rank {self._rank} of "
                f"{self._ranks}; save one for each rank and start as many, or leave it out and owe nothing"
            )
        wrong = [name for name, left in state["gradients"].items() if elems.get(name) != left.numel()]
        if wrong:
            raise InputError(
                f"got what is owed of {wrong[0]}, which this model lacks or has in another size; load its own"
            )
        self._gradients = {name: left.to(device, copy=True) for name, left in state["gradients"].items()}
        self._means = {(name, start): left.to(device, copy=True) for name, start, left in state["means"]}

    def _owed(self, segment: Segment) -> torch.Tensor:
        return self._gradients[segment.name][segment.start : segment.start + segment.elems]


def _pack(values: torch.Tensor, segment: Segment, codec: Codec, out: torch.Tensor, left: torch.Tensor | None) -> None:
    if left is None or not _any(values):
        pack_one(values, segment, codec, out)
        return
    left.add_(values)
    pack_one(left, segment, codec, out)
    came = torch.empty_like(left)
    unpack_one(out, segment, codec, came)
    # A NaN or an infinity was sent as such; owed for ever, it would spoil every later step.
    left.sub_(came).nan_to_num_(0.0, 0.0, 0.0)


def _any(values: torch.Tensor) -> bool:
    """Whether one is not zero; mostly the first ones tell."""
    return bool(values[:_FIRST_VALUES].any()) or bool(values.any())
