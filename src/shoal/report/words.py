"""What the page says: the headline, the tiles, the peak in words. Functions of a report, no HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.sizes import format_bytes
from shoal.timeline import Moment

if TYPE_CHECKING:
    from shoal.report.page import Report

# In the order they are stacked: what stands all step at the bottom, what comes and goes on top.
CATEGORIES: Mapping[str, str] = {
    "resident": "parameters, buffers, the input batch, optimizer state: there all step",
    "gradients": "parameter gradients made so far, held for the optimizer",
    "kept": "forward results that wait in memory for the backward pass",
    "errors": "what one backward op hands to the next",
    "recomputed": "forward results that were given up and computed again",
    "workspace": "scratch of the op that is running",
}

GLOSSARY: Mapping[str, str] = {
    "Step": "one forward and backward pass of the model over one batch.",
    "Op": "one operation of the step, such as a convolution or its gradient.",
    "Storage": "a block of device memory that one or more tensors share.",
    "Saved storage": "a storage that the forward pass writes and the backward pass reads.",
    "Kept": "the storage stays in memory from its computation to its last use.",
    "Recomputed": "the storage is freed after the forward pass and computed again when the backward pass needs it.",
    "Resident": "in memory all step: parameters, buffers, the input batch, optimizer state.",
    "Errors": "gradients that travel from one backward op to the next.",
    "Gradients": "the gradients of the parameters, which the optimizer reads.",
    "Workspace": "memory an op uses only while it runs.",
    "Peak": "the most bytes in use at once during the step.",
    "Budget": "the promise: the peak must not pass it.",
    "Plain PyTorch": "the same step with every saved storage kept.",
    "Added time": "how much longer the step takes than in plain PyTorch.",
    "Lower bound": "the least time that any plan within this budget must add, by the same estimate of op times.",
    "MiB, GiB": "2\u00b2\u2070 and 2\u00b3\u2070 bytes.",
}

_PASS = {
    "forward": "in the forward pass",
    "loss": "in the loss",
    "recompute": "while it is computed again for the backward pass",
    "backward": "in the backward pass",
}


@dataclass(frozen=True)
class Tile:
    """A number to see at a glance. `tone` is "good", "bad" or "" and never says more than the words do."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Filling:
    """One category's part of the peak. `share` is in 0..1."""

    category: str
    meaning: str
    size: str
    share: float


@dataclass(frozen=True)
class Scale:
    """One bar of the comparison of peaks. `share` of the longest bar, in 0..1."""

    label: str
    size: str
    share: float
    role: str


def format_seconds(seconds: float) -> str:
    """A duration for people, with three significant digits.

    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    if abs(seconds) >= 120:
        return f"{seconds / 60:.1f} min"
    value, unit = seconds, "s"
    for unit in ("s", "ms", "\u00b5s"):
        if abs(value) >= 1 or unit == "\u00b5s":
            break
        value *= 1000
    if not value:
        return "0 s"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_percent(share: float) -> str:
    """A share for people, without its sign: one decimal below ten percent.

    >>> format_percent(0.0834), format_percent(-0.452)
    ('8.3 %', '45 %')
    """
    percent = abs(100 * share)
    return f"{percent:.0f} %" if percent >= 9.95 or not round(percent, 1) else f"{percent:.1f} %"


def _round_bytes(count: int) -> str:
    """Bytes with three significant digits and a space that does not break: for the headline."""
    unit = format_bytes(count).split()[1]
    size = count / 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    digits = 0 if unit == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f}\u00a0{unit}"


def name_of(report: Report) -> str:
    """The title or the model, with the batch where the settings name it."""
    name = report.title or report.timeline.model or "Unnamed model"
    batch = report.settings.get("batch", "")
    return f"{name}, batch {batch}" if batch else name


def headline(report: Report) -> str:
    """The result in one sentence, without the name."""
    said = [_size_said(report)]
    plan = report.plan
    if plan is not None and plan.plain_seconds:
        added = plan.added_seconds / plan.plain_seconds
        said.append(f"{format_percent(added)} slower" if round(added, 3) > 0 else "no slower")
    promise = _promise_said(report)
    if promise:
        said.append(promise)
    return ", ".join(said).replace(" %", "\u00a0%")


def _peak_bytes(report: Report) -> int:
    measured = report.measured_peak_bytes
    return report.timeline.peak_bytes if measured is None else measured


def _size_said(report: Report) -> str:
    peak = _round_bytes(_peak_bytes(report))
    if report.plan is None:
        return f"{peak} at the peak"
    if report.plan.plain_peak_bytes <= _peak_bytes(report):
        return f"{peak}, as much as plain PyTorch"
    return f"{peak} of plain PyTorch\u2019s {_round_bytes(report.plan.plain_peak_bytes)}"


def _promise_said(report: Report) -> str:
    budget = report.timeline.budget_bytes
    if not budget:
        return ""
    over = _peak_bytes(report) - budget
    if report.measured_peak_bytes is None:
        return f"predicted to pass the budget by {_round_bytes(over)}" if over > 0 else "predicted to fit the budget"
    return f"promise broken by {_round_bytes(over)}" if over > 0 else "promise kept"


def place_of(moment: Moment) -> str:
    """Where in the step a moment is, in words."""
    return f"{moment.op}{f' of {moment.layer}' if moment.layer else ''}, {_PASS[moment.phase]}"


def lede(report: Report) -> str:
    """Two sentences under the headline: where the peak is, and what was done about it."""
    timeline = report.timeline
    said = f"Most memory is in use at {place_of(timeline.peak)}."
    if report.plan is not None:
        recomputed, kept = report.plan.recomputed, report.plan.kept
        if recomputed:
            size = format_bytes(sum(storage.nbytes for storage in recomputed))
            noun = "storage is" if len(recomputed) == 1 else "storages are"
            said += (
                f" {len(recomputed)} {noun} freed after the forward pass and computed again"
                f" just before the backward pass needs them ({size} in all); {len(kept)} stay."
            )
        else:
            said += " Every saved storage stays in memory; nothing is computed twice."
    return said


def tiles(report: Report) -> list[Tile]:
    """The numbers to see first."""
    timeline, plan, measured = report.timeline, report.plan, report.measured_peak_bytes
    budget, predicted = timeline.budget_bytes, timeline.peak_bytes
    shown = []
    if budget:
        of_plain = f"{format_percent(budget / plan.plain_peak_bytes)} of plain PyTorch\u2019s peak" if plan else ""
        shown.append(Tile("Budget", format_bytes(budget), of_plain))
    note = f"{format_percent(predicted / budget)} of the budget" if budget else "no budget was set"
    shown.append(Tile("Predicted peak", format_bytes(predicted), note, "bad" if budget and predicted > budget else ""))
    if measured is not None:
        off = measured / predicted - 1 if predicted else 0.0
        side = "above" if off > 0 else "below"
        note = f"{format_percent(off)} {side} the prediction" if round(off, 3) else "as predicted, within 0.05 %"
        tone = "" if not budget else "bad" if measured > budget else "good"
        shown.append(Tile("Measured peak", format_bytes(measured), note, tone))
    if plan is not None:
        added, bound = plan.added_seconds, plan.lower_bound_seconds
        share = f"+{format_percent(added / plan.plain_seconds)} of a step" if plan.plain_seconds else ""
        bound_said = f"at least {format_seconds(bound)} for any plan" if bound > 0 else "lower bound 0 s"
        shown.append(Tile("Added time", format_seconds(added), ", ".join(s for s in (share, bound_said) if s)))
        shown.append(Tile("Planning time", format_seconds(plan.planning_seconds), f"by the {plan.planner} planner"))
    else:
        again = timeline.recompute_seconds
        note = f"{format_seconds(again)} of it computing again" if again else "nothing is computed again"
        shown.append(Tile("Predicted step", format_seconds(timeline.seconds), note))
    return shown


def fillings(peak: Moment) -> list[Filling]:
    """What fills the peak, in the order of the chart's stack."""
    total = peak.total_bytes or 1
    sizes = category_bytes(peak)
    return [Filling(c, meaning, format_bytes(sizes[c]), sizes[c] / total) for c, meaning in CATEGORIES.items()]


def category_bytes(moment: Moment) -> dict[str, int]:
    """Bytes in use by category; they add up to `moment.total_bytes`."""
    return {
        "resident": moment.resident_bytes,
        "gradients": moment.gradient_bytes,
        "kept": moment.kept_bytes,
        "errors": moment.error_bytes,
        "recomputed": moment.recomputed_bytes,
        "workspace": moment.workspace_bytes,
    }


def scales(report: Report) -> list[Scale]:
    """Peaks side by side: plain PyTorch, the budget, predicted, measured. Empty when there is nothing to compare."""
    rows = []
    if report.plan is not None:
        rows.append(("Plain PyTorch, predicted", report.plan.plain_peak_bytes, "plain"))
    if report.timeline.budget_bytes:
        rows.append(("Budget", report.timeline.budget_bytes, "budget"))
    rows.append(("This run, predicted", report.timeline.peak_bytes, "ours"))
    if report.measured_peak_bytes is not None:
        rows.append(("This run, measured", report.measured_peak_bytes, "ours"))
    longest = max(size for _, size, _ in rows) or 1
    return [Scale(label, format_bytes(size), size / longest, role) for label, size, role in rows] if rows[1:] else []


def outcomes(report: Report) -> dict[str, str]:
    """What came of the run."""
    return {_sentence(key): value for key, value in report.outcome.items()}


def settings(report: Report) -> dict[str, str]:
    """What was run, and by which plan."""
    shown = {_sentence(key): value for key, value in report.settings.items()}
    if report.plan is not None:
        shown.setdefault("Planner", report.plan.planner)
        shown.setdefault("Times are for", report.plan.hardware or "unknown hardware")
        shown.setdefault("Step fingerprint", report.plan.graph.fingerprint)
    return shown


def _sentence(key: str) -> str:
    """`images_per_second` → `Images per second`."""
    text = key.replace("_", " ").strip()
    return text[:1].upper() + text[1:]
