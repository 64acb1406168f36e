"""The order of ops: how many bytes does it save by itself, how near is it to the best, what does a plan gain by it?

    python -m bench.order               minutes on one core
    python -m bench.order --quick       small graphs and two networks

Nothing is run: the steps are planned on the meta device for a P100. Small random graphs are compared with the best of
all orders. Every order is checked against the step as it was captured, and every plan by the independent check.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import shoal
from bench.frame import Bench, Run, WrongResult, comma_separated, option, some_of
from bench.network import Setting
from bench.tables import cells, new_table
from examples import networks as models
from shoal.core import presets
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_order, check_plan
from shoal.errors import BudgetError, PlanError
from shoal.planners.joint import joint
from shoal.planners.keep_all import keep_all
from shoal.planners.limits import DEFAULT, Effort, Guard, Limits
from shoal.planners.order import best_order, lower_peak
from shoal.planners.pass_tasks import PassTasks, TaskBlock, bytes_during

HARDWARE = presets.get("p100-nvlink")
SETTINGS: Mapping[str, Setting] = {
    "googlenet": Setting(16, 112),
    "densenet121": Setting(8, 112),
    "resnet50": Setting(8, 112),
    "mobilenet_v2": Setting(8, 112),
    "unet": Setting(2, 64),
    "unet3d": Setting(1, 32),
    "exchange": Setting(4, 128),
}
QUICK_SETTINGS = {"resnet18": Setting(1, 64), "unet3d": Setting(1, 16)}
SHARES = (0.9, 0.8, 0.66, 0.53)


class Exchange(nn.Module):
    """Branches at four resolutions that exchange their features, as in HRNet."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), stages: int = 2) -> None:
        super().__init__()
        places = range(len(widths))
        self.stem = nn.Conv2d(3, widths[0], 3, 2, 1)
        self.begin = nn.ModuleList(nn.Conv2d(widths[i], widths[i + 1], 3, 2, 1) for i in places[:-1])
        self.branches = nn.ModuleList(nn.ModuleList(self._block(width) for width in widths) for _ in range(stages))
        self.exchanges = nn.ModuleList(
            nn.ModuleList(nn.ModuleList(self._way(widths, i, j) for j in places) for i in places) for _ in range(stages)
        )
        self.head = nn.Conv2d(widths[0], 4, 1)

    @staticmethod
    def _block(width: int) -> nn.Module:
        convs = [nn.Conv2d(width, width, 3, 1, 1, bias=False) for _ in range(2)]
        return nn.Sequential(convs[0], nn.BatchNorm2d(width), nn.ReLU(), convs[1], nn.BatchNorm2d(width), nn.ReLU())

    @staticmethod
    def _way(widths: tuple[int, ...], to: int, source: int) -> nn.Module:
        if to == source:
            return nn.Identity()
        if source > to:
            up = nn.Upsample(scale_factor=2 ** (source - to))
            return nn.Sequential(nn.Conv2d(widths[source], widths[to], 1, bias=False), nn.BatchNorm2d(widths[to]), up)
        outs = [widths[source]] * (to - source - 1) + [widths[to]]
        layers = [
            [nn.Conv2d(widths[source], n_out, 3, 2, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()] for n_out in outs
        ]
        return nn.Sequential(*[layer for part in layers for layer in part][:-1])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = [self.stem(images)]
        for down in self.begin:
            features.append(down(features[-1]))
        for branches, exchange in zip(self.branches, self.exchanges, strict=True):
            features = [branch(x) for branch, x in zip(branches, features, strict=True)]
            features = [
                torch.relu(sum(way(x) for way, x in zip(ways, features, strict=True)))  # type: ignore[arg-type]
                for ways in exchange
            ]
        return self.head(features[0]) + sum(x.mean() for x in features[1:])


def random_tasks(seed: int, n: int) -> PassTasks:
    """A random pass of `n` tasks with blocks of 0 to 30 bytes."""
    chance = random.Random(seed)
    blocks = [TaskBlock(chance.randint(1, 20), stays=chance.random() < 0.2) for _ in range(chance.randint(1, 4))]
    tasks = PassTasks(blocks, [], [], [], [], [], chance.randint(0, 9))
    for task in range(n):
        reads = sorted({chance.randrange(len(blocks)) for _ in range(chance.choice((1, 1, 1, 2, 2, 3)))})
        for block in reads:
            blocks[block].readers.append(task)
        over = chance.choice(reads) if chance.random() < 0.4 else -1
        writes = range(len(blocks), len(blocks) + chance.choice((1, 1, 1, 2)))
        tasks.reads.append(tuple(reads))
        tasks.writes.append(tuple(writes))
        tasks.after.append({blocks[block].producer for block in reads} - {-1})
        tasks.scratch_bytes.append(chance.choice((0, 0, chance.randint(0, 15))))
        tasks.overwrites.append(over)
        for place, _ in enumerate(writes):
            nbytes = blocks[over].nbytes if over >= 0 and place == 0 else chance.choice((chance.randint(1, 30), 2))
            blocks.append(TaskBlock(nbytes, task, stays=chance.random() < 0.15))
    for block in blocks:
        block.stays |= block.producer < 0 and not block.readers
    return tasks


def least_peak_bytes(tasks: PassTasks) -> int:
    """The lowest peak of all orders: dynamic programming over the sets of tasks that can have run."""
    least: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {frozenset(): (0, ())}
    for _ in range(len(tasks)):
        longer: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {}
        for done, (highest, order) in least.items():
            for task in set(range(len(tasks))) - done:
                if tasks.after[task] <= done:
                    peak = max(highest, bytes_during(tasks, (*order, task))[-1])
                    if peak < longer.get(done | {task}, (1 << 62,))[0]:
                        longer[done | {task}] = peak, (*order, task)
        least = longer
    return next(iter(least.values()))[0]


def _small_graphs(run: Run, count: int, n: int) -> dict[str, Any]:
    found, given = [], []
    for seed in range(count):
        tasks = random_tasks(seed, n)
        least = least_peak_bytes(tasks)
        order = best_order(tasks, Effort("order of ops", DEFAULT.order_ops, Guard(1e9)))
        place = {task: at for at, task in enumerate(order)}
        if any(place[earlier] > place[task] for task in order for earlier in tasks.after[task]):
            raise WrongResult(f"the order of random graph {seed} runs a task before what it needs")
        found.append(max(bytes_during(tasks, order)) / least)
        given.append(max(bytes_during(tasks, range(n))) / least)
        if found[-1] < 1:
            raise WrongResult(f"random graph {seed}: below the lowest peak of all orders")
    best = sum(ratio == 1 for ratio in found)
    run.say(
        f"{count} random graphs of {n} ops, peak over that of the best of all orders: as given "
        f"{statistics.mean(given):.3f}, ordered {statistics.mean(found):.4f} on average and {max(found):.3f} at most; "
        f"{best} are the best"
    )
    return {"graphs": count, "ops": n, "given": statistics.mean(given), "mean": statistics.mean(found), "best": best}


def _captured(name: str, setting: Setting) -> StepGraph:
    with torch.device("meta"):
        model = Exchange() if name == "exchange" else models.build(name)
        shape = (setting.batch, 3, setting.image, setting.image)
        images = torch.empty(shape if name == "exchange" else models.example_shape(name, setting.batch, setting.image))
    return shoal.plan(model, images, hardware=HARDWARE, offload_to=None, name=name).graph


def _checked(graph: StepGraph, plan: Plan) -> Plan:
    try:
        check_order(graph, plan.graph)
        check_plan(plan.graph, plan.residences, plan.budget_bytes)
    except PlanError as error:
        raise WrongResult(str(error)) from error
    return plan


def _alone(name: str, graph: StepGraph) -> dict[str, Any]:
    """Everything kept, before and after."""
    plain = keep_all(graph, HARDWARE, 0)
    started = time.perf_counter()
    found = lower_peak(graph, plain.residences, Effort("order of ops", DEFAULT.order_ops, Guard(1e9)))
    seconds = time.perf_counter() - started
    if found is not None:
        plain_order = tuple(op.name for op in graph.ops)
        _checked(graph, replace(plain, graph=found.graph, captured_order=plain_order))
    before, after = plain.predicted_peak_bytes, found.peak_bytes if found is not None else plain.predicted_peak_bytes
    return {
        "name": name,
        "ops": len(graph.ops),
        "before_bytes": before,
        "after_bytes": after,
        "saved_percent": 100 * (1 - after / before),
        "seconds": seconds,
    }


def _planned(graph: StepGraph, budget_bytes: int, order: bool) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        plan = _checked(graph, joint(graph, HARDWARE, budget_bytes, limits=Limits(order=order)))
    except BudgetError as refused:
        return {"least_bytes": refused.least_feasible_bytes, "seconds": time.perf_counter() - started}
    return {
        "added_percent": 100 * plan.added_seconds / plan.plain_seconds,
        "seconds": time.perf_counter() - started,
    }


def _run(run: Run) -> None:
    small = _small_graphs(run, run.pick(300, 20), run.pick(10, 7))
    settings = run.pick(SETTINGS, QUICK_SETTINGS)
    names = some_of("--networks", run.asked.networks or list(settings), settings)
    alone, plans = [], []
    for name in names:
        graph = _captured(name, settings[name])
        alone.append(_alone(name, graph))
        # Under no budget at all a plan is refused, and says what would be the least.
        for share in (*run.pick(SHARES, SHARES[1:2]), 0.0):
            budget_bytes = int(share * alone[-1]["before_bytes"])
            as_captured, ordered = (_planned(graph, max(1, budget_bytes), order) for order in (False, True))
            # A plan is made in one order only: by chance one in the captured order may be a little faster.
            slower = ordered.get("added_percent", float("inf")) > as_captured.get("added_percent", float("inf")) + 0.1
            if slower or ordered.get("least_bytes", 0) > as_captured.get("least_bytes", float("inf")):
                raise WrongResult(f"{name} in {budget_bytes} bytes: the plan is worse for being free to order")
            plans.append({"name": name, "share": share, "as_captured": as_captured, "ordered": ordered})
    kept = new_table("Everything kept", "<network | ops | as captured | ordered | saved | took, ms")
    for row in alone:
        form = "{name} | {ops} | {before_bytes:bytes} | {after_bytes:bytes} | {saved_percent:.1f} % | {seconds:ms}"
        kept.add_row(*cells(form, row))
    form = (
        "{name} | {share:.0%} | {as_captured[added_percent]:+.2f} % | {ordered[added_percent]:+.2f} % | "
        "{as_captured[least_bytes]:bytes} | {ordered[least_bytes]:bytes} | {as_captured[seconds]:.1f} | "
        "{ordered[seconds]:.1f}"
    )
    table = new_table(
        "Added time of the plan inside a share of the bytes as captured",
        "<network | budget | as captured | ordered | least as captured | least ordered | planned in, s | ordered, s",
    )
    for row in plans:
        table.add_row(*cells(form, row))
    run.say(kept, table)
    run.save(small=small, kept=alone, plans=plans)


main = Bench(
    _run,
    option("--networks", type=comma_separated, help="comma-separated; by default all"),
    quick="small graphs and two networks: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
