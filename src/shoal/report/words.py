"""The texts of the page: headline, tiles, glossary. Functions of a report, no HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.added_time import PREDICTED_SECONDS
from shoal.core.sizes import format_bytes
from shoal.core.timeline import Moment, Timeline
from shoal.report.link_use import busy_share, link_use, share_of_step

if TYPE_CHECKING:
    from shoal.core.plan import Plan
    from shoal.report.data import Report

# In the order of the chart's stack: static memory at the bottom.
CATEGORIES: Mapping[str, str] = {
    "resident": "static memory: parameters, buffers, the input batch, optimizer state",
    "gradients": "parameter gradients computed so far, for the optimizer",
    "kept": "activations that stay in memory for the backward pass",
    "activation-gradients": "gradients that one backward op passes to the next",
    "recomputed": "activations that were freed and recomputed",
    "fetched": "offloaded activations that are back on the device, or on their way",
    "workspace": "temporary memory of the running op",
}

GLOSSARY: Mapping[str, str] = {
    "Step": "one forward and backward pass over one batch.",
    "Op": "one operation of the step, such as a convolution or its gradient.",
    "Storage": "device memory that one or more tensors share (torch.UntypedStorage).",
    "Saved storage": "a storage that the forward pass writes and the backward pass reads.",
    "Kept": "the storage stays in memory until its last use.",
    "Recomputed": "the storage is freed after the forward pass and recomputed when the backward pass needs it.",
    "Offloaded": "the storage is copied to the host and freed, and copied back when the backward pass needs it.",
    "Fetched": "an offloaded storage that is back on the device, or on its way.",
    "Encoded": "the storage is held in 8 bits a value, for the weight gradients of convolutions only.",
    "Link": "the connection between device and host; each direction carries one copy at a time.",
    "Stall": "a time in which the device waits for a copy.",
    "Patch": "a part of the input; the first layers run on each patch separately.",
    "Join": "where the patches become one tensor again.",
    "Resident": "in memory throughout the step: parameters, buffers, the input batch, optimizer state.",
    "Activation gradients": "gradients that one backward op passes to the next.",
    "Gradients": "the gradients of the parameters, which the optimizer reads.",
    "Workspace": "temporary memory that an op uses while it runs.",
    "Peak": "the most bytes in use at once during the step.",
    "Budget": "the limit that the peak must not exceed.",
    "Plain PyTorch": "the same step with every saved storage kept.",
    "Added time": "how much longer the step takes than in plain PyTorch.",
    "Lower bound": "no plan within this budget adds less time, with the same op times and in the same order of ops.",
    "MiB, GiB": "2\u00b2\u2070 and 2\u00b3\u2070 bytes.",
}
_OF_OFFLOADS = ("Offloaded", "Fetched", "Link", "Stall")  # left out of a page without transfers
_OF_PATCHES = ("Patch", "Join")
_OF_CODECS = ("Encoded",)

_PASS = {
    "forward": "in the forward pass",
    "loss": "in the loss",
    "recompute": "in the recomputation for the backward pass",
    "backward": "in the backward pass",
}


@dataclass(frozen=True)
class Tile:
    """A key figure. `tone` is "good", "bad" or "": a colour that repeats what the words say."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Filling:
    """One category's part of the peak. `share` is in 0..1; `category` is also the CSS class."""

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
    """A duration with three significant digits.

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
    """A share in percent, without its sign: one decimal below ten percent.

    >>> format_percent(0.0834), format_percent(-0.452)
    ('8.3 %', '45 %')
    """
    percent = abs(100 * share)
    return f"{percent:.0f} %" if percent >= 9.95 or not round(percent, 1) else f"{percent:.1f} %"


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth with three significant digits, in powers of ten, the unit of data sheets.

    >>> format_rate(34.1e9)
    '34.1 GB/s'
    """
    value, unit = bytes_per_second, "B/s"
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if value < 999.5 or unit == "GB/s":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def _round_bytes(count: int) -> str:
    """Bytes with three significant digits and a non-breaking space, for the headline."""
    unit = format_bytes(count).split()[1]
    size = count / 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    digits = 0 if unit == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f}\u00a0{unit}"


def name_of(report: Report) -> str:
    """The title or the model, with the batch and the number of ranks if the settings have them."""
    name = report.title or report.timeline.model or "Unnamed model"
    batch, ranks = (str(report.settings.get(key, "")) for key in ("batch", "ranks"))
    shared = f" on {ranks} ranks" if ranks not in ("", "1") else ""
    return f"{name}, batch {batch}{shared}" if batch else name


def headline(report: Report) -> str:
    """The result in one sentence, without the name."""
    parts = [_size_text(report)]
    plan, on_host = report.plan, link_use(report.timeline, "to host").nbytes
    if on_host:
        parts.append(f"{_round_bytes(on_host)} on the host")
    if plan is not None and plan.plain_seconds:
        added = plan.added_seconds / plan.plain_seconds
        is_resolved = plan.plain_seconds >= PREDICTED_SECONDS
        slower = format_percent(added) if is_resolved else format_seconds(plan.added_seconds)
        parts.append(f"{slower} slower" if round(added, 3) > 0 else "no slower")
    if verdict := _budget_text(report):
        parts.append(verdict)
    return ", ".join(parts).replace(" %", "\u00a0%")


def _peak_bytes(report: Report) -> int:
    measured = report.measured_peak_bytes
    return report.timeline.peak_bytes if measured is None else measured


def _size_text(report: Report) -> str:
    peak = _round_bytes(_peak_bytes(report))
    if report.plan is None:
        return f"{peak} at the peak"
    if report.plan.plain_peak_bytes <= _peak_bytes(report):
        return f"{peak}, as much as plain PyTorch"
    return f"{peak} of plain PyTorch\u2019s {_round_bytes(report.plan.plain_peak_bytes)}"


def _budget_text(report: Report) -> str:
    budget = report.timeline.budget_bytes
    if not budget:
        return ""
    over = _peak_bytes(report) - budget
    if report.measured_peak_bytes is None:
        return f"predicted to exceed the budget by {_round_bytes(over)}" if over > 0 else "predicted to fit the budget"
    return f"over budget by {_round_bytes(over)}" if over > 0 else "within budget"


def place_of(moment: Moment) -> str:
    """Where in the step a moment is, in words that follow "memory peaks"."""
    of_layer = f" of {moment.layer}" if moment.layer else ""
    if moment.phase == "stall":
        return f"while {moment.target}{of_layer} waits for the copy of {moment.op}"
    if moment.phase == "launch":
        return f"while the host launches {moment.op}{of_layer}"
    return f"at {moment.op}{of_layer}, {_PASS[moment.phase]}"


def lede(report: Report) -> str:
    """The sentences under the headline: where the peak is, what the plan does, how busy the link is."""
    timeline, plan = report.timeline, report.plan
    text = f"Memory peaks {place_of(timeline.peak)}."
    done = []
    if plan is not None and plan.recomputed:
        size = format_bytes(sum(storage.nbytes for storage in plan.recomputed))
        verb = "is" if len(plan.recomputed) == 1 else "are"
        done.append(
            f"{_counted(len(plan.recomputed), 'storage')} {verb} freed after the forward pass and recomputed"
            f" just before the backward pass needs them ({size} in all)"
        )
    to_host = link_use(timeline, "to host")
    if to_host.count:
        verb, them = ("waits", "it") if to_host.count == 1 else ("wait", "them")
        done.append(
            f"{_counted(to_host.count, 'storage')} {verb} on the host until the backward pass needs {them}"
            f" ({format_bytes(to_host.nbytes)} in all)"
        )
    if plan is not None and plan.encoded:
        size = format_bytes(sum(storage.nbytes for storage in plan.encoded))
        done.append(
            f"{_counted(len(plan.encoded), 'storage')} {'is' if len(plan.encoded) == 1 else 'are'} encoded"
            f" ({size} in {format_bytes(plan.payload_bytes)})"
        )
    if done and plan is not None:
        done.append(f"{len(plan.kept)} stay")
    if done:
        text += f" {'; '.join(done)}."
    elif plan is not None:
        text += " Every saved storage stays in memory; nothing is recomputed."
    return text + _link_text(timeline)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _link_text(timeline: Timeline) -> str:
    if not timeline.transfers:
        return ""
    stall = timeline.stall_seconds
    waits = f"the device waits {format_seconds(stall)} for it" if stall > 0 else "the device never waits for it"
    busy = format_percent(busy_share(timeline)).replace(" ", "\u00a0")
    return f" The link is busy {busy} of the step, and {waits}."


def tiles(report: Report) -> list[Tile]:
    """The key figures."""
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
        added, bound = plan.added_seconds, plan.least_added_seconds
        sign = "+" if added >= 0 else "-"
        is_resolved = plan.plain_seconds >= PREDICTED_SECONDS
        share = f"{sign}{format_percent(added / plan.plain_seconds)} of a step" if is_resolved else ""
        plans = "plan in this order of ops" + (" that encodes the same" if plan.encoded else "")
        bound_text = f"at least {format_seconds(bound)} for any {plans}" if bound > 0 else "lower bound 0 s"
        shown.append(Tile("Added time", format_seconds(added), ", ".join(s for s in (share, bound_text) if s)))
        shown.append(Tile("Planning time", format_seconds(plan.planning_seconds), f"by the {plan.planner} planner"))
        shown += _encoded_tiles(plan)
    else:
        again = timeline.recompute_seconds
        note = f"{format_seconds(again)} of it recomputation" if again else "nothing is recomputed"
        shown.append(Tile("Predicted step", format_seconds(timeline.seconds), note))
    if waits := timeline.launch_wait_seconds:
        of_step = (
            f"{format_percent(share_of_step(timeline, waits))} of the step, until the host has launched the next op"
        )
        shown.append(Tile("Waits for launches", format_seconds(waits), of_step))
    return shown + (_link_tiles(report) if timeline.transfers else [])


def _encoded_tiles(plan: Plan) -> list[Tile]:
    """Encoded bytes, time and error."""
    if not plan.encoded:
        return []
    size = f"{format_bytes(sum(s.nbytes for s in plan.encoded))} in {format_bytes(plan.payload_bytes)}"
    times = f"{format_seconds(plan.codec_seconds)} to encode and decode"
    shown = [Tile("Encoded", size, f"{_counted(len(plan.encoded), 'storage')}, {times}")]
    if plan.errors:
        where = "of an activation\u2019s norm, " + (
            "measured in a step" if plan.errors_measured else "measured on normally distributed values"
        )
        shown.append(Tile("Largest encoding error", format_percent(max(plan.errors.values())), where))
    return shown


def _link_tiles(report: Report) -> list[Tile]:
    """Bytes on the host, stalls, and how busy the link is."""
    timeline = report.timeline
    to_host, to_device = link_use(timeline, "to host"), link_use(timeline, "to device")
    link = report.plan.graph.link if report.plan else None
    allowed = f", at most {format_bytes(link.host_bytes)} allowed" if link and link.host_bytes else ""
    stall = timeline.stall_seconds
    stalls = sum(moment.phase == "stall" for moment in timeline.moments)
    waits = f"{format_percent(share_of_step(timeline, stall))} of the step, in {_counted(stalls, 'stall')}"
    ways = f"of the step: {format_percent(to_host.busy_share)} to the host, {format_percent(to_device.busy_share)} back"
    return [
        Tile("On the host", format_bytes(to_host.nbytes), _counted(to_host.count, "storage") + allowed),
        Tile("Stalls", format_seconds(stall), waits if stalls else "every copy overlaps computation"),
        Tile("Link busy", format_percent(busy_share(timeline)), ways),
    ]


def categories(timeline: Timeline) -> dict[str, str]:
    """Category → meaning, in the order of the stack; "fetched" only if something is offloaded."""
    fetches = any(moment.fetched_bytes for moment in timeline.moments)
    return {category: meaning for category, meaning in CATEGORIES.items() if fetches or category != "fetched"}


def fillings(timeline: Timeline) -> list[Filling]:
    """The peak by category, in the order of the chart's stack."""
    total = timeline.peak_bytes or 1
    sizes = category_bytes(timeline.peak)
    return [
        Filling(category, meaning, format_bytes(sizes[category]), sizes[category] / total)
        for category, meaning in categories(timeline).items()
    ]


def category_bytes(moment: Moment) -> dict[str, int]:
    """Bytes in use by category; they add up to `moment.total_bytes`."""
    return {
        "resident": moment.resident_bytes,
        "gradients": moment.gradient_bytes,
        "kept": moment.kept_bytes,
        "activation-gradients": moment.activation_gradient_bytes,
        "recomputed": moment.recomputed_bytes,
        "fetched": moment.fetched_bytes,
        "workspace": moment.workspace_bytes,
    }


def scales(report: Report) -> list[Scale]:
    """The bars of the comparison: plain PyTorch, budget, predicted, measured. Empty if there is nothing to compare."""
    rows = []
    if report.plan is not None:
        rows.append(("Plain PyTorch, predicted", report.plan.plain_peak_bytes, "plain"))
        if report.plan.rewritten_peak_bytes != report.plan.plain_peak_bytes:
            rows.append(("With lossless rewrites", report.plan.rewritten_peak_bytes, "plain"))
    if report.timeline.budget_bytes:
        rows.append(("Budget", report.timeline.budget_bytes, "budget"))
    rows.append(("This run, predicted", report.timeline.peak_bytes, "ours"))
    if report.measured_peak_bytes is not None:
        rows.append(("This run, measured", report.measured_peak_bytes, "ours"))
    longest = max(size for _, size, _ in rows) or 1
    return [Scale(label, format_bytes(size), size / longest, role) for label, size, role in rows] if rows[1:] else []


def outcomes(report: Report) -> dict[str, str]:
    """The results of the run."""
    return {_sentence(key): value for key, value in report.outcome.items()}


def settings(report: Report) -> dict[str, str]:
    """The settings of the run and of its plan."""
    shown = {_sentence(key): value for key, value in report.settings.items()}
    if report.plan is not None:
        shown.setdefault("Planner", report.plan.planner)
        shown.setdefault("Times are for", report.plan.hardware or "unknown hardware")
        if report.plan.order:
            shown.setdefault("Order of ops", report.plan.order)
        link = report.plan.graph.link
        if report.timeline.transfers and link is not None:
            there, back = link.to_host_bytes_per_second, link.to_device_bytes_per_second
            shown.setdefault("Link", f"{link.name}: {format_rate(there)} to the host, {format_rate(back)} back")
        shown.setdefault("Step fingerprint", report.plan.graph.fingerprint)
    return shown


def glossary(report: Report) -> dict[str, str]:
    """The words of this page and their meanings."""
    unused: tuple[str, ...] = () if report.timeline.transfers else _OF_OFFLOADS
    unused += () if report.patches else _OF_PATCHES
    unused += () if report.plan is not None and report.plan.encoded else _OF_CODECS
    return {word: meaning for word, meaning in GLOSSARY.items() if word not in unused}


def _sentence(key: str) -> str:
    """`images_per_second` → `Images per second`."""
    text = key.replace("_", " ").strip()
    return text[:1].upper() + text[1:]
