"""Random networks under every planner: does each train as plain PyTorch does, within its budget, or is it refused?

    python -m bench.fuzz --networks 200 --seed 3     200 networks, each under some of all settings
    python -m bench.fuzz --networks 10 --all         each under every planner, budget and residence
    python -m bench.fuzz --only 17 --seed 3          one network again

A network is drawn as data and written as source text (`bench.fuzz_networks`). It trains for four steps in plain
PyTorch, in Shoal and, where these differ, under `torch.compile(backend="aot_eager")`; outputs, losses, gradients,
buffers and the generator are compared bit for bit. What differs from plain PyTorch but not from `aot_eager` is
PyTorch's; what differs from both is ours if it is further from float64 than plain PyTorch. With `--allow bitwise` other
bits are ours, too; where `aot_eager` fails or draws other noise there, a difference that is no further from float64 is
said to be unclear. The peak is counted from the profiler's events and held against budget and prediction, and what
`BudgetError.least_feasible_bytes` names is typed back, and must train. Each finding comes with a script that shows it
by itself, shrunk for the first ones of its kind. Exit code 1 where a finding is ours.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.frame import Bench, Run, Show, bar, option, switch
from bench.fuzz_compare import CRASH, EAGER_ONLY, OURS, UNCLEAR, Setting, settings
from bench.fuzz_shrink import SHRINKING
from bench.processes import Ended, Worker
from shoal.errors import InputError

_MAX_ATTEMPTS = 20  # draws of a network before one that plain PyTorch can train
_STRIDE = 7  # of the rotation through the settings; no divisor of their number


@dataclass
class Found:
    """What came of all networks so far."""

    networks: int = 0
    redrawn: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    shrunk: Counter[str] = field(default_factory=Counter)


def rotating(number: int, count: int, allow: str = "exact") -> list[Setting]:
    """Settings of that network: over many networks each comes up equally often.

    >>> len({setting for number in range(10) for setting in rotating(number, 6)})
    60
    """
    every = settings(allow)
    return [every[(number * count + place) * _STRIDE % len(every)] for place in range(count)]


def _examine_all(asked: argparse.Namespace, numbers: Sequence[int], found: Found, out: Path) -> None:
    pool = ThreadPoolExecutor(asked.jobs)
    workers = _Workers()
    try:
        with bar(len(numbers)) as show:
            todo = iter(numbers)
            running: set[Future[tuple[int, dict[str, Any], int]]] = set()
            while True:
                while len(running) < asked.jobs and (number := next(todo, None)) is not None:
                    running.add(pool.submit(_examine, asked, number, dict(found.shrunk), workers))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    _take(found, *future.result(), out, show)
    finally:
        workers.stop()
        pool.shutdown(cancel_futures=True)


def _examine(
    asked: argparse.Namespace, number: int, shrunk: dict[str, int], workers: _Workers
) -> tuple[int, dict[str, Any], int]:
    """The first draw of that number that plain PyTorch can train; what came of it, and how many were no network."""
    chosen = settings(asked.allow) if asked.all else rotating(number, asked.settings, asked.allow)
    line = {"seed": asked.seed, "number": number, "settings": [astuple(one) for one in chosen]}
    limits = {"most_checks": asked.checks, "most_shrunk": asked.shrink, "shrunk": shrunk}
    for attempt in range(_MAX_ATTEMPTS):
        answer = workers.ask(line | limits | {"attempt": attempt}, asked.seconds)
        if answer.get("shrinking"):  # a simpler network ended the process: what it had found is found again
            answer = workers.ask(line | limits | {"attempt": attempt, "most_shrunk": 0}, asked.seconds)
        if "not_a_network" not in answer:
            return number, answer, attempt
    raise InputError(f"{_MAX_ATTEMPTS} networks drawn for number {number}, and plain PyTorch trains none of them")


def _take(found: Found, number: int, answer: dict[str, Any], redrawn: int, out: Path, show: Show) -> None:
    found.networks += 1
    found.redrawn += redrawn
    found.runs += answer["runs"]
    for place, finding in enumerate(answer["findings"]):
        found.shrunk[f"{finding['kind']}: {finding['what']}"] += 1
        text = finding.pop("script")
        finding["number"] = number
        finding["script"] = ""
        if text:
            path = out / f"{finding['kind'].replace(' ', '-')}_{number}_{place}.py"
            path.write_text(text)
            finding["script"] = str(path)
        found.findings.append(finding)
    show(f"network {number}", f"{sum(f['ours'] for f in found.findings)} findings are ours", 1)


def report(found: Found, console: Console) -> None:
    """What was run, and what was found, counted by kind."""
    runs = found.runs
    by_planner = Counter(run["setting"]["planner"] for run in runs)
    by_residence = Counter(run["setting"]["residence"] for run in runs)
    for title, counts in (("planner", by_planner), ("residence", by_residence)):
        console.print(f"trainings by {title}: " + ", ".join(f"{k} {n}" for k, n in counts.items()), highlight=False)
    table = Table(title=f"Findings in {found.networks} networks, {len(runs)} trainings under Shoal")
    for column in ("whose", "kind", "what", "networks", "times", "for example"):
        table.add_column(column, justify="right" if column in ("networks", "times") else "left", overflow="fold")
    kinds: dict[tuple[bool, str, str], list[dict[str, Any]]] = {}
    for finding in found.findings:
        kinds.setdefault((not finding["ours"], finding["kind"], finding["what"]), []).append(finding)
    for (_, kind, what), alike in sorted(kinds.items()):
        whose = "ours" if kind in OURS else "PyTorch's" if kind == EAGER_ONLY else "?" if kind == UNCLEAR else "-"
        example = f"{Path(alike[0]['script']).name or alike[0]['number']}"
        times = sum(one["count"] for one in alike)
        table.add_row(whose, kind, escape(what), str(len({f["number"] for f in alike})), str(times), example)
    console.print(table)
    over = [run["peak_bytes"] / run["predicted_bytes"] - 1 for run in runs]
    if over:
        console.print(
            f"{sum(f['ours'] for f in found.findings)} findings are ours. Counted peak over prediction: at most "
            f"{100 * max(over):+.2f} %, at least {100 * min(over):+.2f} %; over the budget at last in "
            f"{sum(run['peak_bytes'] > run['budget_bytes'] for run in runs)} of {len(runs)}; repaired "
            f"{sum(run['repairs'] > 0 for run in runs)}; {found.redrawn} draws were no network for plain PyTorch",
            highlight=False,
        )


class _Workers:
    """One process a thread, started again where it died."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._alive: list[Worker] = []

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What the process answers; where it dies, that is the finding."""
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is None or not worker.alive:
            worker = self._local.worker = Worker("bench.fuzz_shrink:Examiner", {**os.environ, "OMP_NUM_THREADS": "1"})
            self._alive.append(worker)
        try:
            return worker.ask(question, limit_seconds=seconds)
        except Ended as error:
            return _died(error.stage, error.code)

    def stop(self) -> None:
        for worker in self._alive:
            worker.close()


def _died(stage: str, code: int) -> dict[str, Any]:
    """The answer of a process that ended with `code` while it was about `stage`."""
    if stage.startswith(SHRINKING):
        return {"shrinking": stage}
    if stage in ("", "plain"):
        return {"not_a_network": f"plain PyTorch ended the process with {code}"}
    kind = EAGER_ONLY if stage == "aot_eager" else CRASH
    what = f"the process ended with {code}" if code != -9 else "it does not end"
    where = {"planner": stage, "budget": "", "residence": "", "allow": ""}
    one = {"kind": kind, "what": what, "details": f"in {stage}", "setting": where, "count": 1, "ours": kind in OURS}
    return {"findings": [one | {"script": ""}], "runs": []}


def _run(run: Run) -> int:
    asked, found = run.asked, Found()
    numbers = list(range(asked.networks)) if asked.only is None else [asked.only]
    try:
        _examine_all(asked, numbers, found, run.out)
    except KeyboardInterrupt:
        run.say(f"stopped after {found.networks} of {len(numbers)} networks")
    report(found, run.console)
    run.path = run.out / "fuzz.json"
    run.save(networks=found.networks, redrawn=found.redrawn, findings=found.findings, runs=found.runs)
    run.say(f"Scripts and figures in {run.out}")
    return int(any(finding["ours"] for finding in found.findings))


main = Bench(
    _run,
    option("--networks", type=int, default=200),
    option("--only", type=int, minimum=0, help="the number of one network, to run it alone"),
    option("--allow", default="exact", help="what Shoal may do; 'bitwise' for bits that must be plain PyTorch's"),
    option("--settings", type=int, default=6, help="planners, budgets and residences a network"),
    switch("--all", "every planner, budget and residence for each network"),
    option("--shrink", type=int, default=3, minimum=0, help="findings of a kind whose networks are shrunk; 0: none"),
    option("--checks", type=int, default=60, help="simpler networks tried for each"),
    option("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at once"),
    option("--seconds", type=float, default=900, help="a network that takes longer is a finding"),
    quick=None,
    seed=True,
    out="runs/fuzz",
)

if __name__ == "__main__":
    sys.exit(main())
