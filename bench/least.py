"""The least budgets: the fewest bytes in which a step is planned, as it is written and on slices of the batch.

    python -m bench.least                          the networks and sizes of bench.budgets; minutes on one core
    python -m bench.least --networks unet3d
    python -m bench.least --quick                  a small network: does it run?

Nothing is run: the steps are planned on the meta device for a P100, where ops need no scratch, by the planner of least
peaks that a refusal asks first (plans on demand). Every plan is checked independently. The target is half of the bytes
besides parameters and gradients that were needed before batches were sliced.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from bench.bars_svg import Bar, bars_svg
from bench.budgets import SETTINGS
from bench.frame import CPU_TIME, NETWORKS, Bench, Run, WrongResult
from bench.interleave import Clock
from bench.network import Setting
from bench.tables import cells, new_table
from examples import networks as models
from shoal.capture.capture_step import in_dynamo
from shoal.capture.layered import Refused
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_plan
from shoal.core.variant import WHOLE, Variant
from shoal.engine.pricing import Pricing
from shoal.engine.search.priced import captured_variant
from shoal.engine.search.variants import Variants
from shoal.errors import PlanError
from shoal.planners.limits import DEFAULT
from shoal.planners.on_demand import plans_on_demand

HARDWARE = "p100-nvlink"
QUICK_SETTINGS = {"resnet18": Setting(4, 64)}
# Measured by `bench.budgets`: plain PyTorch's peak, and in percent of it what keep and recompute needed before there
# were slices.
PLAIN = {
    "googlenet": (808_452_096, 24.0),
    "unet": (2_010_120_192, 32.9),
    "unet3d": (1_085_276_160, 32.6),
    "mobilenet_v2": (1_278_214_144, 17.3),
    "resnet50": (1_858_076_672, 31.0),
    "densenet121": (1_083_179_008, 17.4),
    "vgg16_bn": (9_742_319_616, 32.8),
}
COLUMNS = (
    "<network | <input | plain | parameters and gradients | before | half | whole | on slices | slices "
    "| that step takes | planned"
)
FORMATS = (
    "{network} | {batch} x {image} | {plain_bytes:bytes} | {parameters_percent:.1f} % | {before_percent:.1f} % "
    "| {target_percent:.2f} % | {whole[percent]:.2f} % | {sliced[percent]:.2f} % | {sliced[slices]} "
    "| {sliced[times]:.1f} times | {seconds:.0f} s"
)


def _least(graph: StepGraph, variant: Variant) -> dict[str, Any]:
    """What the plan of one form with the smallest peak needs.

    Raises:
        WrongResult: the plan breaks a rule, or its peak is not what the independent check counts.
    """
    found = plans_on_demand(graph, DEFAULT)[0][0]
    try:
        check_plan(found.graph, found.residences, found.peak_bytes)
    except PlanError as error:
        raise WrongResult(f"{graph.model}, {variant}: {error}") from error
    return {"bytes": found.peak_bytes, "slices": variant.slices, "seconds": found.seconds}


def measure(name: str, setting: Setting, clock: Clock) -> dict[str, Any]:
    """The least budgets of one network; `clock` times its planning.

    Raises:
        WrongResult: a plan breaks a rule.
    """
    with torch.device("meta"):
        model = models.build(name)
        images = torch.empty(models.example_shape(name, setting.batch, setting.image))
    started = clock()
    pricing = Pricing.of(
        model, 1, hardware=HARDWARE, optimizer=None, offload_to=None, allow="exact", options=None, name=name
    )

    def read(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        variants, price = Variants(gm, pricing.options.means), pricing.prices(gm, inputs)
        found = []
        for variant in (WHOLE, *(one for one in variants.split() if one.slices)):
            try:
                graph = captured_variant(variants, price, variant)[1].graph
            except Refused:
                continue
            kept = simulate(graph, {})
            found.append(_least(graph, variant) | {"kept_bytes": kept.peak_bytes, "kept_seconds": kept.seconds})
        return found

    found = in_dynamo(model, images, read, name=name)
    plain_bytes, before_percent = PLAIN.get(name, (found[0]["kept_bytes"], None))
    for one in found:
        one["percent"] = 100 * one["bytes"] / plain_bytes
        one["times"] = one["seconds"] / found[0]["kept_seconds"]
    parameters_percent = 200 * sum(parameter.nbytes for parameter in model.parameters()) / plain_bytes
    return {
        "network": name,
        "batch": setting.batch,
        "image": setting.image,
        "plain_bytes": plain_bytes,
        "parameters_percent": parameters_percent,
        "before_percent": before_percent,
        "target_percent": None if before_percent is None else (before_percent + parameters_percent) / 2,
        "whole": found[0],
        "sliced": min(found, key=lambda one: one["bytes"]),
        "forms": found,
        "seconds": clock() - started,
    }


def chart(result: Mapping[str, Any]) -> str:
    """The least of each network, in percent of plain PyTorch's peak."""
    bars = [
        Bar(f"{row['network']}: {name}", row[key]["percent"], f"{row[key]['percent']:.1f} %")
        for row in result["rows"]
        for key, name in (("whole", "whole"), ("sliced", "on slices"))
    ]
    return bars_svg("The least budgets", "in percent of plain PyTorch's peak, parameters and gradients included", bars)


def _run(run: Run) -> None:
    rows: list[dict[str, Any]] = []
    table = new_table("The least budgets, of plain PyTorch's peak", COLUMNS)
    for name, setting in run.chosen(SETTINGS, QUICK_SETTINGS).items():
        rows.append(measure(name, setting, run.clock))
        table.add_row(*cells(FORMATS, rows[-1]))
        run.save(hardware=HARDWARE, rows=rows)
    run.say(table)


main = Bench(_run, NETWORKS, CPU_TIME)

if __name__ == "__main__":
    sys.exit(main())
