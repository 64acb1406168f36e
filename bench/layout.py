"""Static addresses: how much larger than the most bytes in use is the arena, and are MiniMalloc's problems solved?

    python -m bench.layout               minutes on two cores
    python -m bench.layout --quick       small inputs, and five seconds for each search

The steps are those of `bench.budgets` at its batches, all kept and at half the bytes of that, planned for a P100;
nothing of them is run. Every layout is checked pair by pair before its row is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import shoal
from bench.budgets import QUICK_SETTINGS, SETTINGS
from bench.frame import NETWORKS, Bench, Run
from bench.layout_step_blocks import step_blocks
from bench.network import Setting
from bench.tables import new_table
from examples import networks as models
from examples.data import data_dir
from examples.minimalloc import first_fit, read_problem, smallest
from shoal.core.sizes import format_bytes
from shoal.errors import BudgetError
from shoal.lowlevel import native
from shoal.memory.layout.problem import Problem, check_layout
from shoal.memory.layout.search import Answer, best_fit, search

HARDWARE = "p100-nvlink"
TARGET = 1.02  # arena over the most bytes in use, for every step
MINIMALLOC_BYTES = 1048576
MINIMALLOC_SECONDS = 60.0
STEP_SECONDS = 20.0
QUICK_SECONDS = 5.0


def _steps(settings: Mapping[str, Setting]) -> Iterator[tuple[str, Problem]]:
    for name, setting in settings.items():
        with torch.device("meta"):
            model = models.build(name)
            images = torch.empty(models.example_shape(name, setting.batch, setting.image))
        plain = shoal.plan(model, images, hardware=HARDWARE, name=name)
        yield f"{name}, all kept", step_blocks(plain.graph, plain.residences)
        try:
            half_bytes = plain.predicted_peak_bytes // 2
            half = shoal.plan(model, images, half_bytes, hardware=HARDWARE, allow="bitwise", name=name)
        except BudgetError:
            continue
        yield f"{name}, half the bytes", step_blocks(half.graph, half.residences)


def _step_row(name: str, problem: Problem, seconds: float) -> dict[str, Any]:
    return _row(name, problem, lambda: smallest(problem, time_limit_seconds=seconds))


def _given_row(path: Path, seconds: float) -> dict[str, Any]:
    problem = read_problem(path)
    row = _row(path.name, problem, lambda: search(problem, MINIMALLOC_BYTES, time_limit_seconds=seconds))
    arena_bytes = row["search"]["arena_bytes"]
    assert arena_bytes is None or arena_bytes <= MINIMALLOC_BYTES
    return row


def _row(name: str, problem: Problem, look: Callable[[], Answer]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "blocks": len(problem.blocks), "most_bytes": problem.highest_live_bytes}
    for method, lay_out in (("first_fit", first_fit), ("best_fit", best_fit), ("search", lambda _: look())):
        started = time.perf_counter()
        made = lay_out(problem)
        seconds = time.perf_counter() - started
        layout = made.layout if isinstance(made, Answer) else made
        if layout is not None:
            check_layout(layout)
        row[method] = {
            "arena_bytes": layout and layout.arena_bytes,
            "fragmentation": layout and layout.fragmentation,
            "seconds": seconds,
        }
    return row


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = new_table(
        title, "<step | blocks | most in use | first fit | best fit | search | best fit took | search took"
    )
    for row in rows:
        methods = ("first_fit", "best_fit", "search")
        shares = (row[method]["fragmentation"] for method in methods)
        table.add_row(
            row["name"],
            f"{row['blocks']}",
            format_bytes(row["most_bytes"]),
            *("none" if share is None else f"{share:.3f}" for share in shares),
            *(f"{row[method]['seconds']:.2f} s" for method in methods[1:]),
        )
    return table


def _run(run: Run) -> None:
    run.say("native search" if native.library() else "search in Python: the native library is not built")
    seconds = run.pick(STEP_SECONDS, QUICK_SECONDS)
    steps = _steps(run.chosen(SETTINGS, QUICK_SETTINGS))
    rows = [_step_row(name, problem, seconds) for name, problem in steps]
    run.say(_table("Training steps", rows))
    seconds = run.pick(MINIMALLOC_SECONDS, QUICK_SECONDS)
    given = sorted((data_dir() / "minimalloc").glob(f"*.{MINIMALLOC_BYTES}.csv"))
    solved = [_given_row(path, seconds) for path in given]
    if solved:
        run.say(_table(f"MiniMalloc's problems within {MINIMALLOC_BYTES} bytes", solved))
    else:
        run.say(f"MiniMalloc's problems are not in {data_dir()}; set SHOAL_DATA")
    run.save(steps=rows, minimalloc=solved)
    tight = sum(row["search"]["fragmentation"] <= TARGET for row in rows)
    within = sum(row["search"]["arena_bytes"] is not None for row in solved)
    run.say(
        f"{tight} of {len(rows)} steps within {TARGET:.2f} of the most bytes in use; "
        f"{within} of {len(solved)} of MiniMalloc's problems solved"
    )


main = Bench(_run, NETWORKS, quick="small inputs and short searches: does it run?")

if __name__ == "__main__":
    sys.exit(main())
