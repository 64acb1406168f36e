"""What may be encoded against what must be exact: `joint` with `lossy=` beside `joint` without, at small budgets.

    python -m bench.lossy_budgets                            both networks at 50, 33, 25, 20 and 15 % of plain PyTorch
    python -m bench.lossy_budgets --quick                    a tiny network: does it run?
    python -m bench.lossy_budgets --rehearse titanx-pcie     with the host at hand, over that card's link

Budgets are shares of plain PyTorch's measured peak: forward, cross entropy and backward, channels_last float32. Exact
plans are held against plain PyTorch bit by bit before anything is timed, and so are loss and buffers of lossy ones,
whose gradients then differ: the table has the largest relative error of a parameter's gradient, in its norm. Both
contenders are timed in turns with plain PyTorch. A budget that a contender has no plan for is "infeasible", with the
least it needs.

Where parameters and gradients alone pass a budget no plan can fit; the title says what share they are.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import nn

from bench.frame import (
    Bench,
    Run,
    WrongResult,
    comma_separated,
    option,
    percentages,
    some_of,
    switch,
    use_exact_kernels,
)
from bench.interleave import median_ratio
from bench.reference import Reference, take_reference
from bench.tables import cells, new_table
from bench.workload import Forward, Workload, make_workload
from shoal.app.models.vgg import CONVOLUTIONS, WIDTHS
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.api import compile as compile_model
from shoal.errors import BudgetError

SHARES = (50.0, 33.0, 25.0, 20.0, 15.0)
CONTENDERS = ("exact", "lossy")
_WARM_UPS = 3  # two metered steps and the one that measures what was lost


def narrow_vgg(part: int) -> nn.Module:
    """VGG-16 without batch norm, of a part of its width, with one linear layer: few parameters beside activations."""
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in zip(WIDTHS, CONVOLUTIONS[16], strict=True):
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width // part, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width // part
        layers.append(nn.MaxPool2d(2))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@dataclass(frozen=True)
class Setting:
    """A step: images in the batch, pixels along each side, and the network where it is not one of
    `shoal.app.models`."""

    batch: int
    image: int
    make: Callable[[], nn.Module] | None = None


SETTINGS = {"resnet18": Setting(32, 224), "vgg16 of half the width": Setting(32, 112, lambda: narrow_vgg(2))}
QUICK_SETTINGS = {"vgg16 of an eighth of the width": Setting(8, 64, lambda: narrow_vgg(8))}


@dataclass(frozen=True)
class Measured:
    """A contender inside one budget.

    Attributes:
        forward: the model to call.
        plan: what it runs.
        peak_bytes: measured.
        gradient_errors: ||gradient - plain's|| / ||plain's|| by parameter, where they differ.
    """

    forward: Forward
    plan: Plan
    peak_bytes: int
    gradient_errors: dict[str, float]


def run_within(
    workload: Workload, reference: Reference, budget_bytes: int, lossy: Any, link: Hardware | None
) -> Measured:
    """One contender, checked and metered.

    Raises:
        BudgetError: no plan fits.
        WrongResult: its outputs differ from plain PyTorch's, or, of an exact plan, anything.
    """
    model = compile_model(workload.shared_copy(), budget_bytes, lossy=lossy, rehearse=link, name=workload.name)
    for _ in range(_WARM_UPS):
        reference.start()
        workload.reset()
        wrong = reference.differences(workload.step(model))
    differing = {name.removeprefix("gradient of ") for name in wrong if name.startswith("gradient of ")}
    forward_wrong = [name for name in wrong if not name.startswith("gradient of ")]
    if forward_wrong or (differing and lossy is None and reference.repeatable):
        raise WrongResult(f"{workload.name}, lossy={lossy}: differs from plain PyTorch in {', '.join(wrong[:6])}")
    errors = {}
    for name, parameter in workload.model.named_parameters():
        if name in differing and parameter.grad is not None:
            exact = reference.gradients[name].double()
            errors[name] = float((parameter.grad.double().cpu() - exact).norm() / exact.norm())
    reference.start()
    peak_bytes = workload.peak_bytes(model)
    plan = model.shoal.plan  # type: ignore[union-attr]
    return Measured(model, plan, peak_bytes, errors)


def measure_network(
    name: str, setting: Setting, shares: Sequence[float], lossy: Any, link: Hardware | None, repeats: int, seed: int
) -> dict[str, Any]:
    """Both contenders at every budget, as plain values."""
    made = None
    if setting.make is not None:
        torch.manual_seed(seed)
        made = setting.make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    known = "vgg19_cifar" if made is not None else name  # for the shape of its input
    workload = make_workload(known, setting.batch, setting.image, seed=seed, model=made)
    plain = workload.shared_copy()
    reference = take_reference(workload, plain)
    plain_bytes = workload.peak_bytes(plain)
    runs: dict[tuple[float, str], Measured] = {}
    refused: dict[tuple[float, str], BudgetError] = {}
    for share in shares:
        for contender, permitted in zip(CONTENDERS, (None, lossy), strict=True):
            try:
                budget_bytes = int(plain_bytes * share / 100)
                runs[share, contender] = run_within(workload, reference, budget_bytes, permitted, link)
            except BudgetError as error:
                refused[share, contender] = error
    forwards: dict[Any, Forward] = {"plain": plain, **{key: run.forward for key, run in runs.items()}}
    taken = workload.in_turns(forwards, repeats, warm_ups=1)

    def columns(share: float, contender: str) -> dict[str, Any]:
        key = (share, contender)
        if key in refused:
            error = refused[key]
            return {"feasible": False, "least_feasible_bytes": error.least_feasible_bytes}
        run = runs[key]
        plan = run.plan
        return {
            "feasible": True,
            "seconds": taken[key],
            "added_percent": 100 * (median_ratio(taken[key], taken["plain"]) - 1),
            "predicted_added_percent": 100 * plan.added_seconds / plan.plain_seconds,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": run.peak_bytes,
            "planning_seconds": plan.planning_seconds,
            "encoded_storages": len(plan.encoded),
            "encoded_bytes": sum(storage.nbytes for storage in plan.encoded),
            "payload_bytes": plan.payload_bytes,
            "codec_percent": 100 * plan.codec_seconds / plan.plain_seconds,
            "recomputed_storages": len(plan.recomputed),
            "host_bytes": plan.host_bytes,
            "activation_errors": dict(plan.errors),
            "gradient_errors": run.gradient_errors,
        }

    return {
        "network": name,
        "setting": {"batch": setting.batch, "image": setting.image},
        "lossy": lossy,
        "link": link.link.name if link is not None else None,
        "plain": {
            "peak_bytes": plain_bytes,
            "seconds": taken["plain"],
            "parameters_and_gradients_percent": 200 * workload.parameter_bytes / plain_bytes,
        },
        "rows": [
            {"share": share, "budget_bytes": int(plain_bytes * share / 100)}
            | {contender: columns(share, contender) for contender in CONTENDERS}
            for share in shares
        ],
    }


def network_table(result: dict[str, Any]) -> Table:
    """One row a budget."""
    plain, setting = result["plain"], result["setting"]
    title = (
        f"{result['network']}, {setting['batch']} x {setting['image']} pixels: plain PyTorch "
        f"{format_bytes(plain['peak_bytes'])}, {statistics.median(plain['seconds']):.2f} s a step, parameters and "
        f"gradients {plain['parameters_and_gradients_percent']:.1f} %; lossy: {result['lossy']}"
    )
    table = new_table(
        escape(title),
        "budget | exact adds | predicted | lossy adds | predicted | encoded | in | codecs | peak | off | worst "
        "gradient | planned",
    )
    for row in result["rows"]:
        exact, lossy = row["exact"], row["lossy"]
        shown = [f"{row['share']:g} %, {format_bytes(row['budget_bytes'])}", *_times(exact), *_times(lossy)]
        if lossy["feasible"]:
            off = 100 * (lossy["measured_peak_bytes"] / lossy["predicted_peak_bytes"] - 1)
            worst = 100 * max(lossy["gradient_errors"].values(), default=0.0)
            form = "{encoded_bytes:bytes} | {payload_bytes:bytes} | {codec_percent:.1f} % | "
            form += "{measured_peak_bytes:bytes} | {off:+.2f} % | {worst:.3g} % | {planning_seconds:.0f} s"
            shown += cells(form, lossy, off=off, worst=worst)
        table.add_row(*map(escape, shown))
    return table


def _times(columns: dict[str, Any]) -> list[str]:
    if not columns["feasible"]:
        return ["infeasible", f"≥ {format_bytes(columns['least_feasible_bytes'])}"]
    return [f"{columns['added_percent']:+.1f} %", f"{columns['predicted_added_percent']:+.1f} %"]


def summary_line(results: Sequence[dict[str, Any]]) -> str:
    """How often encoding was faster, or possible at all, and how good the predictions were.

    >>> row = {"exact": {"feasible": False}, "lossy": {"feasible": False}}
    >>> summary_line([{"rows": [row]}])
    '1 budgets: with lossy= faster in 0, as fast in 0, slower in 0, alone feasible in 0, infeasible in 1'
    """
    counts = dict.fromkeys(("faster", "as fast", "slower", "alone feasible", "infeasible"), 0)
    rows = [row for result in results for row in result["rows"]]
    for row in rows:
        counts[verdict(row)] += 1
    reported = ", ".join(f"{verdict} in {count}" for verdict, count in counts.items())
    return f"{len(rows)} budgets: with lossy= {reported}"


def verdict(row: dict[str, Any]) -> str:
    """How `joint` with lossy= fares beside `joint` without, by measured time; 2 % of the plain step are noise."""
    exact, lossy = row["exact"], row["lossy"]
    if not lossy["feasible"]:
        return "infeasible" if not exact["feasible"] else "slower"
    if not exact["feasible"]:
        return "alone feasible"
    gap = lossy["added_percent"] - exact["added_percent"]
    return "slower" if gap > 2 else "as fast" if gap > -2 else "faster"


def _run(run: Run) -> int:
    asked, settings = run.asked, run.pick(SETTINGS, QUICK_SETTINGS)
    names = some_of("--networks", asked.networks or list(settings), settings)
    shares = asked.budgets or run.pick(SHARES, SHARES[:2])
    exempt = ("first_layer",) if asked.encode_batch_norms else ("batch_norm", "first_layer")
    lossy = {"codec": asked.codec, "block": asked.block or None, "exempt": exempt}
    link = presets.get(asked.rehearse) if asked.rehearse else None
    use_exact_kernels()
    results: list[dict[str, Any]] = []
    for name in names:
        results.append(measure_network(name, settings[name], shares, lossy, link, asked.repeats, asked.seed))
        run.say(network_table(results[-1]))
        run.save(results=results)
    run.say(f"{summary_line(results)}")
    return int(
        any(
            row[one]["feasible"] and row[one]["measured_peak_bytes"] > row["budget_bytes"]
            for result in results
            for row in result["rows"]
            for one in CONTENDERS
        )
    )


main = Bench(
    _run,
    option("--networks", type=comma_separated, help="of " + ", ".join(SETTINGS)),
    option("--budgets", type=percentages, help="percent of plain PyTorch's peak, comma-separated"),
    option("--codec", default="dynamic_tree", help="what to encode in"),
    option("--block", type=int, default=4096, minimum=0, help="values that share a scale; 0: all of a tensor"),
    switch("--encode-batch-norms", "lift the exemption of batch norms' inputs"),
    option("--rehearse", help="a preset whose link to the host is rehearsed"),
    option("--repeats", type=int, default=5, help="timed steps of each contender"),
    quick="a tiny network, two budgets: does it run?",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
