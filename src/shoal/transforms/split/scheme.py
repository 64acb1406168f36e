"""Where every tensor of a split region is cut, given where its last one is: Split-CNN section 3.2, for any graph.

Tensors that pointwise ops tie together, such as the two sides of a residual addition, are cut at the same places: they
form an *extent*. A window op ties the extent it reads to the one it writes: a cut at O after it allows a stretch of
cuts before it, o*s + [low, high]. So every extent is cut at scale*O + offset for a cut at O of the coarsest one, with
constant offsets: whatever O is, the padding of an inner patch is the same, and only the cuts of the input change.

Of the offsets that lose nothing the one nearest to 0 is taken, which pads inner patches as the layer pads its borders.
Where branches with several lengths of kernel leave none, some rows are cropped, and `describe` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.errors import CaptureError
from shoal.transforms.split.sliding_window import SlidingWindow


@dataclass(frozen=True)
class Tie:
    """A window op between two extents, for one dimension.

    Attributes:
        name: of the layer, for messages.
        source, result: numbers of the extents it reads and writes.
        window: what it is along the dimension.
    """

    name: str
    source: int
    result: int
    window: SlidingWindow


@dataclass(frozen=True)
class Cuts:
    """How the extents of one dimension are cut: extent e at scales[e] * O + offsets[e]."""

    scales: Mapping[int, int]
    offsets: Mapping[int, int]

    def parts(self, extent: int, length: int, joined: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """From..to of every part of an extent of `length`, for inner cuts `joined` of the coarsest extent."""
        scale, offset = self.scales[extent], self.offsets[extent]
        cuts = [0, *(scale * cut + offset for cut in joined), length]
        return tuple(pairwise(cuts))


def propagate(ties: Sequence[Tie], reference: int, extents: Sequence[int]) -> Cuts:
    """Cuts of all extents from those of the coarsest.

    Args:
        ties: in the order in which they run.
        reference: the extent in whose cuts the others are given.
        extents: all of them, each after those it is made from.

    Raises:
        CaptureError: two ways from one extent to another have different strides.
    """
    scales = _scales(ties, reference, extents)
    offsets = {reference: 0}
    pending = [extent for extent in reversed(extents) if extent != reference]
    while pending:
        # One that is tied to something settled, the last first; a residual stream settles before what it is made of.
        ready = next((e for e in pending if any(_other(tie, e) in offsets for tie in ties)), pending[0])
        pending.remove(ready)
        offsets[ready] = _offset(ready, ties, offsets)
    return Cuts(scales, offsets)


def _other(tie: Tie, extent: int) -> int | None:
    if tie.source == extent:
        return tie.result
    return tie.source if tie.result == extent else None


def _scales(ties: Sequence[Tie], reference: int, extents: Sequence[int]) -> dict[int, int]:
    scales = {reference: 1}
    changed = True
    while changed:
        changed = False
        for tie in ties:
            stride = tie.window.stride
            if tie.result in scales and tie.source not in scales:
                scales[tie.source] = scales[tie.result] * stride
                changed = True
            elif tie.source in scales and tie.result not in scales and scales[tie.source] % stride == 0:
                scales[tie.result] = scales[tie.source] // stride
                changed = True
    for tie in ties:
        if tie.source in scales and scales[tie.source] != scales.get(tie.result, 0) * tie.window.stride:
            raise CaptureError(
                f"no cuts fit {tie.name} (stride {tie.window.stride}) and what it joins with later; use join= with an "
                "earlier module"
            )
    return {extent: scales.get(extent, 1) for extent in extents}


def _offset(extent: int, ties: Sequence[Tie], offsets: Mapping[int, int]) -> int:
    """The offset nearest to that of the readers among those that lose nothing."""
    wanted: list[int] = []
    minimum, maximum = -(1 << 40), 1 << 40
    for tie in ties:
        low, high = tie.window.cuts
        stride = tie.window.stride
        if tie.source == extent and tie.result in offsets:
            at = stride * offsets[tie.result]
            wanted.append(at)
            narrowed = max(minimum, at + low), min(maximum, at + high)
        elif tie.result == extent and tie.source in offsets:
            at = offsets[tie.source]
            wanted.append(at // stride)
            narrowed = max(minimum, -((high - at) // stride)), min(maximum, (at - low) // stride)
        else:
            continue
        if narrowed[0] <= narrowed[1]:
            minimum, maximum = narrowed
    return min(max(wanted[0], minimum), maximum) if wanted else 0
