"""What the page shows, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.plan import Plan
from shoal.core.timeline import Timeline
from shoal.transforms.split.patch_map import PatchMap


@dataclass(frozen=True)
class Report:
    """What is known of a run. Only the timeline must be there; the page leaves out what is not.

    Attributes:
        timeline: the simulated step.
        plan: where the timeline comes from; brings plain PyTorch's curve, the storages and the lower bound.
        measured_peak_bytes: what the first steps really used.
        losses: one per training step, in order.
        accuracies: share of right answers in 0..1, one per evaluation, in order.
        title: what the page is called; the model's name if empty.
        settings: what was run, as shown: model, data, batch, versions, seed, threads. "batch" and "ranks" also enter
            the headline.
        outcome: what came of it, as shown: test accuracy, images per second.
        patches: where the patches of a split network lie in its input.
        image: an input to draw them over, as an address that begins with "data:"; drawn over nothing if empty.
    """

    timeline: Timeline
    plan: Plan | None = None
    measured_peak_bytes: int | None = None
    losses: tuple[float, ...] = ()
    accuracies: tuple[float, ...] = ()
    title: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    outcome: Mapping[str, str] = field(default_factory=dict)
    patches: PatchMap | None = None
    image: str = ""
