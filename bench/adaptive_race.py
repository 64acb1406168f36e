"""A2DTWP over seeds: time to a validation error, with INTERVAL and T as the paper chooses them.

    python -m bench.adaptive_race                             VGG-A, 3 seeds: half an hour on a core, then 3 minutes
    python -m bench.adaptive_race --part training --networks alexnet
    python -m bench.adaptive_race --part steps --resume FILE  the other half
    python -m bench.adaptive_race --quick                     small: does it run?

Training is that of `bench.adaptive_training`, narrow networks on CIFAR-10, six epochs of 10 000 images: long enough
that norms fall, as in the paper, and T is negative. INTERVAL is one epoch; "for longer": two thirds of the steps, so
that weights travel in as few bytes as the paper's did. Errors are means over the looks of an epoch, for a constant
learning rate leaves single looks several points apart. The given error of a seed is the least that its 32-bit run had
within four fifths of the steps; `--error` gives another.

Seconds of a step are measured at full layer shapes (`bench.adaptive_steps`), with each fixed width, and those of mixed
widths taken linear in the mean bytes between them; AWP's steps take its norms besides. So the time of a run is
composed, not one by the clock. Rows where it loses stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn

from bench import adaptive_steps as steps
from bench import adaptive_training as training
from bench.adaptive_precision import QUICK_SIZE, SIZES, weights_of
from bench.adaptive_training import NETWORKS, smoothed, steps_to
from bench.frame import Bench, Run, option
from bench.split_accuracy import images_of
from bench.tables import new_table
from shoal.distributed.weights.precision import packable

CONTENDERS = (training.BASELINE, training.AWP, training.AWP_TREE, training.AWP_TREE_LATE, training.TREE, "16 bits")
_GIVEN_SHARE = 0.8
_ONE_BYTE = "dynamic_tree"
Seconds = Mapping[str, Any]


def given_error(baseline: Mapping[str, Any], looks: int) -> float:
    """The least smoothed error within the first four fifths of a run."""
    last = _GIVEN_SHARE * baseline["steps"][-1]
    found = smoothed(baseline, looks)
    return min((error for step, error in found if step <= last), default=found[0][1])


def mean_bytes(widths: Mapping[str, int], elems: Mapping[str, int], by_block: Mapping[str, Sequence[str]]) -> float:
    """Bytes a weight travels in, over all of the full network's.

    >>> mean_bytes({"a": 1, "b": 2}, {"a.x": 10, "a.y": 20, "b": 10}, {"a": ["a.x", "a.y"], "b": ["b"]})
    1.25
    """
    total = sum(widths[group] * elems[name] for group, names in by_block.items() for name in names)
    return total / sum(elems.values())


def seconds_to(
    contender: str,
    run: Mapping[str, Any],
    until: int,
    measured: Seconds,
    elems: Mapping[str, int],
    by_block: Mapping[str, Sequence[str]],
) -> float:
    """The composed seconds of a run up to a step."""
    if contender in measured["fixed"]:
        return until * float(measured["fixed"][contender])
    first = measured["fixed"][training.TREE if training.WAYS[contender].one_byte else "8 bits"]
    points = [first, *(measured["fixed"][name] for name in ("16 bits", "24 bits", training.BASELINE))]
    return sum(
        lasted * (float(np.interp(sent, [1, 2, 3, 4], points)) + measured["norms"])
        for lasted, sent in spans(run, until, elems, by_block)
    )


def spans(
    run: Mapping[str, Any], until: int, elems: Mapping[str, int], by_block: Mapping[str, Sequence[str]]
) -> Iterator[tuple[int, float]]:
    """The steps that each of a run's widths lasted up to a step, and the mean bytes of a weight."""
    ends = [*(step for step, _ in run["widths"][1:]), until]
    for (begin, widths), end in zip(run["widths"], ends, strict=True):
        yield max(0, min(end, until) - begin), mean_bytes(widths, elems, by_block)


def table(network: str, runs: Mapping[str, Any], looks: int, measured: Seconds | None, error: float | None) -> Table:
    """A row for each seed and contender."""
    shown = new_table(
        f"{network}: steps and composed time to a validation error",
        "seed | error | <contender | steps | mean bytes until then | time, of 32 bits | last epoch",
    )
    model = NETWORKS[network].narrow()
    elems = full_elems(network)
    for seed in sorted({seed for each in runs.values() for seed in each}):
        baseline = runs[training.BASELINE][seed]
        given = given_error(baseline, looks) if error is None else error
        whole = _time(training.BASELINE, baseline, given, looks, measured, model, elems)
        for contender, each in runs.items():
            if seed not in each:
                continue
            run = each[seed]
            until = steps_to(run, given, looks)
            mine = _time(contender, run, given, looks, measured, model, elems)
            shown.add_row(
                seed,
                f"{given:.1f} %",
                contender,
                "never" if until is None else str(until),
                _mean_bytes(run, until or run["steps"][-1], model, elems),
                "" if mine is None or whole is None else f"{100 * (mine / whole - 1):+.1f} %",
                f"{smoothed(run, looks)[-1][1]:.1f} %",
            )
    return shown


def full_elems(network: str) -> dict[str, int]:
    """Of each weight of the full network that may be packed."""
    with torch.device("meta"):
        weights = dict(_shapes(NETWORKS[network].full()))
    return weights


def _shapes(model: nn.Module) -> Iterable[tuple[str, int]]:
    parameters = dict(model.named_parameters())
    return ((name, parameters[name].numel()) for name in packable(model))


def _time(
    contender: str,
    run: Mapping[str, Any],
    given: float,
    looks: int,
    measured: Seconds | None,
    model: nn.Module,
    elems: Mapping[str, int],
) -> float | None:
    until = steps_to(run, given, looks)
    if until is None or measured is None:
        return None
    by_block = weights_of(model, run["widths"][0][1]) if run["widths"] else {}
    return seconds_to(contender, run, until, measured, elems, by_block)


def _mean_bytes(run: Mapping[str, Any], until: int, model: nn.Module, elems: Mapping[str, int]) -> str:
    if not run["widths"]:
        return ""
    by_block = weights_of(model, run["widths"][0][1])
    return f"{sum(lasted * sent for lasted, sent in spans(run, until, elems, by_block)) / until:.2f}"


def measure(network: str, quick: bool, rounds: int) -> dict[str, Any]:
    """Seconds of a step at full shapes with each fixed width, and of the norms."""
    torch.manual_seed(0)
    make = NETWORKS[network].narrow if quick else NETWORKS[network].full
    vgg = NETWORKS["vgg_a"].narrow() if quick else NETWORKS["vgg_a"].full()
    sizes = dict.fromkeys(NETWORKS, QUICK_SIZE) if quick else SIZES
    link = steps.paper_link(vgg, steps.computation_seconds(vgg, sizes["vgg_a"], 1 if quick else 2), sizes["vgg_a"])
    model = vgg if network == "vgg_a" else make()
    link = steps.faster(link, NETWORKS[network].batch / sizes[network].images)
    names = packable(model)
    plans = {name: dict.fromkeys(names, width) for name, width in steps.WIDTHS_BYTES.items()}
    cut = steps.profile(model, sizes[network], link, plans, rounds)
    tree = steps.profile(
        model, sizes[network], link, {training.TREE: plans["8 bits"], "again 32": plans["32 bits"]}, rounds, _ONE_BYTE
    )
    both = {**cut, **tree}
    return {
        "size": vars(sizes[network]),
        "link": vars(link),
        "fixed": {name: both[name]["step_seconds"] for name in (*plans, training.TREE)},
        "norms": steps.norm_seconds(model, 1 if quick else 5)["shoal"][0],
        "measured": both,
    }


def _run(run: Run) -> None:
    asked, pace = run.asked, run.pick(training.LONG, training.QUICK)
    run.result = {"runs": {}, "steps": {}} | run.resume("runs", "steps", pace=vars(pace)) | run.result
    run.result["pace"] = vars(pace)
    if asked.part in ("training", "all"):
        _train(run, pace)
    for network in asked.networks if asked.part in ("steps", "all") else ():
        run.result["steps"][network] = measure(network, asked.quick, asked.rounds)
        run.save()
    for network, runs in run.result["runs"].items():
        run.say(table(network, runs, pace.looks, run.result["steps"].get(network), asked.error))
    run.save()


def _train(run: Run, pace: training.Pace) -> None:
    data = images_of(run.device)
    for network in run.asked.networks:
        runs = run.result["runs"].setdefault(network, {name: {} for name in CONTENDERS})
        for contender in CONTENDERS:  # one after another, so that a run that is cut short has whole rows
            for seed in map(str, range(run.asked.seeds)):
                if seed not in runs[contender]:
                    threshold = runs[training.BASELINE].get(seed, {}).get("threshold")
                    made = NETWORKS[network]
                    runs[contender][seed] = training.run_of(made, contender, pace, data, int(seed), threshold)
                    run.save()


main = Bench(
    _run,
    option("--part", choices=("training", "steps", "all"), default="all"),
    option("--networks", known=NETWORKS, default=["vgg_a"]),
    option("--seeds", type=int, default=3),
    option("--rounds", type=int, default=3, help="measured steps of each width"),
    option("--error", type=float, help="race to this validation error in percent, whatever 32 bits do"),
    resume="a file of results: what was trained is not trained again",
)

if __name__ == "__main__":
    sys.exit(main())
