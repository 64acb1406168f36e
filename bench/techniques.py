"""What each technique makes possible, and what they do together: predicted steps of one network for a P100.

    python -m bench.techniques           four sets of techniques inside ten budgets; some minutes of one core
    python -m bench.techniques --quick   two budgets

Nothing runs: the network is planned on the meta device at the peak rates of the GPU. It has eight convolutions, each
with a batch norm and a ReLU, whose maps get smaller. Every plan is held against its budget, and a set of techniques
against those that it includes: it is no slower, as tests/engine/search/test_budget_laws.py has it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

import shoal
from bench.frame import Bench, Run, WrongResult
from bench.tables import cells, new_table
from shoal.engine.search.search_state import GOOD_ENOUGH, WORTH_A_PLAN
from shoal.errors import BudgetError
from shoal.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Chart

HARDWARE = "p100-nvlink"
BATCH, PIXELS = 8, 48
SHARES = (100, 90, 80, 70, 60, 50, 45, 40, 35, 30)
# How each is drawn: points that coincide are rings.
SETS = {
    "recompute": ("whole", 10.0, "recompute, order"),
    "fuse": ("fused", 10.0, "recompute, order, fuse"),
    "exact_split": ("patches", 6.5, "recompute, order, exact_split"),
    "both": ("peer", 4.0, "recompute, order, fuse, exact_split"),
}
COLUMNS = "<techniques|share %|budget|step us|added %|<variant"
FORMATS = "{techniques}|{share:.0f}|{budget_bytes:bytes}|{us:.0f}|{added_percent:+.0f}|{variant}"
_SLACK = GOOD_ENOUGH + WORTH_A_PLAN


def network() -> nn.Module:
    """Eight convolutions on maps that get smaller."""

    def block(given: int, made: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU()]

    shapes = [(3, 16, 1), (16, 16, 1), (16, 16, 2), (16, 32, 1), (32, 32, 1), (32, 32, 2), (32, 32, 1), (32, 32, 1)]
    blocks = chain.from_iterable(block(*shape) for shape in shapes)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


def _plan(budget_bytes: int | None, allow: str | None) -> shoal.Plan:
    with torch.device("meta"):
        model, x = network(), torch.empty(BATCH, 3, PIXELS, PIXELS)
    return shoal.plan(model, x, budget_bytes, hardware=HARDWARE, offload_to=None, allow=allow)


def _planned(techniques: str, share: float, budget_bytes: int, plain_seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"techniques": techniques, "share": share, "budget_bytes": budget_bytes}
    try:
        plan = _plan(budget_bytes, SETS[techniques][-1])
    except BudgetError:
        return {**row, "variant": "does not fit"}
    if plan.predicted_peak_bytes > budget_bytes:
        raise WrongResult(f"{techniques} at {share:g} %: {plan.predicted_peak_bytes} of {budget_bytes} bytes")
    seconds = plan.predicted_seconds
    return {
        **row,
        "us": 1e6 * seconds,
        "added_percent": 100 * (seconds / plain_seconds - 1),
        "variant": str(plan.variant),
    }


def _check(rows: list[dict[str, Any]], plain_us: float) -> None:
    found = {(row["techniques"], row["share"]): row.get("us", float("inf")) for row in rows}
    for (techniques, share), us in found.items():
        together = found["both", share]
        if together > us + _SLACK * max(plain_us, us):
            raise WrongResult(f"at {share:g} %: {together:.0f} us with all techniques, {us:.0f} with {techniques}")


def chart(result: Mapping[str, Any]) -> str:
    """Step time against budget, a line for each set of techniques."""
    rows, plain_us = result["rows"], result["plain_us"]
    drawn = Chart(
        "What techniques do inside a budget, by themselves and together",
        f"eight convolutions with batch norms, {BATCH} x {PIXELS} x {PIXELS}, predicted for {HARDWARE}",
    )
    for techniques, (kind, _, _) in SETS.items():
        drawn.key(kind, techniques)
    drawn.key("plain", "plain PyTorch")
    most = max(row["us"] for row in rows if "us" in row)
    drawn.axes(
        Axis(min(row["share"] for row in rows), 100.0, LEFT, WIDTH - RIGHT, (("%", 1.0),), "{:.0f} %"),
        Axis(0.0, most / plain_us, HEIGHT - BOTTOM, TOP, (("x", 1.0),), "{:.1f}"),
        "budget, of plain PyTorch's peak",
        "step",
    )
    for techniques, (kind, radius, _) in SETS.items():
        points = [
            (row["share"], row["us"] / plain_us) for row in rows if row["techniques"] == techniques and "us" in row
        ]
        drawn.line("bound", points)
        for share, times in points:
            words = f"{techniques}: {times:.2f} of plain PyTorch's step inside {share:g} %"
            drawn.point(kind, share, times, words, radius=radius)
    drawn.point("plain", 100.0, 1.0, "plain PyTorch")
    return drawn.svg()


def measure_all(run: Run) -> None:
    """Print a row for each set and budget, and save them."""
    plain = _plan(None, None)
    plain_bytes, plain_seconds = plain.plain_peak_bytes, plain.plain_timeline.seconds
    rows = []
    for share in run.pick(SHARES, (100, 50)):
        rows += [_planned(name, share, plain_bytes * share // 100, plain_seconds) for name in SETS]
        run.save(rows=rows, plain_us=1e6 * plain_seconds, plain_peak_bytes=plain_bytes)
    _check(rows, 1e6 * plain_seconds)
    table = new_table(f"Predicted for {HARDWARE}; plain PyTorch's step takes {1e6 * plain_seconds:.0f} us", COLUMNS)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.say(table)


main = Bench(measure_all)

if __name__ == "__main__":
    sys.exit(main())
