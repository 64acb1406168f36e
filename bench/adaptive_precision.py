"""A2DTWP: weights that travel to the device in 1 to 4 bytes, against 32 bits and a bfloat16 cast; tables II and III.

    python -m bench.adaptive_precision                       both parts: half an hour on two cores
    python -m bench.adaptive_precision --part training       what widths do to learning: narrow networks on CIFAR-10
    python -m bench.adaptive_precision --part steps          what they do to a step's time: full layer shapes
    python -m bench.adaptive_precision --quick               small: does it run?

The two parts are measured apart and joined in the last table: steps to a validation error come from training a narrow
form of each network (the same layers under the same names), seconds of a step from the full layer shapes over a link
whose speed beside this CPU is that of the paper's beside its GPUs (see `bench.adaptive_steps`). AWP's step time is that
of the widths its layers really had in training, at four points of the way. T is derived as the paper does, from the
32-bit run; INTERVAL is two thirds of the steps. The paper's oracle is the best fixed width. Rows where it loses stay.

The thread that copies needs a core: run it with OMP_NUM_THREADS one below the number of cores.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn

from bench import adaptive_steps as steps
from bench import adaptive_training as training
from bench.adaptive_training import NETWORKS
from bench.frame import Bench, Run, option
from bench.split_accuracy import images_of
from bench.tables import cells, new_table
from shoal.distributed.weights.precision import packable

SIZES = {"alexnet": steps.Size(8, 224), "vgg_a": steps.Size(4, 224), "resnet34": steps.Size(4, 224)}
QUICK_SIZE = steps.Size(2, 32)
CODECS = ("truncate1", "truncate2", "truncate3", "round1", "round2", "round3", "bf16")
_GIVEN_SHARE = 0.8  # of the baseline's steps: the error it has reached by then is the given one
Runs = Mapping[str, Mapping[str, Any]]


def given_error(baseline: Mapping[str, Any]) -> float:
    """The validation error that contenders race to: the baseline's best within most of its run."""
    errors = baseline["errors_percent"]
    return min(errors[: max(1, round(_GIVEN_SHARE * len(errors)))])


def phases(
    run: Mapping[str, Any], until: int, by_block: Mapping[str, Sequence[str]], parts: int = 4
) -> list[tuple[float, steps.Widths]]:
    """The widths a run had in the middle of each of so many parts of its way to a step: the share of the steps, and the
    bytes of each weight; neighbours with the same widths are one."""
    found: list[tuple[float, steps.Widths]] = []
    for part in range(parts):
        middle = until * (part + 0.5) / parts
        widths = [widths for step, widths in run["widths"] if step <= middle][-1]
        each = {name: widths[group] for group in widths for name in by_block.get(group, [group])}
        if found and found[-1][1] == each:
            found[-1] = found[-1][0] + 1 / parts, each
        else:
            found.append((1 / parts, each))
    return found


def weights_of(model: nn.Module, widths: Mapping[str, int]) -> dict[str, list[str]]:
    """The weights of each layer or block that widths are given by."""
    return {
        group: [name for name in packable(model) if name == group or name.startswith(f"{group}.")] for group in widths
    }


def plans_of(model: nn.Module, runs: Runs | None) -> tuple[dict[str, steps.Widths], dict[str, list[float]]]:
    """The widths to measure steps with: fixed ones, and those of each phase of each AWP; and the phases' shares."""
    names = packable(model)
    plans: dict[str, steps.Widths] = {name: dict.fromkeys(names, width) for name, width in steps.WIDTHS_BYTES.items()}
    shares: dict[str, list[float]] = {}
    for contender in (training.AWP, training.AWP_NEAREST):
        run = (runs or {}).get(contender)
        if run is None:
            continue
        assert runs is not None
        until = training.steps_to(run, given_error(runs[training.BASELINE])) or run["steps"][-1]
        for number, (share, widths) in enumerate(phases(run, until, weights_of(model, run["widths"][0][1]))):
            plans[f"{contender} {number}"] = widths
            shares.setdefault(contender, []).append(share)
    return plans, shares


def of_contenders(measured: Mapping[str, Any], shares: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """By contender, phases weighed by their shares; a bfloat16 cast takes what two bytes take."""
    found: dict[str, dict[str, Any]] = {name: dict(measured[name]) for name in steps.WIDTHS_BYTES}
    found["bf16 cast"] = dict(measured["16 bits"])
    for contender, weights in shares.items():
        of_phases = [measured[f"{contender} {number}"] for number in range(len(weights))]

        def mean(values: Sequence[float], weights: Sequence[float] = weights) -> float:
            return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

        found[contender] = {
            key: mean([phase[key] for phase in of_phases]) for key in ("step_seconds", "sent_bytes", "raw_bytes")
        }
        found[contender]["parts"] = {
            part: mean([phase["parts"][part] for phase in of_phases]) for part in of_phases[0]["parts"]
        }
    return found


def profile_table(network: str, contenders: Mapping[str, Mapping[str, Any]], computation_seconds: float) -> Table:
    """Tables II and III for one network: milliseconds, and the paper's columns for VGG-A."""
    paper = network == "vgg_a"
    theirs_titles = ("x86 32-bit", "x86 A2DTWP", "POWER 32-bit", "POWER A2DTWP") if paper else ()
    shown = new_table(
        f"{network}: milliseconds of a step's parts, each by itself (the paper: VGG-A, batch 64)",
        " | ".join(["<part", *contenders, *theirs_titles]),
    )
    rows = ("weights to device", "norm", "pack", "unpack", "update", "waited for weights", "waited for gradients")
    for part in rows:
        cells = [f"{1e3 * found['parts'][part]:.1f}" for found in contenders.values()]
        theirs = [value for column in steps.PAPER_MS.get(part, ((None, None), (None, None))) for value in column]
        shown.add_row(part, *cells, *(("" if value is None else f"{value:g}") for value in (theirs if paper else ())))
    shown.add_row("forward and backward", *[f"{1e3 * computation_seconds:.1f}"] * len(contenders))
    shown.add_row("step", *(f"{1e3 * found['step_seconds']:.1f}" for found in contenders.values()))
    shown.add_row("AWP + ADT, of the step", *(f"{overhead_percent(found):.1f} %" for found in contenders.values()))
    baseline = contenders["32 bits"]["parts"]["weights to device"]
    ratios = (baseline / found["parts"]["weights to device"] for found in contenders.values())
    shown.add_row(
        "weights' transfer, times faster", *(f"{ratio:.2f}" for ratio in ratios), *(["", "2.94", "", "3.20"] * paper)
    )
    return shown


def overhead_percent(found: Mapping[str, Any]) -> float:
    """Norms, packing and unpacking as a share of the step."""
    parts = found["parts"]
    return 100 * (parts["norm"] + parts["pack"] + parts["unpack"]) / found["step_seconds"]


def race_table(network: str, runs: Runs, contenders: Mapping[str, Mapping[str, Any]]) -> Table:
    """Time to a given validation error: trained steps times measured seconds."""
    error = given_error(runs[training.BASELINE])
    shown = new_table(
        f"{network}: to a validation error of {error:.1f} %",
        "<contender | steps | s a step | bytes a step, of 32 bits | time, of 32 bits | last error | best",
    )
    whole = race_seconds(runs, contenders, training.BASELINE)
    for name, run in runs.items():
        mine, found = race_seconds(runs, contenders, name), contenders[name]
        errors, taken = run["errors_percent"], training.steps_to(run, error)
        figures = {
            "steps": "never" if taken is None else taken,
            "sent": 100 * found["sent_bytes"] / found["raw_bytes"],
            "time": None if mine is None or whole is None else 100 * (mine / whole - 1),
        }
        form = "{steps} | {step_seconds:.2f} | {sent:.1f} % | {time:+.1f} % | {last:.1f} % | {best:.1f} %"
        shown.add_row(name, *cells(form, found | figures, last=errors[-1], best=min(errors)))
    return shown


def race_seconds(runs: Runs, contenders: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """Steps to the given error times the seconds of a step; None if it never gets there."""
    taken = training.steps_to(runs[name], given_error(runs[training.BASELINE]))
    return None if taken is None else taken * contenders[name]["step_seconds"]


def codec_table(found: Mapping[str, Mapping[str, float]]) -> Table:
    shown = new_table(
        "Packing all weights of VGG-A, and the mean relative bias of what comes back",
        "<codec | bytes a weight | pack ms | unpack ms | bias",
    )
    for name, row in found.items():
        shown.add_row(*cells("{name} | {bytes:g} | {pack:ms} | {unpack:ms} | {bias_percent:+.4f} %", row, name=name))
    return shown


def train_all(run: Run) -> None:
    """Train what the result does not hold yet."""
    data = images_of(run.device)
    pace = run.pick(training.SHORT, training.QUICK)
    run.result["pace"] = vars(pace)
    for network in run.asked.networks:
        runs = run.result["training"].setdefault(network, {})
        for contender in run.pick(training.CONTENDERS, (training.BASELINE, training.AWP, "bf16 cast")):
            if contender not in runs:
                threshold = runs.get(training.BASELINE, {}).get("threshold")
                runs[contender] = training.run_of(NETWORKS[network], contender, pace, data, run.asked.seed, threshold)
                run.save()
        run.say(f"{network}: T = {runs[training.BASELINE]['threshold']:.2e}")


def measure_all(run: Run) -> None:
    """Measure steps with each width; the link and the codecs where the result does not hold them yet."""
    sizes = run.pick(SIZES, dict.fromkeys(NETWORKS, QUICK_SIZE))
    repeats = run.pick(2, 1)
    if "link" not in run.result:
        vgg = _network("vgg_a", run.asked.quick)
        seconds = steps.computation_seconds(vgg, sizes["vgg_a"], repeats)
        timed = steps.codec_seconds(vgg, CODECS, run.pick(3, 1))
        weight = dict(vgg.named_parameters())[packable(vgg)[4]].detach()
        codecs = {
            name: {
                "pack": timed[name][0],
                "unpack": timed[name][1],
                "bytes": steps.codecs.get(name).bytes_for((8,)) / 8,
                "bias_percent": steps.bias_percent(weight, name),
            }
            for name in CODECS
        }
        link = vars(steps.paper_link(vgg, seconds, sizes["vgg_a"]))
        run.save(link=link, codecs=codecs, norms=steps.norm_seconds(vgg, run.pick(5, 1)))
        del vgg, weight
    for network in run.asked.networks:
        size, batch = sizes[network], NETWORKS[network].batch
        link = steps.faster(steps.Link(**run.result["link"]), batch / size.images)
        model = _network(network, run.asked.quick)
        plans, shares = plans_of(model, run.result["training"].get(network))
        run.result["steps"][network] = {
            "size": vars(size),
            "computation_seconds": steps.computation_seconds(model, size, repeats),
            "measured": steps.profile(model, size, link, plans, run.asked.rounds),
            "shares": shares,
        }
        run.save()
        images = f"{size.images} images of a batch of {batch}, {size.pixels} pixels"
        run.say(f"{network}: {images}, {link.to_device_bytes_per_second / 1e6:.1f} MB/s to the device")


def _network(name: str, quick: bool) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name].narrow() if quick else NETWORKS[name].full()


def show(run: Run) -> None:
    """Every table that there are figures for."""
    if "codecs" in run.result:
        run.say(codec_table(run.result["codecs"]))
        for name, (seconds, error) in run.result["norms"].items():
            run.say(f"Norms of VGG-A by {name}: {1e3 * seconds:.1f} ms, relative error {error:.1e}")
    for network, found in run.result["steps"].items():
        contenders = of_contenders(found["measured"], found["shares"])
        run.say(profile_table(network, contenders, found["computation_seconds"]))
        if runs := run.result["training"].get(network):
            run.say(race_table(network, runs, contenders))


def _run(run: Run) -> None:
    run.result = {"training": {}, "steps": {}} | run.resume("training", "steps") | run.result
    if run.asked.part in ("training", "all"):
        train_all(run)
    if run.asked.part in ("steps", "all"):
        measure_all(run)
    show(run)
    run.save()


main = Bench(
    _run,
    option("--part", choices=("training", "steps", "all"), default="all"),
    option("--networks", known=NETWORKS, default=list(NETWORKS)),
    option("--rounds", type=int, default=2, help="measured steps of each contender"),
    resume="a file of results: what was trained is not trained again",
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
