"""A plan as text: what it costs, what it does with what, and what fills the peak."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.added_time import added_text
from shoal.core.joined_step import describe_breaks
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.residence import Encode
from shoal.core.sizes import format_bytes
from shoal.core.step import Storage
from shoal.core.timeline import WAITS
from shoal.core.variant import describe_candidates

_LARGEST = 10  # saved storages that are named


def explained(plan: Plan) -> str:
    """What `Plan.explain` returns."""
    peak = plan.timeline.peak
    lines = [
        f"{plan.graph.model or 'model'}, planner {plan.planner}, times for {plan.hardware or 'unknown hardware'}",
        f"budget          {format_bytes(plan.budget_bytes) if plan.budget_bytes else 'none'}",
        *_costs(plan),
        f"kept            {len(plan.kept)} saved storages, {_sum(plan.kept)}",
        f"recomputed      {len(plan.recomputed)} storages, {_sum(plan.recomputed)}",
        *([f"order           {plan.order}"] if plan.order else []),
        *describe_breaks(plan.graph, plan.breaks),
        *_checkpoints(plan),
        *(f"compiled        {line}" for line in plan.compiled),
        *_launches(plan),
        *_transfers(plan),
        *_encodings(plan),
        *_stops(plan),
        *(f"allowed         {line}" for line in plan.without_effect),
        *describe_candidates(plan.variant, plan.candidates),
        f"at the peak     {peak.op} ({peak.phase}, layer {peak.layer or '-'}): "
        f"resident {format_bytes(peak.resident_bytes)}, kept {format_bytes(peak.kept_bytes)}, "
        f"recomputed {format_bytes(peak.recomputed_bytes)}, fetched {format_bytes(peak.fetched_bytes)}, "
        f"activation gradients {format_bytes(peak.activation_gradient_bytes)}, "
        f"gradients {format_bytes(peak.gradient_bytes)}, workspace {format_bytes(peak.workspace_bytes)}",
        "largest saved storages",
    ]
    for storage in sorted(_waiting(plan), key=lambda s: -s.nbytes)[:_LARGEST]:
        what = storage.layer or storage.name
        lines.append(f"  {format_bytes(storage.nbytes):>10}  {what:<28} {plan.fate(storage)}")
    return "\n".join(lines)


def _costs(plan: Plan) -> Iterator[str]:
    kept = plan.plain_timeline
    peak = format_bytes(plan.predicted_peak_bytes)
    share = _percent(plan.predicted_peak_bytes, plan.plain_peak_bytes)
    step, bound_ms = f"{1e3 * plan.predicted_seconds:.1f} ms", 1e3 * plan.lower_bound_seconds
    alike = "no plan in this order of ops" + (" that encodes these" if plan.encoded else "")
    if (plan.rewritten_peak_bytes, plan.plain_seconds) == (kept.peak_bytes, kept.seconds):
        yield f"predicted peak  {peak} ({share} of plain PyTorch's {plan.plain_peak})"
        yield (
            f"predicted step  {step}, of which {1e3 * plan.added_seconds:.1f} ms added "
            f"({added_text(plan.predicted_seconds, plan.plain_seconds)}); {alike} can add less than {bound_ms:.1f} ms"
        )
        return
    yield (
        f"predicted peak  {peak} ({share} of plain PyTorch's {plan.plain_peak}; in this variant keeping "
        f"everything takes {format_bytes(kept.peak_bytes)})"
    )
    added = added_text(plan.predicted_seconds, plan.plain_seconds)
    yield (
        f"predicted step  {step}, {added} of plain PyTorch's {1e3 * plan.plain_seconds:.1f} ms; in this variant "
        f"keeping everything takes {1e3 * kept.seconds:.1f} ms, and {alike} less than "
        f"{1e3 * kept.seconds + bound_ms:.1f} ms"
    )


def _waiting(plan: Plan) -> tuple[Storage, ...]:
    """The saved storages, and in the place of each payload the storage whose encoded form it is."""
    payloads = {residence.payload for residence in plan.residences.values() if isinstance(residence, Encode)}
    saved = (plan.graph.storages[i] for i in plan.graph.saved)
    return tuple(dict.fromkeys([*(s for s in saved if s.name not in payloads), *plan.encoded]))


def _checkpoints(plan: Plan) -> Iterator[str]:
    if plan.checkpoints:
        yield (
            f"checkpoints     {plan.checkpoints} of torch.utils.checkpoint, taken as hints: each region runs once, "
            "what it changes (running statistics) changes once, and the plan decides what of it is computed again"
        )


def _launches(plan: Plan) -> Iterator[str]:
    if not plan.graph.has_launches:
        return
    runs = [moment for moment in plan.timeline.moments if moment.phase not in WAITS]
    by_name, again = plan.graph.op_called, "recompute"
    ops = [by_name[one.op].second if one.phase == again else by_name[one.op] for one in runs]
    yield (
        f"launches        {len(ops)}, which take the host {1e3 * sum(op.launch_seconds for op in ops):.1f} ms; the "
        f"device waits {1e3 * plan.timeline.launch_wait_seconds:.1f} ms of the step for them"
    )


def _transfers(plan: Plan) -> Iterator[str]:
    link = plan.graph.link
    if plan.offloaded and link is not None:
        yield (
            f"offloaded       {len(plan.offloaded)} storages, {format_bytes(plan.host_bytes)} on the host, by "
            f"{link.name} at {link.to_host_bytes_per_second / 1e9:.3g} GB/s there and "
            f"{link.to_device_bytes_per_second / 1e9:.3g} GB/s back; the device waits "
            f"{1e3 * plan.timeline.stall_seconds:.1f} ms for it"
        )


def _encodings(plan: Plan) -> Iterator[str]:
    if small := plan.small_forms:
        yield (
            f"lossless        {len(small)} saved storages, {_sum(small)}: "
            "ReLU masks and places in pooling windows, a byte each"
        )
    if encoded := plan.encoded:
        forms = {(r.codec, r.block_elems, r.seed) for r in plan.residences.values() if isinstance(r, Encode)}
        form = ", ".join(sorted(LossyOptions(*form).describe() for form in forms))
        yield (
            f"encoded         {len(encoded)} storages, {_sum(encoded)} in {format_bytes(plan.payload_bytes)}, {form}; "
            f"{1e3 * plan.codec_seconds:.1f} ms to encode and decode; {_errors(plan)}"
        )


def _stops(plan: Plan) -> Iterator[str]:
    if plan.stopped_early:
        yield f"stopped early   {', '.join(plan.stopped_early)}: by a time limit; planned again, the plan may differ"


def _errors(plan: Plan) -> str:
    if not plan.errors:
        return "error not measured"
    smallest, largest = min(plan.errors.values()), max(plan.errors.values())
    where = "in a step" if plan.errors_measured else "for normal numbers, until a step is run"
    return f"relative error {100 * smallest:.2g} to {100 * largest:.2g} % (measured {where})"


def _sum(storages: tuple[Storage, ...]) -> str:
    return format_bytes(sum(storage.nbytes for storage in storages))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"
