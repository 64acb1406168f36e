"""Networks for volumes x budgets: is each met, what does it cost, what is the least, and which patch fits a GPU?

    python -m bench.volumes                                      every network, both precisions: hours on two cores
    python -m bench.volumes --quick --networks SegResNet         one budget, to see that it runs
    python -m bench.volumes --networks UNet,DynUNet --parts measured --precisions float32 --shares 53,25
    python -m bench.volumes --parts planned,patch --hardware rtx-4090-24gb
    python -m bench.volumes --parts added --shares 50 --precisions float32 --resume

UNet, DynUNet, SegResNet, AttentionUnet, VNet and SwinUNETR are MONAI's (here 1.6.1), PlainConvUNet and
ResidualEncoderUNet those of dynamic-network-architectures (here 0.4.4); what does not import is skipped. DynUNet and
the last two have deep supervision.

measured: small networks on this machine, budgets in percent of plain PyTorch's measured peak (forward, cross entropy at
each scale, backward; contiguous tensors, the target beside), with allow="exact". A step of each is held against plain
PyTorch's and float64 before it is timed, in turns with plain PyTorch, checkpointing by block (MONAI's way) and
`activation_memory_budget`, each at its fastest setting whose measured peak fits; "step off" is how far the predicted
step is from the median of Shoal's measured ones. slabs: two networks likewise, by the means that leave slabs of depth
as the way into tight budgets. planned: the least share of networks as large as their users train, on patches of 96 or
128, for a GPU that is not here. added: what budgets add to plain PyTorch's step there, by default one of 50 %. flat:
the least share of the same network in two dimensions, on about as many pixels. patch: the largest that fits that GPU's
memory, for plain PyTorch and, among cubes, for Shoal.

Each network has a file of its own; with --resume its other parts are kept, each with its own date: of the newest file
of the network in the folder, which may be of an earlier day and is then to be deleted.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from bench.conditions import file_name
from bench.frame import CPU_TIME, NETWORKS, Bench, Run, Unavailable, bar, option, percentages, some_of, switch
from bench.interleave import Clock
from bench.network import refusal_columns, shoal_columns
from bench.ours import Ours, Unsettled, run_within
from bench.peers import ACTIVATION_MEMORY_BUDGET, CHECKPOINT, PEERS, Confirmed, candidates, fastest_within, scout
from bench.plain import Plain
from bench.tables import cells, new_table
from bench.volumes_catalogue import CATALOGUE, Entry
from bench.volumes_planned import added_rows, largest_patch, least_share
from bench.volumes_step import FLOAT32, PRECISIONS, checkpointed, make_step
from shoal.core.files import write_json
from shoal.core.sizes import format_bytes
from shoal.errors import BudgetError

SHARES = (66.0, 53.0, 40.0, 33.0, 25.0)
QUICK_SHARES = (70.0,)
ADDED_SHARES = (50.0,)
PARTS = ("measured", "slabs", "planned", "added", "flat", "patch")
VALUES = (0.2, 0.6)  # of activation_memory_budget
HARDWARE = "rtx-4090-24gb"
SLABS = "recompute, order, exact_split"
_BY_PRECISION = ("measured", "planned", "added")
_PREDICTED_WITHIN = 2.0  # percent of the peak


def measure(
    name: str,
    entry: Entry,
    precision: str,
    shares: Sequence[float],
    values: Sequence[float],
    repeats: int,
    seed: int,
    advance: Callable[[str], None] = lambda what: None,
    clock: Clock = time.perf_counter,
    allow: str = "exact",
) -> dict[str, Any]:
    """One network in one precision, against its budgets and its peers, as plain values.

    Raises:
        Unavailable: its library does not import.
        WrongResult: a step inside a budget computes another function.
    """
    advance("plain PyTorch")
    step = make_step(name, entry.here, precision, seed)
    plain = Plain(step)
    runs: dict[float, Ours | BudgetError | Unsettled] = {}
    for share in shares:
        advance(f"Shoal inside {share:g} %")
        try:
            runs[share] = run_within(
                plain, plain.budget_bytes(share), check=plain.reference.check_function, allow=allow
            )
        except (BudgetError, Unsettled) as error:
            runs[share] = error
    budgets = {share: plain.budget_bytes(share) for share in shares}
    peers = candidates(step, values, checkpointed(entry, step))
    scouted, failed = scout(peers, step, most_bytes=max(budgets.values()), advance=advance, clock=clock)
    confirmed = Confirmed(step, advance)
    chosen = {
        (peer, share): fastest_within(
            [one for one in scouted if one.candidate.peer == peer], budgets[share], confirmed.peak_bytes
        )
        for peer in PEERS
        for share in shares
    }
    forwards: dict[Any, Any] = {share: run.forward for share, run in runs.items() if isinstance(run, Ours)}
    forwards |= {one.candidate: one.candidate.forward for one in chosen.values() if one is not None}
    advance(f"timing {1 + len(forwards)} contenders in turns")
    times = plain.in_turns(forwards, repeats, clock=clock)
    rows = []
    for share, run in runs.items():
        row: dict[str, Any] = {"share": share, "budget_bytes": budgets[share]}
        if isinstance(run, Ours):
            row["shoal"] = {**shoal_columns(run, budgets[share]), **times.columns(share)}
            row["shoal"]["variant"] = str(run.plan.variant)
            step_off = run.plan.predicted_seconds / statistics.median(row["shoal"]["seconds"]) - 1
            row["shoal"]["step_off_percent"] = 100 * step_off
        else:
            row["shoal"] = refusal_columns(run)
        for peer in PEERS if values else (CHECKPOINT,):
            one = chosen[peer, share]
            row[peer] = {"met": False}
            if one is not None:
                measured = {"setting": one.candidate.setting, "measured_peak_bytes": confirmed.peak_bytes(one)}
                row[peer] = {"met": True, **measured, **times.columns(one.candidate)}
        rows.append(row)
    del runs, forwards, scouted, chosen, confirmed
    torch._dynamo.reset()
    gc.collect()
    return {
        "side": entry.here.side,
        "batch": entry.here.batch,
        "plain": plain.columns(times),
        "rows": rows,
        "peers_failed": failed,
    }


def measured_table(name: str, precision: str, found: Mapping[str, Any], when: str = "") -> Table:
    """One row for each budget."""
    title = "{name}, {precision}, {batch} x {side}^3: plain PyTorch {plain[peak_bytes]:bytes}, {plain[seconds]:ms} ms; "
    title += "parameters and gradients {plain[parameters_and_gradients_percent]:.1f} %"
    table = new_table(
        escape(cells(title.replace("|", ""), found, name=name, precision=precision)[0]) + when,
        "budget | <met | predicted | measured | off | added | step off | planned for | <computed | <gradients | "
        "checkpointing | activation_memory_budget",
    )
    for row in found["rows"]:
        ours = row["shoal"]
        shown = [*cells("{share:g} %, {budget_bytes:bytes}", row), met(ours)]
        form = "{predicted_peak_bytes:bytes} | {measured_peak_bytes:bytes} | {difference_percent:+.2f} % | "
        form += "{added_percent:+.1f} % | {step_off_percent:+.0f} % | {planning_seconds:.0f} s | {variant} | "
        form += "{exactness}"
        shown += cells(form, ours)
        shown[2] = shown[2] or cells("≥ {least_feasible_bytes:bytes}", ours)[0]
        shown += [_peer(row.get(CHECKPOINT)), _peer(row.get(ACTIVATION_MEMORY_BUDGET))]
        table.add_row(*map(escape, shown))
    return table


def least_table(name: str, precision: str, found: Mapping[str, Any], when: str = "") -> Table:
    """The least share of a step that is planned for a GPU."""
    table = new_table(
        f"{name}, planned for a GPU that is not here: the least share{when}",
        "<precision | batch x patch | <hardware | plain PyTorch | parameters, gradients | least",
    )
    form = "{batch} x {side}^3 | {hardware} | {plain_peak_bytes:bytes} | {parameters_and_gradients_percent:.1f} % | "
    table.add_row(precision, *cells(form + "{least_percent:.1f} %", found))
    return table


def added_table(name: str, precision: str, found: Mapping[str, Any], when: str = "") -> Table:
    """One row for each budget of a step that is planned for a GPU: the time that it adds to plain PyTorch's step."""
    title = "{name}, {precision}, {batch} x {side}^3, planned for {hardware}: time added to plain PyTorch's "
    title += "{plain_seconds:ms} ms and {plain_peak_bytes:bytes}"
    table = new_table(
        escape(cells(title.replace("|", ""), found, name=name, precision=precision)[0]) + when,
        "budget | predicted peak | in host memory | added | no plan of its form adds less than | <computed",
    )
    for row in found["rows"]:
        form = "{predicted_peak_bytes:bytes} | {host_bytes:bytes} | {predicted_added_percent:+.1f} % | "
        form += "{lower_bound_percent:+.1f} % | {variant}"
        shown = cells(form, row) if row["fits"] else ["does not fit", *[""] * 4]
        table.add_row(*map(escape, [*cells("{share:g} %, {budget_bytes:bytes}", row), *shown]))
    return table


def flat_table(name: str, found: Mapping[str, Any], when: str = "") -> Table:
    """The least share in two dimensions."""
    table = new_table(
        f"{name} in two dimensions, planned for a GPU that is not here: the least share{when}",
        "batch x patch | <hardware | plain PyTorch | parameters, gradients | least",
    )
    form = "{batch} x {side}^2 | {hardware} | {plain_peak_bytes:bytes} | {parameters_and_gradients_percent:.1f} % | "
    table.add_row(*cells(form + "{least_percent:.1f} %", found))
    return table


def patch_table(name: str, found: Mapping[str, Any], when: str = "") -> Table:
    """The largest patches of plain PyTorch and of Shoal."""
    memory = format_bytes(found["budget_bytes"])
    table = new_table(
        f"{name}, the largest patch inside {memory}, batch {found['batch']}, float32, {found['hardware']}{when}",
        "<who | patch | predicted peak | with everything kept | step | of its voxels",
    )
    for who, ratio in (("plain", 1.0), ("shoal", found["volumes"])):
        one = found[who]
        patch = " x ".join(map(str, one["patch"]))
        form = "{predicted_peak_bytes:bytes} | {plain_peak_bytes:bytes} | {predicted_seconds:.2f} s"
        table.add_row({"plain": "plain PyTorch", "shoal": "Shoal"}[who], patch, *cells(form, one), f"{ratio:.2f} times")
    return table


def tables(result: Mapping[str, Any]) -> list[Table]:
    """All of one network's."""
    name, conditions = result["network"], result["conditions"]
    made = [
        measured_table(name, precision, found, _when(found, conditions))
        for precision, found in result.get("measured", {}).items()
    ]
    for part, table in (("planned", least_table), ("added", added_table)):
        made += [
            table(name, precision, found, _when(found, conditions)) for precision, found in result.get(part, {}).items()
        ]
    slabs, flat, patch = (result.get(part) for part in ("slabs", "flat", "patch"))
    made += [measured_table(name, f'{FLOAT32} with "{SLABS}"', slabs, _when(slabs, conditions))] if slabs else []
    made += [flat_table(name, flat, _when(flat, conditions))] if flat else []
    return made + ([patch_table(name, patch, _when(patch, conditions))] if patch else [])


def _when(part: Mapping[str, Any], newest: Mapping[str, Any]) -> str:
    """What the title of a table says where its part is older than the file's newest."""
    own = part.get("conditions", newest)
    if own["code"] == newest["code"] and own["date"][:10] == newest["date"][:10]:
        return ""
    changed = [name for name, digest in newest["code"].items() if own["code"].get(name) != digest]
    since = f", before {', '.join(changed)} changed" if changed else ""
    return f" ({own['date'][:10]}{since})"


def met(ours: Mapping[str, Any]) -> str:
    """Whether a budget was."""
    return "yes" if ours["met"] else "EXCEEDED" if ours["exceeded"] else "refused"


def _peer(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    return f"{found['added_percent']:+.1f} % ({found['setting']})" if found["met"] else "no setting fits"


def summary(results: Collection[Mapping[str, Any]]) -> dict[str, int]:
    """The totals over all measured rows."""
    ours = [
        row["shoal"]
        for result in results
        for found in (*result.get("measured", {}).values(), *([result["slabs"]] if "slabs" in result else []))
        for row in found["rows"]
    ]
    ran = [row for row in ours if "measured_peak_bytes" in row]
    return {
        "budgets": len(ours),
        "met": sum(row["met"] for row in ours),
        "exceeded": sum(row["exceeded"] for row in ours),
        "ran": len(ran),
        "within_2_percent": sum(abs(row["difference_percent"]) <= _PREDICTED_WITHIN for row in ran),
    }


def _earlier(path: Path) -> dict[str, Any]:
    """The parts of the newest file of a network, each with the conditions that it was measured under."""
    kept = sorted(path.parent.glob(f"{path.stem[:-10]}*.json"))  # without the date
    try:
        found: dict[str, Any] = json.loads(kept[-1].read_text())
    except (OSError, ValueError, IndexError):
        return {}
    parts = [one for name in _BY_PRECISION for one in found.get(name, {}).values()]
    for part in (*parts, *(found[name] for name in ("slabs", "flat", "patch") if name in found)):
        part.setdefault("conditions", found["conditions"])
    return found


def _run(run: Run) -> int:
    asked = run.asked
    names = some_of("--networks", asked.networks or list(CATALOGUE), CATALOGUE)
    parts = asked.parts or run.pick(PARTS, ("measured",))
    precisions = asked.precisions or run.pick(PRECISIONS, PRECISIONS[:1])
    shares = asked.shares or run.pick(SHARES, QUICK_SHARES)
    values = () if asked.no_compiled_peer else VALUES
    results = []
    with bar(len(names)) as show:
        for name in names:
            entry, advance = CATALOGUE[name], partial(show, name)
            path = run.out / file_name(f"volumes-{name}", run.device)
            result = _earlier(path) if asked.resume else {}
            result |= {"network": name, "library": entry.library, "conditions": run.conditions}
            try:
                for precision in precisions if "measured" in parts else ():
                    repeats = asked.repeats or run.pick(3, 1)
                    found = measure(name, entry, precision, shares, values, repeats, asked.seed, advance, run.clock)
                    result.setdefault("measured", {})[precision] = {**found, "conditions": run.conditions}
                    write_json(path, result)
                if "slabs" in parts and entry.slabbed is not None:
                    slabbed, repeats = replace(entry, here=entry.slabbed), asked.repeats or run.pick(3, 1)
                    found = measure(
                        name, slabbed, FLOAT32, shares, values, repeats, asked.seed, advance, run.clock, SLABS
                    )
                    result["slabs"] = {**found, "conditions": run.conditions}
                    write_json(path, result)
                how = (asked.hardware, asked.allow, asked.seed, advance)
                for precision in precisions if "planned" in parts else ():
                    found = least_share(entry, precision, *how)
                    result.setdefault("planned", {})[precision] = {**found, "conditions": run.conditions}
                    write_json(path, result)
                for precision in precisions if "added" in parts else ():
                    found = added_rows(entry, precision, asked.shares or ADDED_SHARES, *how)
                    result.setdefault("added", {})[precision] = {**found, "conditions": run.conditions}
                    write_json(path, result)
                if "flat" in parts and entry.flat is not None:
                    found = least_share(replace(entry, planned=entry.flat), FLOAT32, *how)
                    result["flat"] = {**found, "conditions": run.conditions}
                    write_json(path, result)
                if "patch" in parts:
                    known = [one["least_percent"] for one in result.get("planned", {}).values()][:1]
                    found = largest_patch(entry, asked.hardware, asked.allow, asked.seed, *known, advance=advance)
                    result["patch"] = {**found, "conditions": run.conditions}
                    write_json(path, result)
            except Unavailable as error:
                run.skip(name, error)
                continue
            results.append(result)
            run.say(*tables(result))
            show(name, "done", 1)
    run.reject_nothing(results)
    totals = summary(results)
    run.say(
        "{met} of {budgets} budgets met, {exceeded} exceeded, the others refused; of {ran} that ran the peak is "
        "predicted within 2 % in {within_2_percent}".format_map(totals)
        + f". Figures in {run.out}"
    )
    return int(totals["exceeded"] > 0)


main = Bench(
    _run,
    NETWORKS,
    option("--parts", known=PARTS),
    option("--precisions", known=PRECISIONS),
    option("--shares", type=percentages, help="budgets in percent of plain PyTorch's peak, comma-separated"),
    option("--hardware", default=HARDWARE, help="the preset of what is planned"),
    option("--allow", default="exact", help="what plans for it may use; by default exact, with host memory"),
    option("--repeats", type=int, help="timed steps of each contender; by default 3"),
    switch("--no-compiled-peer", "leave activation_memory_budget out"),
    switch("--resume", "keep the other parts of the network's newest file"),
    CPU_TIME,
    quick="one budget in float32, one repeat: does it run?",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
