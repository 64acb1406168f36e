"""Compiled regions: networks × budgets × precision, beside eager PyTorch and `torch.compile`.

    python -m bench.compiled            every network, float32 and bfloat16 autocast: hours on two cores
    python -m bench.compiled --quick    the same on tiny inputs, to see that it runs
    python -m bench.compiled --networks resnet50,gpt2 --shares 100,50 --precision float32
    python -m bench.compiled --resume runs/bench/compiled_....json   networks that it has are not measured again
    python -m bench.compiled --start --networks resnet50  seconds until the second step, cold and warm

Budgets are shares of eager PyTorch's peak. `torch.compile` runs by itself and at several values of
`activation_memory_budget`; at a budget, the fastest of its settings whose measured peak fits stands for it. Shoal runs
with kernels="eager" and kernels="compiled", in whatever form `--allow` permits. All are timed in turns. Gradients of
each contender are held against eager PyTorch's in float64, parameter by parameter, relative to these; where masks are
drawn, which float64 draws otherwise, against eager PyTorch's in the same precision. The file is written after
each contender and each round; an interrupted run finds in the compilers' caches what it compiled.

GPT-2 is of transformers (here 5.23.0), four of the networks are of timm (here 1.0.31); what does not import is skipped.
"""

from __future__ import annotations

import copy
import gc
import importlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.modules.dropout import _DropoutNd

from bench.frame import CPU_TIME, NETWORKS, Bench, Run, Unavailable, WrongResult, bar, option, percentages, switch
from bench.interleave import Clock, turns
from bench.network import Setting
from bench.tables import cells, new_table
from bench.workload import Forward, Workload, make_workload
from shoal.engine.api import compile as compile_model
from shoal.errors import BudgetError, InputError

SETTINGS = {
    "mobilenet_v2": Setting(8, 128),
    "googlenet": Setting(8, 128),
    "unet3d": Setting(1, 48),
    "densenet121": Setting(4, 128),
    "resnet50": Setting(4, 128),
    "unet": Setting(1, 128),
    "vgg16_bn": Setting(8, 96),
    "resnet18": Setting(16, 96),
    "timm/efficientnet_b0": Setting(4, 160),
    "timm/convnext_tiny": Setting(2, 160),
    "timm/hrnet_w18_small": Setting(2, 160),
    "timm/vit_small_patch16_224": Setting(2, 224),
    "gpt2": Setting(1, 256),  # sequences, tokens
}
QUICK_SETTINGS = {name: Setting(2, 64) for name in SETTINGS} | {
    "unet3d": Setting(1, 16),
    "timm/vit_small_patch16_224": Setting(1, 224),
    "gpt2": Setting(1, 32),
}
PRECISIONS = ("float32", "bfloat16")
SHARES = (100.0, 60.0, 40.0)
ACTIVATION_BUDGETS = (0.7, 0.4, 0.1)
EAGER, INDUCTOR = "eager", "torch.compile"
OURS = ("shoal eager", "shoal compiled")
MOST_ERROR = {"float32": 0.02, "bfloat16": 0.5}
_NEXT_TO_NOTHING = 1e-12  # of the squares of all gradients
STARTS = (INDUCTOR, *OURS)
_START = """
import resource, sys, time, torch
from bench.compiled import SETTINGS, by_inductor, workload_of
from torch._inductor.async_compile import shutdown_compile_workers
import shoal
torch.set_num_threads({threads})
work = workload_of({name!r}, SETTINGS[{name!r}], 0)
def processors():
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))
begun, in_use = time.perf_counter(), processors()
kernels = {kernels!r}
model = shoal.compile(work.shared_copy(), kernels=kernels) if kernels else by_inductor(work, None)
for _ in range(2):
    work.reset(); work.step(model)
seconds = time.perf_counter() - begun
shutdown_compile_workers()  # which then count as used
print(seconds, processors() - in_use)
"""


class _Gpt2(nn.Module):
    """GPT-2 small on tokens, logits as cross entropy takes them."""

    def __init__(self) -> None:
        super().__init__()
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise Unavailable(f"gpt2 needs transformers, which does not import here ({error})") from error
        self.network = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(tokens, use_cache=False).logits
        return logits.transpose(1, 2)


def workload_of(name: str, setting: Setting, seed: int) -> Workload:
    """The step of one network.

    Raises:
        Unavailable: the library that it is of does not import here.
    """
    if name != "gpt2":
        return make_workload(name, setting.batch, setting.image, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _Gpt2().train()
    draw = torch.Generator().manual_seed(seed)
    tokens, target = (torch.randint(50257, (setting.batch, setting.image), generator=draw) for _ in range(2))
    return Workload(name, model, tokens, target, seed)


def in_precision(forward: Forward, precision: str) -> Forward:
    """The model's call under autocast where the precision is not float32."""
    if precision == "float32":
        return forward

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, getattr(torch, precision)):
            return forward(x)

    return call


def by_inductor(workload: Workload, value: float | None) -> Forward:
    """`torch.compile` of the model, at a value of `activation_memory_budget`; compiled at its first call."""
    model = workload.shared_copy()

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x)
        return result

    # Dynamo keeps its graphs by code object: one of its own for every value.
    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    compiled = torch.compile(own, fullgraph=True, dynamic=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        with functorch_config.patch(activation_memory_budget=1.0 if value is None else value):
            result: torch.Tensor = compiled(x)
            return result

    return run


class _Contenders:
    """Everything that takes a network's step in one precision, with its peak and its distance from a reference."""

    def __init__(self, workload: Workload, precision: str) -> None:
        self.workload, self.precision = workload, precision
        self.forwards: dict[str, Forward] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self._buffers = workload.buffers()
        eager = in_precision(workload.shared_copy(), precision)
        self.peak_bytes = workload.peak_bytes(eager)
        found = self._taken(eager)
        self.is_exact = not any(isinstance(m, _DropoutNd) and m.p > 0 for m in workload.model.modules())
        self._reference = _in_float64(workload) if self.is_exact else found
        self.forwards[EAGER] = eager
        self.rows[EAGER] = {"measured_peak_bytes": self.peak_bytes, **errors_of(found, self._reference)}

    def _taken(self, forward: Forward) -> dict[str, torch.Tensor]:
        self.workload.restore(self._buffers)
        self.workload.reset()
        self.workload.step(forward)
        return self.workload.gradients()

    def add(self, name: str, forward: Forward, **more: Any) -> None:
        """Take two steps, then meter one.

        Raises:
            WrongResult: its gradients are too far from eager PyTorch's.
        """
        call = in_precision(forward, self.precision)
        self._taken(call)
        found = self._taken(call)
        errors = errors_of(found, self._reference)
        if not errors["error"] <= MOST_ERROR[self.precision]:
            raise WrongResult(f"{self.workload.name}, {name}: gradients are off by {errors['error']:.2g} of their size")
        self.forwards[name] = call
        self.rows[name] = {"measured_peak_bytes": self.workload.peak_bytes(call), **errors, **more}


def _in_float64(workload: Workload) -> dict[str, torch.Tensor]:
    images = workload.images.double() if workload.images.is_floating_point() else workload.images
    exact = replace(workload, model=copy.deepcopy(workload.model).double(), images=images)
    exact.reset()
    exact.step(exact.model)
    return exact.gradients()


def errors_of(found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Distance of gradients from a reference, relative to its size.

    Returns:
        `error` of all parameters together; `median_error` and `largest_error` of each by itself, but for those whose
        gradient is zero but for rounding, as a bias's before a batch norm is.
    """
    squares = []
    for key, value in reference.items():
        off = float((found[key].double() - value.double()).square().sum())
        squares.append((off, float(value.double().square().sum())))
    whole = sum(size for _, size in squares)
    each = [math.sqrt(off / size) for off, size in squares if size > _NEXT_TO_NOTHING * whole]
    return {
        "error": math.sqrt(sum(off for off, _ in squares) / whole),
        "median_error": statistics.median(each),
        "largest_error": max(each),
    }


def measure_network(
    name: str,
    setting: Setting,
    shares: Sequence[float],
    precision: str,
    values: Sequence[float],
    rounds: int,
    seed: int,
    allow: str | None = None,
    advance: Callable[[str], None] = lambda what: None,
    clock: Clock = time.perf_counter,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Every contender at every budget, as plain values; `keep` gets what there is after each contender and round."""
    advance("eager PyTorch")
    workload = workload_of(name, setting, seed)
    found = _Contenders(workload, precision)
    refused: dict[str, str] = {}
    result = {
        "network": name,
        "setting": asdict(setting),
        "precision": precision,
        "allow": allow,
        "plain_peak_bytes": found.peak_bytes,
        "contenders": found.rows,
        "refused": refused,
        "reference": "float64" if found.is_exact else EAGER,
        "complete": False,
    }
    for value in (None, *values):
        who = INDUCTOR if value is None else f"{INDUCTOR} at {value:g}"
        advance(who)
        found.add(who, by_inductor(workload, value), activation_memory_budget=value)
        keep(result)
    for share in shares:
        budget_bytes = int(found.peak_bytes * share / 100)
        for ours in OURS:
            who = f"{ours} at {share:g} %"
            advance(who)
            try:
                model = compile_model(
                    workload.shared_copy(), budget_bytes, kernels=ours.split()[1], allow=allow, name=name
                )
                found.add(who, model, budget_bytes=budget_bytes, share=share)
            except BudgetError as error:
                refused[who] = str(error).split(";")[0]
                continue
            status: Any = model.shoal
            found.rows[who] |= {
                "predicted_peak_bytes": status.predicted_peak_bytes,
                "predicted_seconds": status.plan.predicted_seconds,
                "repairs": status.repairs,
                "preparing_seconds": sum(one.seconds for one in status.preparations),
                "variant": str(status.plan.variant),
                "compiled": list(status.plan.compiled),
            }
            keep(result)
    advance(f"timing {len(found.forwards)} contenders in turns")
    for row in found.rows.values():
        row["seconds"] = []
    for who, counts in turns(list(found.forwards), rounds, 1):
        seconds = workload.seconds(found.forwards[who], clock)
        if counts:
            found.rows[who]["seconds"].append(seconds)
        if counts and len({len(row["seconds"]) for row in found.rows.values()}) == 1:
            keep(result)
    return {**result, "complete": True}


def fastest_within(result: Mapping[str, Any], budget_bytes: float) -> dict[str, Any] | None:
    """The fastest of `torch.compile`'s settings whose measured peak is inside a budget; None where none is."""
    rows = [row for who, row in result["contenders"].items() if who.startswith(INDUCTOR)]
    fitting = [row for row in rows if row["measured_peak_bytes"] <= budget_bytes]
    return min(fitting, key=lambda row: statistics.median(row["seconds"]), default=None)


def ratio(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> float | None:
    """Median over the turns of our seconds by theirs."""
    if theirs is None:
        return None
    return statistics.median(one / other for one, other in zip(ours["seconds"], theirs["seconds"], strict=True))


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a table shows of a result: a row for each of Shoal's at each budget."""
    contenders, plain_bytes = result["contenders"], result["plain_peak_bytes"]
    shares = dict.fromkeys(row["share"] for row in contenders.values() if "share" in row)
    shares |= dict.fromkeys(float(who.split(" at ")[1].split()[0]) for who in result["refused"])
    found = []
    for share in sorted(shares, reverse=True):
        budget_bytes = plain_bytes * share / 100
        theirs = fastest_within(result, budget_bytes)
        eager = contenders.get(f"{OURS[0]} at {share:g} %")
        for ours in OURS:
            who = f"{ours} at {share:g} %"
            row = contenders.get(who)
            if row is None:
                found.append({"who": who, "refused": result["refused"].get(who, "")})
                continue
            peak_bytes = row["measured_peak_bytes"]
            found.append(
                {
                    "who": who,
                    "seconds": row["seconds"],
                    "of_eager": ratio(row, contenders[EAGER]),
                    "of_inductor": ratio(row, contenders[INDUCTOR]),
                    "of_theirs": ratio(row, theirs),
                    "of_ours": ratio(row, eager) if eager is not None and row is not eager else None,
                    "share": 100 * peak_bytes / plain_bytes,
                    "off": 100 * (peak_bytes / row["predicted_peak_bytes"] - 1),
                    "broken": peak_bytes > row["budget_bytes"],
                }
            )
    return found


def network_table(result: Mapping[str, Any]) -> Table:
    """One network in one precision."""
    setting, contenders = result["setting"], result["contenders"]
    n_turns = len(contenders[EAGER]["seconds"])
    title = f"{result['network']}, {setting['batch']} x {setting['image']}, {result['precision']}, {n_turns} turns"
    columns = (
        "<contender | ms | × eager | × torch.compile | × its fastest inside | × ours, eager | peak, % | "
        "measured over predicted, %"
    )
    table = new_table(title, columns)
    for who, row in contenders.items():
        if who not in (EAGER, INDUCTOR) and not who.startswith(INDUCTOR):
            continue
        share = 100 * row["measured_peak_bytes"] / result["plain_peak_bytes"]
        more = {"of_eager": ratio(row, contenders[EAGER]), "share": share}
        table.add_row(*cells("{who} | {seconds:ms} | {of_eager:.2f} | | | | {share:.1f} |", row, who=who, **more))
    form = (
        "{who} | {seconds:ms} | {of_eager:.2f} | {of_inductor:.2f} | {of_theirs:.2f} | {of_ours:.2f} | "
        "{share:.1f} | {off:+.2f}"
    )
    for row in rows_of(result):
        if "refused" in row:
            table.add_row(row["who"], "does not fit", "", "", "", "", "", "")
        else:
            table.add_row(*cells(form, row))
    return table


def error_table(result: Mapping[str, Any]) -> Table:
    """How far the gradients of one network are from the reference."""
    setting, reference = result["setting"], result["reference"]
    title = f"{result['network']}, {setting['batch']} x {setting['image']}, {result['precision']}: gradients off"
    table = new_table(f"{title} from {reference}", "<contender | all | median parameter | worst parameter")
    for who, row in result["contenders"].items():
        if who != reference:
            table.add_row(*cells("{who} | {error:.2g} | {median_error:.2g} | {largest_error:.2g}", row, who=who))
    return table


def start_table(result: Mapping[str, Any]) -> Table:
    """Seconds until the second step."""
    columns = "<network | <kernels | cold | of CPU time | warm | of CPU time"
    table = new_table("Seconds until the second step", columns)
    form = (
        "{network} | {who} | {cold_seconds:.0f} | {cold_cpu_seconds:.0f} | {warm_seconds:.0f} | {warm_cpu_seconds:.0f}"
    )
    for row in result.get("starts", ()):
        table.add_row(*cells(form, row))
    return table


def tables(result: Mapping[str, Any]) -> list[Table]:
    """What a page shows of a file."""
    timed = [one for one in result.get("results", ()) if all(row.get("seconds") for row in one["contenders"].values())]
    found = [make(one) for one in timed for make in (network_table, error_table)]
    return [*found, *([start_table(result)] if result.get("starts") else [])]


def start_seconds(name: str, who: str) -> dict[str, Any]:
    """Seconds until the second step of a process, with nothing on disk and then with what the first one left there.

    CPU time is that of all its processes and threads, the compilers' included.
    """
    kernels = None if who == INDUCTOR else who.split()[1]
    program = _START.format(name=name, threads=torch.get_num_threads(), kernels=kernels)
    row: dict[str, Any] = {"network": name, "who": who}
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "SHOAL_CACHE": f"{folder}/shoal"}
        for state in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[1],
                check=False,
            )
            if done.returncode:
                raise WrongResult(f"{name}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
            row[f"{state}_seconds"], row[f"{state}_cpu_seconds"] = map(float, done.stdout.split()[-2:])
    return row


def _run(run: Run) -> int:
    asked = run.asked
    settings = run.chosen(SETTINGS, QUICK_SETTINGS)
    if unknown := sorted(set(asked.precision) - set(PRECISIONS)):
        raise InputError(f"--precision {','.join(unknown)}: give some of {', '.join(PRECISIONS)}")
    if asked.start:
        starts = []
        for name in settings:
            for who in STARTS:
                starts.append(start_seconds(name, who))
                run.save(starts=starts)
        run.say(start_table(run.result))
        return 0
    shares = asked.shares or run.pick(SHARES, (100.0,))
    values = asked.sweep if asked.sweep is not None else run.pick(ACTIVATION_BUDGETS, ())
    results = [one for one in run.resume().get("results", ()) if one["complete"]]
    there = {(one["network"], one["precision"]) for one in results}
    wanted = [(name, one) for name in settings for one in asked.precision if (name, one) not in there]
    with bar(len(wanted)) as show:
        for name, precision in wanted:
            try:
                results.append(
                    measure_network(
                        name,
                        settings[name],
                        shares,
                        precision,
                        values,
                        run.pick(asked.rounds, 2),
                        asked.seed,
                        asked.allow,
                        partial(show, f"{name}, {precision}"),
                        run.clock,
                        lambda found: run.save(results=[*results, found]),
                    )
                )
            except Unavailable as reason:
                run.say(f"{name} is skipped: {reason}")
                continue
            run.save(results=results)
            run.say(network_table(results[-1]), error_table(results[-1]))
            torch._dynamo.reset()
            gc.collect()
    broken = [row["who"] for result in results for row in rows_of(result) if row.get("broken")]
    if broken:
        run.say(f"Over its budget: {', '.join(broken)}")
    return 1 if broken else 0


def _values(text: str) -> list[float]:
    return [float(value) for value in text.split(",") if value]


main = Bench(
    _run,
    NETWORKS,
    option("--shares", type=percentages, minimum=None, help="budgets in percent of eager PyTorch's peak"),
    option(
        "--precision",
        type=lambda text: text.split(","),
        minimum=None,
        default=list(PRECISIONS),
        help="of float32, bfloat16",
    ),
    option("--sweep", type=_values, minimum=None, help="values of activation_memory_budget"),
    option("--rounds", type=int, default=5, help="timed steps of each"),
    option("--allow", minimum=None, help="as of shoal.compile; by default its own default"),
    switch("--start", "seconds until the second step instead, in processes of their own"),
    CPU_TIME,
    quick="tiny inputs: does it run?",
    resume="keep the networks that this file has whole, and measure the others",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
