"""Trainers that others wrote, and kinds of steps that scripts have, inside a budget and beside plain PyTorch.

    make build-hosts                        once: the trainers, pinned, in .venv-hosts
    python -m bench.hosts                   every trainer, then every kind of `bench.steps` at 70 %
    python -m bench.hosts --quick           Accelerate, and three kinds
    python -m bench.hosts --hosts lightning,timm

The trainers' rows come from `tests/hosts`, which runs the lines of `docs/hosts` for two epochs, with and without those
that name Shoal: parameters and buffers have to be equal to rounding, and bytes are counted by PyTorch's memory events
around the trainer's own steps. A first step is given as what it takes beyond plain PyTorch's. These networks are small:
what a step takes is mostly what the trainer does around it. A trainer that is not installed is said.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import steps
from bench.frame import CPU_TIME, Bench, Run, Unavailable, WrongResult, option
from bench.tables import cells, new_table
from tests.hosts.laws import ROWS

_ROOT = Path(__file__).parents[1]
_PYTHON = _ROOT / ".venv-hosts" / "bin" / "python"
HOSTS = sorted(path.stem.removeprefix("test_") for path in (_ROOT / "tests" / "hosts").glob("test_*.py"))
QUICK_HOSTS = ["accelerate"]
COLUMNS = "<trainer or kind|graphs|budget|of plain %|largest peak|of the budget %|<result|first step s|steps/s|plain"
FORMATS = (
    "{name}|{graphs}|{budget_bytes:bytes}|{share:.0f}|{peak_bytes:bytes}|{of_budget_percent:.1f}|{result}"
    "|{first_seconds:.1f}|{steps_a_second:.1f}|{plain_steps_a_second:.1f}"
)
_SHARE = 70.0
_SAME = ("graphs", "budget_bytes", "plain_peak_bytes", "peak_bytes", "first_seconds", "step_seconds", "plain_seconds")


def measure_all(run: Run) -> None:
    """Print a row for each trainer and each kind, and save them."""
    hosts = run.asked.hosts or run.pick(HOSTS, QUICK_HOSTS)
    kinds = [] if run.asked.hosts else run.pick(steps.KINDS, steps.QUICK_KINDS)
    rows: list[dict[str, Any]] = []
    for host in hosts:
        run.say(f"{host} ...")
        rows += _of_host(run, host)
        run.save(rows=rows)
    for kind in kinds:
        run.say(f"{kind} ...")
        rows += _of_kind(run, kind)
        run.save(rows=rows)
    table = new_table("Trainers and kinds of steps", COLUMNS)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.reject_nothing(rows)
    run.say(table)
    for row in rows:
        if row["refused"]:
            run.say(f"{row['name']}: {row['refused']}")
    wrong = [row["name"] for row in rows if row["wrong"]]
    if wrong:
        raise WrongResult(f"{', '.join(wrong)}: not as plain PyTorch trains, or over the budget")


def _of_host(run: Run, host: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        command = [str(_PYTHON if _PYTHON.exists() else sys.executable), "-m", "pytest", "-q", "-rs", "-p"]
        command += ["no:cacheprovider", f"tests/hosts/test_{host}.py", "-k", "inside_the_budget or likewise"]
        done = subprocess.run(
            command, cwd=_ROOT, env={**os.environ, ROWS: str(file)}, capture_output=True, text=True, check=False
        )
        lines = file.read_text().splitlines() if file.exists() else []
    if not lines:
        last = next((line for line in reversed(done.stdout.splitlines()) if "SKIPPED" in line), done.stdout[-300:])
        if done.returncode not in (0, 5):
            raise WrongResult(f"{host}: {last}")
        run.skip(host, last)
    for line in lines:
        found = json.loads(line)
        test, _, case = found["test"].rpartition("::")[2].partition("[")
        detail = case.removesuffix("]") or test.removeprefix("test_").partition("_trains")[0].replace("_", " ")
        over = found["peak_bytes"] > found["budget_bytes"]
        yield _row(
            name=host if detail == "it" else f"{host}, {detail}",
            **{key: found[key] for key in _SAME},
            result="equal" if not found["unequal"] else f"{len(found['unequal'])} tensors differ",
            wrong=bool(found["unequal"]) or over,
        )
    if done.returncode not in (0, 5) and lines:
        run.say(done.stdout[-2000:])
        raise WrongResult(f"{host}: its tests failed, see above")


def _of_kind(run: Run, kind: str) -> Iterator[dict[str, Any]]:
    try:
        for found in steps.measured(run, kind, steps.KINDS[kind], [_SHARE]):
            over = bool(found["of_budget_percent"] and found["of_budget_percent"] > 100)
            yield _row(
                name=kind,
                **{key: found[key] for key in (*_SAME, "result", "refused")},
                wrong=found["wrong"] or over,
            )
    except Unavailable as reason:
        run.skip(kind, reason)


def _row(**figures: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"refused": "", "steps_a_second": None, "plain_steps_a_second": None, **figures}
    row["share"] = 100 * row["budget_bytes"] / row["plain_peak_bytes"]
    row["of_budget_percent"] = 100 * row["peak_bytes"] / row["budget_bytes"] if row["peak_bytes"] else None
    for of, seconds in (("steps_a_second", "step_seconds"), ("plain_steps_a_second", "plain_seconds")):
        row[of] = 1 / statistics.median(row[seconds]) if row[seconds] else None
    return row


main = Bench(
    measure_all,
    option("--hosts", known=HOSTS, default=None, help="comma-separated; by default all, and the kinds of steps"),
    CPU_TIME,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
