"""Networks × budgets: is each budget met, what does it cost, and what would PyTorch's own means cost at the same bytes?

    python -m bench.budgets                      every network and budget: hours on two cores
    python -m bench.budgets --quick              the same on tiny inputs, to see that it runs
    python -m bench.budgets --networks unet --budgets 40,33 --least

Budgets are shares of plain PyTorch's peak, measured here: forward, cross entropy and backward in channels_last float32,
no gradients at the start. Shoal's loss, gradients, batch norm statistics and random numbers are compared bit for bit
with plain PyTorch's before anything is timed (under the float64 rule where plain PyTorch does not repeat itself).

`activation_memory_budget` runs without Inductor, as Shoal does by default: its batch norms are decomposed and not fused
again, so its added time is higher than compiled code's would be. Its peaks are what its partitioner decides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from bench.conditions import file_name
from bench.frame import (
    CPU_TIME,
    NETWORKS,
    Bench,
    Run,
    bar,
    option,
    percentages,
    switch,
    use_exact_kernels,
)
from bench.network import SHARES, Measuring, Setting, measure_network
from bench.peers import ACTIVATION_MEMORY_BUDGET, CHECKPOINT, PEERS
from bench.plain import heading
from bench.tables import cells, new_table
from shoal.core.files import write_json

# Batches such that parameters and gradients are under 15 % of plain PyTorch's peak.
SETTINGS = {
    "mobilenet_v2": Setting(batch=16, image=224),
    "googlenet": Setting(batch=16, image=224),
    "unet3d": Setting(batch=2, image=64),
    "densenet121": Setting(batch=8, image=224, scout_batches=(2, 4)),
    "resnet50": Setting(batch=20, image=224, scout_batches=(2, 4)),
    "unet": Setting(batch=5, image=256, scout_batches=(1, 2)),
    "vgg16_bn": Setting(batch=68, image=224, scout_batches=(4, 8)),
}
CUDA_SETTINGS = {
    "resnet50": Setting(batch=128, image=224),
    "vgg16_bn": Setting(batch=128, image=224),
    "densenet121": Setting(batch=64, image=224),
}
QUICK_SETTINGS = {name: Setting(8, 96) for name in SETTINGS} | {"unet": Setting(2, 64), "unet3d": Setting(1, 32)}

SWEEP = 21  # values of activation_memory_budget from 0 to 1
QUICK_SWEEP = 2
QUICK_SHARES = (90.0, 75.0)  # parameters are a large part of so small a step


def sweep(count: int) -> tuple[float, ...]:
    """`count` values from 0 to 1, evenly spaced.

    >>> sweep(5)
    (0.0, 0.25, 0.5, 0.75, 1.0)
    """
    return tuple(round(step / max(count - 1, 1), 4) for step in range(count))


def _finished(path: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The result at `path`, where it was measured as is wanted now."""
    try:
        result = json.loads(path.read_text())
        same = all(result[key] == json.loads(json.dumps(value)) for key, value in wanted.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if same else None


_PEER_TITLES = {ACTIVATION_MEMORY_BUDGET: "activation_memory_budget", CHECKPOINT: "checkpointing"}
_PREDICTED_WITHIN = 2.0  # percent, the contract
_NOISE = 1.0  # percent of added time that two contenders may differ by and be called equal


def network_table(result: Mapping[str, Any]) -> Table:
    """One row for each budget of one network."""
    peers = [peer for peer in PEERS if any(peer in row for row in result["rows"])]
    exact = any("exact" in row for row in result["rows"])
    columns = "budget | <met | predicted | measured | off | added | bound | planned | MONeT"
    columns += " | <by default, computed | added" if exact else ""
    table = new_table(escape(heading(result)), " | ".join([columns, *map(_PEER_TITLES.__getitem__, peers), "<verdict"]))
    for row in result["rows"]:
        ours = row["shoal"]
        form = "{share:g} %, {budget_bytes:bytes} | {met} | {predicted} | {measured_peak_bytes:bytes} | "
        form += "{difference_percent:+.2f} % | {added_percent:+.1f} % | {lower_bound_percent:.1f} % | "
        form += "{planning_seconds:.1f} s"
        predicted = cells("{predicted_peak_bytes:bytes} | ≥ {least_feasible_bytes:bytes}", ours)
        shown = cells(form, {**row, **ours}, met=_met(ours), predicted=predicted[0] or predicted[1])
        shown.append("-" if row["monet_percent"] is None else f"{row['monet_percent']:+.1f} %")
        if exact:
            shown += [row["exact"].get("variant", _met(row["exact"])), *cells("{added_percent:+.1f} %", row["exact"])]
        shown += [_peer(row[peer]) if peer in row else "not run" for peer in peers]
        table.add_row(*map(escape, shown), verdict(row))
    return table


def verdict(row: Mapping[str, Any]) -> str:
    """Who is faster at the same bytes: Shoal or the better of the peers.

    >>> verdict({"shoal": {"met": True, "added_percent": 9.0}, "checkpoint": {"met": True, "added_percent": 30.0}})
    'faster'
    """
    ours = row["shoal"]
    theirs = [row[peer]["added_percent"] for peer in PEERS if peer in row and row[peer]["met"]]
    if not ours["met"]:
        return "lost" if theirs else "none fits"
    if not theirs:
        return "alone"
    gap = ours["added_percent"] - min(theirs)
    return "slower" if gap > _NOISE else "equal" if gap > -_NOISE else "faster"


def least_table(results: Iterable[Mapping[str, Any]]) -> Table:
    """The minimum feasible share of plain PyTorch's peak for each contender, and what it costs there."""
    table = new_table(
        "Minimum feasible share of plain PyTorch's peak, and the time added there",
        f"<network | shoal | {' | '.join(map(_PEER_TITLES.__getitem__, PEERS))}",
    )
    for result in results:
        found = result.get("least", {})
        cells = [
            f"{found[who]['share_percent']:.1f} %, {found[who]['added_percent']:+.0f} %" if who in found else "-"
            for who in ("shoal", *PEERS)
        ]
        table.add_row(result["network"], *cells)
    return table


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The totals over all rows."""
    rows = [row for result in results for row in result["rows"]]
    ours = [row["shoal"] for row in rows]
    ran = [row for row in ours if "measured_peak_bytes" in row]
    in_paper = [row for row in rows if row["monet_percent"] is not None and row["shoal"]["met"]]
    return {
        "budgets": len(rows),
        "met": sum(row["met"] for row in ours),
        "exceeded": sum(row["exceeded"] for row in ours),
        "predicted_within_2_percent": sum(abs(row["difference_percent"]) <= _PREDICTED_WITHIN for row in ran),
        "ran": len(ran),
        "slower_than_the_better_peer": sum(verdict(row) in ("slower", "lost") for row in rows),
        "at_or_under_monet": sum(row["shoal"]["added_percent"] <= row["monet_percent"] for row in in_paper),
        "compared_with_monet": len(in_paper),
    }


def summary_line(totals: Mapping[str, Any]) -> str:
    """The totals in a sentence."""
    return (
        f"{totals['met']} of {totals['budgets']} budgets met, {totals['exceeded']} exceeded; prediction within 2 % in "
        f"{totals['predicted_within_2_percent']} of {totals['ran']}; slower than the better peer at the same bytes in "
        f"{totals['slower_than_the_better_peer']}; at or under MONeT's overhead in {totals['at_or_under_monet']} of "
        f"{totals['compared_with_monet']}"
    )


def _met(ours: Mapping[str, Any]) -> str:
    return "yes" if ours["met"] else "EXCEEDED" if ours["exceeded"] else "infeasible"


def _peer(found: Mapping[str, Any]) -> str:
    return f"{found['added_percent']:+.1f} % ({found['setting']})" if found["met"] else "no setting fits"


def _run(run: Run) -> int:
    asked = run.asked
    settings = run.chosen(CUDA_SETTINGS if run.device.type == "cuda" else SETTINGS, QUICK_SETTINGS)
    settings = {name: one.resized(asked.batch, asked.image) for name, one in settings.items()}
    options = Measuring(
        shares=tuple(asked.budgets or run.pick(SHARES, QUICK_SHARES)),
        values=sweep(asked.sweep or run.pick(SWEEP, QUICK_SWEEP)),
        peers=not asked.no_peers,
        planner=asked.planner,
        repeats=asked.repeats or run.pick(None, 1),
        least=asked.least,
        cpu_time=asked.cpu_time,
        device=run.device.type,
        seed=asked.seed,
    )
    use_exact_kernels()
    results = []
    with bar(len(settings)) as show:
        for name, setting in settings.items():
            path = run.out / file_name(f"budgets-{name}", run.device)
            wanted = {"setting": asdict(setting), "options": asdict(options)}
            result = _finished(path, wanted) if asked.resume else None
            if result is None:
                result = measure_network(name, setting, options, partial(show, name))
                result["conditions"] = run.conditions
                write_json(path, result)
            results.append(result)
            run.say(network_table(result))
            run.say(*(f"{setting} failed: {reason}" for setting, reason in result["peers_failed"].items()))
            show(name, "done", 1)
    if asked.least:
        run.say(least_table(results))
    totals = summary(results)
    run.say(f"{summary_line(totals)}. Figures in {run.out}")
    return 1 if totals["exceeded"] else 0


main = Bench(
    _run,
    NETWORKS,
    option("--budgets", type=percentages, help="percent of plain PyTorch's peak, comma-separated"),
    switch("--resume", "skip networks whose file of today is there"),
    switch("--least", "go on to the minimum feasible peak of each contender"),
    option("--repeats", type=int, help="timed steps of each contender; by default 2 to 5"),
    switch("--no-peers", "plain PyTorch and Shoal only"),
    option("--sweep", type=int, help=f"values of activation_memory_budget; by default {SWEEP}"),
    option("--planner", default="joint", help="Shoal's planner"),
    option("--batch", type=int, help="images in the batch, of every network"),
    option("--image", type=int, help="pixels along each side, of every network"),
    CPU_TIME,
    quick="tiny inputs, one repeat: does it run?",
    device=True,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
