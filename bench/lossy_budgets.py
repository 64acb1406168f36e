"""What encoding costs and saves: `joint` with and without "encode" in `allow=`, at small budgets.

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

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import nn

from bench.frame import (
    NETWORKS,
    Bench,
    Run,
    WrongResult,
    option,
    percentages,
    switch,
    use_exact_kernels,
)
from bench.ours import Ours, run_within
from bench.plain import Plain, heading, plan_columns
from bench.tables import cells, new_table
from bench.workload import Forward, make_workload
from examples.networks.vgg import CONVOLUTIONS, WIDTHS
from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.sizes import format_bytes
from shoal.engine.options import Options
from shoal.errors import BudgetError

SHARES = (50.0, 33.0, 25.0, 20.0, 15.0)
QUICK_SHARES = (90.0, 78.0)  # parameters are a large part of so small a step
ALLOW = {"exact": "bitwise", "lossy": "bitwise, encode"}  # bits are compared
CONTENDERS = tuple(ALLOW)


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
    `examples.networks`."""

    batch: int
    image: int
    make: Callable[[], nn.Module] | None = None


SETTINGS = {"resnet18": Setting(32, 224), "vgg16 of half the width": Setting(32, 112, lambda: narrow_vgg(2))}
QUICK_SETTINGS = {"vgg16 of an eighth of the width": Setting(8, 64, lambda: narrow_vgg(8))}


def check_forward(plain: Plain, forward: Forward, who: str) -> str:
    """Take two steps, one of which may measure what is lost, and hold all but the gradients against plain PyTorch's.

    Raises:
        WrongResult: the loss, a buffer or the random numbers differ.
    """
    for _ in range(2):
        plain.reference.start()
        plain.workload.reset()
        wrong = plain.reference.differences(plain.workload.step(forward))
    wrong = [name for name in wrong if not name.startswith("gradient of ")]
    if wrong:
        raise WrongResult(f"{plain.workload.name}, {who}: differs from plain PyTorch in {', '.join(wrong[:6])}")
    return "all but gradients"


def measure_network(
    name: str,
    setting: Setting,
    shares: Sequence[float],
    encoding: Options,
    link: Hardware | None,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """Both contenders at every budget, as plain values."""
    made = None
    if setting.make is not None:
        torch.manual_seed(seed)
        made = setting.make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    known = "vgg19_cifar" if made is not None else name  # for the shape of its input
    workload = make_workload(known, setting.batch, setting.image, seed=seed, model=made)
    plain = Plain(workload)
    runs: dict[tuple[float, str], Ours] = {}
    gradient_errors: dict[tuple[float, str], dict[str, float]] = {}
    refused: dict[tuple[float, str], BudgetError] = {}
    for share in shares:
        for contender in CONTENDERS:
            how = replace(encoding if contender == "lossy" else Options(), rehearse=link)
            try:
                check = partial(check_forward, plain) if contender == "lossy" else None
                budget_bytes = plain.budget_bytes(share)
                runs[share, contender] = run_within(
                    plain, budget_bytes, check=check, allow=ALLOW[contender], options=how
                )
                gradient_errors[share, contender] = plain.reference.gradient_errors()
            except BudgetError as error:
                refused[share, contender] = error
    times = plain.in_turns({key: run.forward for key, run in runs.items()}, repeats)

    def columns(share: float, contender: str) -> dict[str, Any]:
        key = (share, contender)
        if key in refused:
            error = refused[key]
            return {"feasible": False, "least_feasible_bytes": error.least_feasible_bytes}
        run = runs[key]
        return {
            "feasible": True,
            **times.columns(key),
            **plan_columns(run.plan),
            "measured_peak_bytes": run.measured_peak_bytes,
            "activation_errors": dict(run.plan.errors),
            "gradient_errors": gradient_errors[key],
        }

    return {
        "network": name,
        "setting": {"batch": setting.batch, "image": setting.image},
        "lossy": encoding.encoding.describe(),
        "link": link.link.name if link is not None else None,
        "plain": plain.columns(times),
        "rows": [
            {"share": share, "budget_bytes": plain.budget_bytes(share)}
            | {contender: columns(share, contender) for contender in CONTENDERS}
            for share in shares
        ],
    }


def network_table(result: dict[str, Any]) -> Table:
    """One row a budget."""
    table = new_table(
        escape(f"{heading(result)}; lossy: {result['lossy']}"),
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
    '1 budgets: with encoding faster in 0, as fast in 0, slower in 0, alone feasible in 0, infeasible in 1'
    """
    counts = dict.fromkeys(("faster", "as fast", "slower", "alone feasible", "infeasible"), 0)
    rows = [row for result in results for row in result["rows"]]
    for row in rows:
        counts[verdict(row)] += 1
    reported = ", ".join(f"{verdict} in {count}" for verdict, count in counts.items())
    return f"{len(rows)} budgets: with encoding {reported}"


def verdict(row: dict[str, Any]) -> str:
    """How `joint` with encoding fares beside `joint` without, by measured time; 2 % of the plain step are noise."""
    exact, lossy = row["exact"], row["lossy"]
    if not lossy["feasible"]:
        return "infeasible" if not exact["feasible"] else "slower"
    if not exact["feasible"]:
        return "alone feasible"
    gap = lossy["added_percent"] - exact["added_percent"]
    return "slower" if gap > 2 else "as fast" if gap > -2 else "faster"


def _run(run: Run) -> int:
    asked, settings = run.asked, run.chosen(SETTINGS, QUICK_SETTINGS)
    shares = asked.budgets or run.pick(SHARES, QUICK_SHARES)
    exempt = ("first_layer",) if asked.encode_batch_norms else ("batch_norm", "first_layer")
    encoding = Options(codec=asked.codec, codec_block=asked.block or None, codec_exempt=exempt)
    link = presets.get(asked.rehearse) if asked.rehearse else None
    use_exact_kernels()
    results: list[dict[str, Any]] = []
    for name, setting in settings.items():
        results.append(measure_network(name, setting, shares, encoding, link, asked.repeats, asked.seed))
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
    NETWORKS,
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
