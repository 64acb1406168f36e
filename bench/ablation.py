"""Inferences of the planner: what does each save, of the step's time and of the smallest peak, and what does it cost?

    python -m bench.ablation               13 CPU minutes
    python -m bench.ablation --networks residual,transformer --without chain,order
    python -m bench.ablation --quick       one small network: does it run?

Nothing is run: the steps are captured on the meta device for a P100, whose times are the same on every machine, and
planned with all inferences and with each switch of `shoal.planners.limits.Limits` off in turn. Budgets are percent of
the peak with everything kept, and the smallest that is known with all of them ("minimum"). Every plan is checked
independently. An inference that is worth nothing in any row has no place in the library.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import nn

import shoal
from bench.frame import NETWORKS, Bench, Run, WrongResult, option, some_of
from bench.scale import Gpt
from bench.tables import new_table
from examples import networks as models
from shoal.core import presets
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_order, check_plan
from shoal.errors import BudgetError, PlanError
from shoal.planners.infeasible import fewest_bytes
from shoal.planners.joint import joint
from shoal.planners.keep_all import keep_all
from shoal.planners.limits import Limits
from shoal.planners.smallest_plan import smallest_plan

HARDWARE = presets.get("p100-nvlink")
SWITCHES = tuple(field.name for field in fields(Limits) if field.type == "bool")
OF_A_LINK = ("iterated_search", "later_readers", "smallest_search")  # the others are switched off in steps without one
MINIMUM = "minimum"
SHARES = (66, 40, 25)
_WORTH_PERCENT = 0.1  # of a step, or of its smallest peak: less is no difference


class Residual(nn.Module):
    """Layers of one size with skip connections: every place is as good a border of a block as any other."""

    def __init__(self, blocks: int = 6, channels: int = 16) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, channels, 3, 1, 1), nn.Linear(channels, 10)
        self.blocks = nn.ModuleList(self._block(channels) for _ in range(blocks))

    @staticmethod
    def _block(channels: int) -> nn.Module:
        convs = [nn.Conv2d(channels, channels, 3, 1, 1, bias=False) for _ in range(2)]
        return nn.Sequential(convs[0], nn.BatchNorm2d(channels), nn.ReLU(), convs[1], nn.BatchNorm2d(channels))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) → (N, 10)."""
        x = self.stem(images)
        for block in self.blocks:
            x = torch.relu(block(x) + x)
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """A small vision transformer: patches of 8 x 8 pixels, six layers."""

    def __init__(self, width: int = 96, layers: int = 6) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 8, 8), nn.Linear(width, 10)
        layer = partial(nn.TransformerEncoderLayer, width, 3, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.Sequential(*(layer() for _ in range(layers)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) → (N, 10)."""
        return self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


class Step(NamedTuple):
    """What is planned: a model, its input, and the budgets in percent."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    shares: Sequence[int] = SHARES


def _of_ours(name: str, batch: int, image: int, shares: Sequence[int] = SHARES) -> Step:
    shape = models.example_shape(name, batch, image)
    return Step(partial(models.build, name), partial(torch.empty, shape), shares)


STEPS: Mapping[str, Step] = {
    "residual": Step(Residual, partial(torch.empty, 8, 3, 32, 32)),
    "transformer": Step(Transformer, partial(torch.empty, 16, 3, 64, 64)),
    "gpt": Step(partial(Gpt, 4, 128, 4, 500), partial(torch.empty, (4, 128), dtype=torch.long)),
    "unet": _of_ours("unet", 2, 128),
    "unet3d": _of_ours("unet3d", 1, 32),
    "vgg16_bn": _of_ours("vgg16_bn", 8, 96),
    "resnet18": _of_ours("resnet18", 8, 96),
    "mobilenet_v2": _of_ours("mobilenet_v2", 16, 96),
    "resnet50": _of_ours("resnet50", 8, 128, (40,)),
    "densenet121": _of_ours("densenet121", 8, 96, (40,)),
}
QUICK_STEPS = {"residual": Step(partial(Residual, 2), partial(torch.empty, 4, 3, 16, 16), (60,))}


def captured(name: str, step: Step) -> StepGraph:
    """The step on the meta device, with the link of `HARDWARE`."""
    with torch.device("meta"):
        return shoal.plan(step.make(), step.inputs(), hardware=HARDWARE, name=name).graph


def planned(graph: StepGraph, budget_bytes: int, limits: Limits) -> dict[str, Any]:
    """Seconds of the step inside a budget, None if no plan was found, and CPU seconds of planning.

    Raises:
        WrongResult: the plan breaks a rule.
    """
    started = time.process_time()
    try:
        plan = joint(graph, HARDWARE, budget_bytes, limits=limits)
    except BudgetError:
        return {"seconds": None, "planning_seconds": time.process_time() - started}
    planning_seconds = time.process_time() - started
    try:
        check_order(graph, plan.graph)
        check_plan(plan.graph, plan.residences, budget_bytes)
    except PlanError as error:
        raise WrongResult(f"{graph.model} inside {format_bytes(budget_bytes)} with {limits}: {error}") from error
    return {"seconds": plan.predicted_seconds, "planning_seconds": planning_seconds}


def measure(name: str, graph: StepGraph, shares: Sequence[int], without: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each budget of one step, with what each inference changes.

    Raises:
        WrongResult: a plan breaks a rule, or does not fit in the smallest peak that was named.
    """
    kept = keep_all(graph, HARDWARE, 0)
    limits = {"": Limits(guard_seconds=1e9)}
    limits |= {off: replace(limits[""], **{off: False}) for off in without}  # type: ignore[arg-type]
    least, least_seconds = {}, {}
    for off, one in limits.items():
        started = time.process_time()
        least[off] = smallest_plan(graph, HARDWARE, fewest_bytes(graph), one).predicted_peak_bytes
        least_seconds[off] = time.process_time() - started
    budgets = {f"{share} %": kept.predicted_peak_bytes * share // 100 for share in shares}
    budgets = {share: nbytes for share, nbytes in budgets.items() if nbytes > least[""]} | {MINIMUM: least[""]}
    rows = []
    for share, budget_bytes in budgets.items():
        found = {off: planned(graph, budget_bytes, one) for off, one in limits.items()}
        if (seconds := found[""]["seconds"]) is None:
            raise WrongResult(
                f"{name} at {share}: no plan fits in the smallest peak named, {format_bytes(budget_bytes)}"
            )
        row = {
            "network": name,
            "link": graph.link is not None,
            "budget": share,
            "budget_bytes": budget_bytes,
            "added_percent": 100 * (seconds / kept.predicted_seconds - 1),
            "planning_seconds": found[""]["planning_seconds"],
            "without": {
                off: {**found[off], "slower_percent": _percent(found[off]["seconds"], seconds)} for off in without
            },
        }
        if share == MINIMUM:
            row["planning_seconds"] += least_seconds[""]
            for off in without:
                row["without"][off]["larger_percent"] = _percent(least[off], least[""])
                row["without"][off]["planning_seconds"] += least_seconds[off]
        rows.append(row)
    return rows


def _percent(one: float | None, other: float) -> float | None:
    return None if one is None else 100 * (one / other - 1)


def tables(result: Mapping[str, Any]) -> list[Table]:
    """What each inference is worth over all rows, and in each of them."""
    rows = result["rows"]
    worth = new_table(
        "Each inference off in turn",
        "<without | rows | slower in | by at most | no plan found in | faster in | by at most "
        "| minimum larger by at most | planned in, CPU s | with it",
    )
    switches = list(dict.fromkeys(off for row in rows for off in row["without"]))
    for off in switches:
        with_it = [row for row in rows if off in row["without"]]
        found = [row["without"][off] for row in with_it]
        times = [one["slower_percent"] for one in found if one["slower_percent"] is not None]
        slower, faster = (
            [one for one in times if one > _WORTH_PERCENT],
            [-one for one in times if one < -_WORTH_PERCENT],
        )
        larger = [one["larger_percent"] for one in found if one.get("larger_percent", 0) > _WORTH_PERCENT]
        numbers = [len(found), len(slower), _shown(slower), sum(one["seconds"] is None for one in found)]
        numbers += [len(faster), _shown(faster), _shown(larger)]
        seconds = [sum(one["planning_seconds"] for one in of) for of in (found, with_it)]
        worth.add_row(off, *map(str, numbers), *(f"{one:.0f}" for one in seconds))
    each = new_table(
        "Seconds of the step without each, against all of them; at the minimum also how much larger that is",
        "<network | <budget | added | " + " | ".join(switches),
    )
    for row in rows:
        network = f"{row['network']}, {'offloading' if row['link'] else 'no link'}"
        changes = (_changed(row["without"].get(off)) for off in switches)
        each.add_row(network, row["budget"], f"{row['added_percent']:+.2f} %", *changes)
    return [worth, each]


def _shown(percents: Sequence[float]) -> str:
    return f"{max(percents):.1f} %" if percents else ""


def _changed(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    slower, larger = found["slower_percent"], found.get("larger_percent", 0.0)
    parts = ["none" if slower is None else f"{slower:+.1f} %" if abs(slower) > _WORTH_PERCENT else ""]
    parts += [f"{larger:+.1f} % bytes"] if abs(larger) > _WORTH_PERCENT else []
    return ", ".join(filter(None, parts))


def _run(run: Run) -> None:
    without = some_of("--without", run.asked.without or SWITCHES, SWITCHES)
    rows: list[dict[str, Any]] = []
    for name, step in run.chosen(STEPS, QUICK_STEPS).items():
        graph = captured(name, step)
        of_a_link = [off for off in without if off in OF_A_LINK]
        rows += measure(name, replace(graph, link=None), step.shares, [off for off in without if off not in OF_A_LINK])
        rows += measure(name, graph, step.shares, of_a_link) if of_a_link else []
        run.save(rows=rows)
    run.say(*tables({"rows": rows}))


main = Bench(
    _run,
    NETWORKS,
    option("--without", known=SWITCHES, help=f"inferences to switch off, of {', '.join(SWITCHES)}; by default all"),
    quick="one small network: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
