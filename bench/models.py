"""Forty models that nobody here wrote: does each train inside a budget, and as plain PyTorch does?

    python -m bench.models                        all of them at 60 and 40 % of plain PyTorch's peak
    python -m bench.models --quick                three of them at 60 %
    python -m bench.models --networks bert,swin_tiny_patch4_window7_224 --shares 50

The peak is that of a training step: parameters, buffers, gradients, the batch and all else that is allocated, counted
by PyTorch's memory events around whole steps. Each model has a process of its own. Gradients are held against plain
PyTorch's at the same numbers: equal bit for bit, or the largest difference in units of the tensor's largest value.
Where a budget is refused with a least, the same step is tried at that least. Models whose library is missing are
skipped; exit code 3 if none is left. Step times are CPU time of one thread.
"""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import nn

import shoal
from bench.conditions import CPU_ALLOCATOR
from bench.frame import Bench, Run, Unavailable, WrongResult, option, percentages
from bench.models_catalogue import CATALOGUE, Step
from bench.processes import Ended, Stage, Worker, malloc_environment
from bench.tables import cells, new_table
from shoal.errors import BudgetError, InputError, ShoalError
from shoal.lowlevel import allocations
from shoal.memory.cpu_allocator import TORCH
from shoal.memory.storage_bytes import distinct_bytes

COLUMNS = (
    "<model|plain|share %|budget|<result|of the budget %|least|<at the least|<gradients|graphs|given up|first step s"
    "|added %|predicted %"
)
FORMATS = (
    "{model}|{plain_peak_bytes:bytes}|{share:.0f}|{budget_bytes:bytes}|{result}|{of_budget_percent:.1f}"
    "|{least_bytes:bytes}|{at_least}|{gradients}|{graphs}|{given_up}|{first_seconds:.1f}|{added_percent:+.1f}"
    "|{predicted_added_percent:+.1f}"
)
PACKAGES = ("torch", "timm", "transformers", "diffusers", "torchvision")
QUICK = ("mobilenetv4_conv_small", "bert", "UNet2DModel")
RECORDED_STEPS = 2  # whose peak is counted
TIMED_STEPS = 2
LIMIT_SECONDS = 900  # for a model
_TOLERANCE = 1e-5  # of a gradient's largest value, where kernels round otherwise


def measure_all(run: Run) -> None:
    """Print a row for each model and share, and save them."""
    asked = run.asked
    shares = asked.shares or ([60.0] if asked.quick else [60.0, 40.0])
    versions = _versions()
    run.say(", ".join(f"{name} {version}" for name, version in versions.items()))
    earlier = run.resume("rows", "skipped")
    rows: list[dict[str, Any]] = earlier.get("rows", [])
    run.skipped |= earlier.get("skipped", {})
    there = {(row["model"], row["share"]) for row in rows}
    for name in run.chosen(CATALOGUE, {name: CATALOGUE[name] for name in QUICK}):
        new_shares = [share for share in shares if (name, share) not in there]
        if not new_shares:
            continue
        question = {"model": name, "shares": new_shares, "seed": asked.seed, "allow": asked.allow}
        found, reason = _asked_of_a_process(question)
        rows += found
        if reason:
            run.skip(name, reason)
        for row in found:
            run.say(" ".join(filter(None, (part.strip() for part in cells(FORMATS, row)))))
        run.save(versions=versions, rows=rows, skipped=run.skipped)
    run.reject_nothing(rows)
    table = new_table("Models that nobody here wrote", COLUMNS)
    order = list(CATALOGUE)
    rows.sort(key=lambda row: (order.index(row["model"]), -row["share"]))
    run.save(versions=versions, rows=rows, skipped=run.skipped)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.say(table)
    for row in rows:
        for line in (row["reason"], *row["said"]):
            if line:
                run.say(f"{row['model']} at {row['share']:.0f} %: {line}")
    if wrong := [f"{row['model']} at {row['share']:.0f} %" for row in rows if row["wrong"]]:
        raise WrongResult(f"{', '.join(wrong)}: see their rows")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _asked_of_a_process(question: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows of a model, and why there are none."""
    begun: list[str] = []
    started = time.perf_counter()
    with Worker(
        "bench.models:measure", malloc_environment("", 1, os.environ, allocator=os.environ.get(CPU_ALLOCATOR, TORCH))
    ) as worker:
        try:
            return worker.ask(dict(question), begun.append, LIMIT_SECONDS), ""
        except Ended as ended:
            stage = begun[-1] if begun else "starting"
            late = time.perf_counter() - started >= LIMIT_SECONDS
            result, reason = ("too slow", f"ended after {LIMIT_SECONDS} s") if late else ("crashed", str(ended))
            row = _new_row(question["model"], question["shares"][0], 0)
            return [row | {"result": result, "reason": f"{stage}: {reason}", "wrong": not late}], ""
        except InputError as reason:
            return [], str(reason)


def _new_row(model: str, share: float, plain_bytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "share": share, "budget_bytes": int(share / 100 * plain_bytes)}
    row |= {"plain_peak_bytes": plain_bytes, "result": "", "reason": "", "said": [], "wrong": False}
    row |= {"at_least": "", "gradients": ""}
    return row


def measure(question: Mapping[str, Any], stage: Stage) -> list[dict[str, Any]]:
    """The rows of one model, in this process.

    Raises:
        InputError: its library is missing.
    """
    seed: int = question["seed"]
    torch.manual_seed(seed)
    stage("building")
    try:
        model, step = CATALOGUE[question["model"]].build()
    except Unavailable as missing:
        raise InputError(str(missing)) from None
    stage("plain PyTorch")
    plain = _Plain(model, step)
    rows: list[dict[str, Any]] = []
    tried: dict[int, str] = {}
    for share in question["shares"]:
        stage(f"{share:.0f} %")
        row = _new_row(question["model"], share, plain.peak_bytes)
        row |= _trained(plain, row["budget_bytes"], question["allow"])
        if row["result"].startswith("refused") and row.get("least_bytes") is None:  # before there was a step to plan
            row |= {"least_bytes": _trained(plain, plain.static_bytes, question["allow"]).get("least_bytes")}
        least_bytes = row.get("least_bytes")
        if least_bytes is not None:
            if least_bytes not in tried:
                stage(f"the least at {share:.0f} %")
                at_least = _trained(plain, least_bytes, question["allow"])
                met = at_least["result"] == "met" and not at_least["wrong"]
                tried[least_bytes] = "met" if met else f"{at_least['result']}: {at_least['reason']}"
            row["at_least"] = tried[least_bytes]
            row["wrong"] |= tried[least_bytes] != "met"
        rows.append(row)
    return rows


class _Plain:
    """A model as plain PyTorch trains it."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        self.model = model
        self.step = step
        take(step, model, 0)
        self.gradients = [self._gradients(seed) for seed in range(1 + RECORDED_STEPS)]
        self.peak_bytes = peak_bytes(step, model, 0)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.static_bytes = distinct_bytes([*model.parameters(), *model.buffers()]) + distinct_bytes(trained)

    def _gradients(self, seed: int) -> list[torch.Tensor | None]:
        free_gradients(self.model)
        take(self.step, self.model, seed)
        found = [p.grad for p in self.model.parameters()]
        free_gradients(self.model)
        return found


def _trained(plain: _Plain, budget_bytes: int, allow: str) -> dict[str, Any]:
    """What becomes of a model that is trained inside a budget."""
    model, step = copy.deepcopy(plain.model), plain.step
    said = _Said()
    worst, peaks, first_seconds = 0.0, [], 0.0
    with said:
        try:
            ours = shoal.compile(model, budget_bytes, allow=allow)
            started = time.perf_counter()
            take(step, ours, 0)
            first_seconds = time.perf_counter() - started
            worst = _difference(ours, plain.gradients[0])
            for seed in range(1, 1 + RECORDED_STEPS):
                free_gradients(ours)
                peaks.append(peak_bytes(step, ours, seed, keep=True))
                worst = max(worst, _difference(ours, plain.gradients[seed]))
            free_gradients(ours)
        except ShoalError as error:
            least_bytes = error.least_feasible_bytes if isinstance(error, BudgetError) else None
            found = {"result": f"refused: {type(error).__name__}", "reason": str(error), "wrong": False}
            return found | {"least_bytes": least_bytes, "said": said.lines}
        except Exception as error:
            line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            return {"result": "crashed", "reason": line, "wrong": True, "said": said.lines}
    plan = ours.shoal.plan
    graphs = {op.name.split(".")[0] for op in plan.graph.ops if op.name.startswith("part")} if plan else set()
    seconds = _in_turns(plain, ours)
    over, unequal = max(peaks) > budget_bytes, worst > _TOLERANCE
    return {
        "result": "over" if over else "met",
        "reason": "; ".join(
            [f"its peak is {max(peaks)} bytes, {max(peaks) - budget_bytes} over"] * over
            + [f"gradients differ by {worst:.0e} of the largest value"] * unequal
        ),
        "wrong": over or unequal,
        "said": said.lines,
        "peak_bytes": max(peaks),
        "of_budget_percent": 100 * max(peaks) / budget_bytes,
        "predicted_bytes": ours.shoal.predicted_peak_bytes,
        "gradients": "equal" if not worst else f"within {worst:.0e}",
        "graphs": max(1, len(graphs)),
        "given_up": len(plan.recomputed) + len(plan.offloaded) if plan else 0,
        "first_seconds": first_seconds,
        "added_percent": 100 * (statistics.median(a / b for a, b in seconds) - 1),
        "predicted_added_percent": 100 * plan.added_seconds / plan.plain_seconds if plan else 0.0,
    }


def _in_turns(plain: _Plain, ours: nn.Module) -> list[tuple[float, float]]:
    """CPU seconds of our step and of plain PyTorch's, turn by turn."""

    def seconds_of(model: nn.Module) -> float:
        free_gradients(model)
        started = time.thread_time()
        take(plain.step, model, 0)
        seconds = time.thread_time() - started
        free_gradients(model)
        return seconds

    return [(seconds_of(ours), seconds_of(plain.model)) for _ in range(TIMED_STEPS)]


def take(step: Step, model: nn.Module, seed: int) -> None:
    """One training step, with the numbers drawn from a seed: some models draw with NumPy or Python's own generator."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    step(model).backward()


def _difference(model: nn.Module, expected: list[torch.Tensor | None]) -> float:
    """The largest of all gradients, in units of the tensor's largest value; one that is missing counts as infinite."""
    worst = 0.0
    for parameter, reference in zip(model.parameters(), expected, strict=True):
        if parameter.grad is None or reference is None:
            if (parameter.grad is None) != (reference is None):
                return float("inf")
            continue
        scale = reference.abs().max().clamp(min=1e-12)
        worst = max(worst, float((parameter.grad - reference).abs().max() / scale))
    return worst


def free_gradients(model: nn.Module) -> None:
    """Let all gradients go."""
    for parameter in model.parameters():
        parameter.grad = None


def peak_bytes(step: Step, model: nn.Module, seed: int, *, keep: bool = False) -> int:
    """Of a whole step: parameters and buffers, and all that it allocates, the batch included.

    Args:
        keep: whether the gradients stay.
    """
    gc.collect()
    there_bytes = distinct_bytes([*model.parameters(), *model.buffers()])
    _, events = allocations.record(lambda: take(step, model, seed))
    if not keep:
        free_gradients(model)
    return there_bytes + allocations.peak_bytes(events)


class _Said(logging.Handler):
    """Shoal's warnings while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger("shoal").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("shoal").removeHandler(self)


main = Bench(
    measure_all,
    option("--networks", known=list(CATALOGUE), default=None, help="comma-separated; by default all"),
    option("--shares", type=percentages, default=[], minimum=None, help="budgets, in %% of plain PyTorch's peak"),
    option("--allow", default="bitwise", help="means, as of shoal.compile"),
    resume="a file of an earlier run: what it holds is not measured again",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
