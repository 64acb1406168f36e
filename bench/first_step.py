"""How long the first step takes: capture, search and planning, in processes of their own, compared with `aot_eager`.

    python -m bench.first_step                                    nine networks
    python -m bench.first_step --quick                            one of them, small
    python -m bench.first_step --networks resnet50,gpt2 --shares 50

Seconds are CPU time of one process, its threads and children, from the call of `shoal.compile` to the end of the first
backward pass; imports are left out. `torch.compile(backend="aot_eager")`, which traces and rewrites nothing, is what
they are divided by. Cold: nothing is on disk; warm: a second process with what the first one left there. Budgets are
shares of plain PyTorch's peak; at 100 % most of it is kept. The loss is held against plain PyTorch's, the peak of a
second step, counted by PyTorch's memory events, against the budget.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from typing import Any

import torch

import shoal
from bench.compiled_contenders import workload_of
from bench.frame import Bench, Run, Unavailable, WrongResult, option, percentages
from bench.network import Setting
from bench.processes import Stage, Worker
from bench.tables import cells, new_table
from bench.volumes_catalogue import CATALOGUE as VOLUMES
from bench.workload import Workload
from shoal.errors import BudgetError

COLUMNS = "<network|ops|aot_eager s|share %|<result|cold s|of aot_eager|warm s|of aot_eager"
FORMATS = (
    "{network}|{ops}|{aot_seconds:.1f}|{share:.0f}|{result}|{cold_seconds:.1f}|{cold_ratio:.1f}|{warm_seconds:.1f}"
    "|{warm_ratio:.1f}"
)
SETTINGS = {
    "resnet50": Setting(16, 160),
    "densenet121": Setting(8, 128),
    "mobilenet_v2": Setting(16, 128),
    "unet": Setting(1, 128),
    "timm/vit_small_patch16_224": Setting(8, 224),
    "gpt2": Setting(2, 256),  # sequences, tokens
    "timm/densenet201": Setting(4, 128),
    "timm/convnext_tiny": Setting(6, 160),
    "SwinUNETR": Setting(1, 64),
}
QUICK_SETTINGS = {"resnet18": Setting(8, 96)}
MOST = {100: 2.0, 50: 2.5, 25: 3.5}  # what a cold first step may take, as a multiple of aot_eager's
MOST_WARM = 1.3
_TOLERANCE = 1e-3  # of the loss: kernels of other variants round otherwise, and networks amplify that


def _workload(name: str, setting: Setting, seed: int) -> Workload:
    if name not in VOLUMES:
        return workload_of(name, setting, seed)
    torch.manual_seed(seed)
    model = VOLUMES[name].here.build().train()
    shape = (setting.batch, 1, *[setting.image] * 3)
    volume, target = torch.randn(shape), torch.randint(2, (setting.batch, *shape[2:]))
    return Workload(name, model, volume, target, seed)


def first_step(question: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Take a first step in this process.

    Args:
        question: `network`, `batch`, `image`, `seed`, and `budget_bytes`; None: by `aot_eager`.
        stage: as of `Worker.ask`.
    """
    torch.set_num_threads(1)
    name, budget_bytes = question["network"], question["budget_bytes"]
    try:
        work = _workload(name, Setting(question["batch"], question["image"]), question["seed"])
    except Unavailable as error:
        return {"unavailable": str(error)}
    buffers = work.buffers()
    stage("first step")
    work.reset()
    begun = _processor_seconds()
    model: Any
    try:
        if budget_bytes is None:
            model = torch.compile(work.shared_copy(), backend="aot_eager")
        else:
            model = shoal.compile(work.shared_copy(), budget_bytes, name=name)
        loss = float(work.step(model))
    except BudgetError as error:
        return {"refused": error.message, "seconds": _processor_seconds() - begun}
    answer = {"seconds": _processor_seconds() - begun, "loss": loss}
    work.restore(buffers)
    stage("peak of a step")
    if budget_bytes is None:
        work.step(work.model)  # what a first step alone allocates
        return {**answer, "peak_bytes": work.peak_bytes(work.model)}
    plan = model.shoal.plans[0]
    answer |= {"peak_bytes": work.peak_bytes(model), "result": str(plan.variant), "ops": len(plan.graph.ops)}
    return {**answer, "repairs": model.shoal.repairs}


def _processor_seconds() -> float:
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _asked(run: Run, name: str, setting: Setting, budget_bytes: int | None, folder: str) -> dict[str, Any]:
    own = {"SHOAL_CACHE": f"{folder}/shoal", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "OMP_NUM_THREADS": "1"}
    question = {
        "network": name,
        "batch": setting.batch,
        "image": setting.image,
        "seed": run.asked.seed,
        "budget_bytes": budget_bytes,
    }
    with Worker("bench.first_step:first_step", {**os.environ, **own}) as worker:
        answer: dict[str, Any] = worker.ask(question)
    if "unavailable" in answer:
        raise Unavailable(answer["unavailable"])
    return answer


def _measured(run: Run, name: str, setting: Setting) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        aot = _asked(run, name, setting, None, folder)
    rows = []
    for share in run.asked.shares:
        budget_bytes = int(share / 100 * aot["peak_bytes"])
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (_asked(run, name, setting, budget_bytes, folder) for _ in range(2))
        row = {"network": name, "share": share, "budget_bytes": budget_bytes, "aot_seconds": aot["seconds"]}
        if "refused" in cold:
            row["result"] = "refused"
        else:
            _check(name, share, budget_bytes, cold, aot)
            row |= {"result": cold["result"], "ops": cold["ops"], "peak_bytes": cold["peak_bytes"]}
        for state, answer in (("cold", cold), ("warm", warm)):
            row[f"{state}_seconds"] = answer["seconds"]
            row[f"{state}_ratio"] = answer["seconds"] / aot["seconds"]
        rows.append(row)
    return rows


def _check(name: str, share: float, budget_bytes: int, ours: dict[str, Any], aot: dict[str, Any]) -> None:
    what = f"{name} at {share:g} %"
    if ours["repairs"] or ours["peak_bytes"] > budget_bytes:
        raise WrongResult(f"{what}: {ours['peak_bytes']} of {budget_bytes} bytes, {ours['repairs']} repairs")
    if abs(ours["loss"] - aot["loss"]) > _TOLERANCE * abs(aot["loss"]):
        raise WrongResult(f"{what}: the loss is {ours['loss']}, plain PyTorch's {aot['loss']}")


def measure_all(run: Run) -> None:
    """Print a row for each network and share, and save them."""
    settings = run.chosen(SETTINGS, QUICK_SETTINGS)
    rows: list[dict[str, Any]] = []
    for name, setting in settings.items():
        try:
            rows += _measured(run, name, setting)
        except Unavailable as error:
            run.skip(name, error)
            continue
        run.save(rows=rows)
    run.reject_nothing(rows)
    goals = ", ".join(f"{most:g} at {share} %" for share, most in MOST.items())
    table = new_table(f"First steps in CPU seconds; the aim is {goals}, warm {MOST_WARM:g}", COLUMNS)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.say(table)


main = Bench(
    measure_all,
    option("--networks", known=[*SETTINGS, *QUICK_SETTINGS], default=None, help="comma-separated; by default all"),
    option("--shares", type=percentages, default=[100.0, 50.0, 25.0], minimum=None, help="budgets, in %% of the peak"),
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
