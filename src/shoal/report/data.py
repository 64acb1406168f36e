"""The contents of the page, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.plan import Plan
from shoal.core.timeline import Timeline
from shoal.transforms.split.patch_map import PatchMap


@dataclass(frozen=True)
class Report:
    """A run. Only the timeline is required; the page leaves out the rest if it is missing.

    Attributes:
        timeline: the simulated step.
        plan: of the timeline; adds plain PyTorch's curve, the storages and the lower bound.
        measured_peak_bytes: the peak of the first steps.
        losses: one per training step, in order.
        accuracies: in 0..1, one per evaluation, in order.
        title: of the page; the model's name if empty.
        settings: shown as given: model, data, batch, versions, seed, threads. "batch" and "ranks" are also part of the
            name.
        outcome: shown as given: test accuracy, images per second.
        patches: where the patches of a split network lie in its input.
        image: an input to draw them over, as a "data:" URL; empty for none.
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
