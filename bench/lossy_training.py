"""Whether a network whose convolution inputs wait in 8 bits learns what it learns exactly, and what that saves.

    python -m bench.lossy_training                    narrow networks, three seeds: a quarter of an hour on two cores
    python -m bench.lossy_training --quick            one run of each kind on a few images: does it run?
    python -m bench.lossy_training --full --device cuda    the papers' networks and 350 epochs

Trains a VGG and a ResNet with batch norm on CIFAR-10 from the same start and over the same batches for each seed: in
plain PyTorch, and with `shoal.compile` where every convolution input that may be encoded is, whatever a budget would
ask for. Peaks and saved bytes are those of one step, exact, from the allocator's events. Before anything is trained,
the encoded step's outputs are held against the exact ones bit for bit, and the error of each weight's gradient is
measured. A difference in test error below two standard errors over the seeds is reported as none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import Bench, Run, WrongResult, option
from bench.inverted_steps import saved_bytes
from bench.split_accuracy import (
    FULL,
    NARROW,
    TRAINING_OPTIONS,
    WHOLE,
    Pace,
    error_percent,
    finding,
    images_of,
    mean_and_spread,
    paced,
    train,
)
from bench.tables import new_table
from bench.workload import Workload
from shoal.capture.capture_step import capture_step
from shoal.capture.encode_activations import offers
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.lossy_report import plan_of_encoded
from shoal.engine.options import Options
from shoal.errors import InputError

EXACT = "exact"
WAYS: Mapping[str, Options] = {
    "dynamic_tree": Options(codec="dynamic_tree"),
    "dynamic_tree, stochastic": Options(codec="dynamic_tree", codec_seed=1),
    "linear": Options(codec="linear"),
    "linear, stochastic": Options(codec="linear", codec_seed=1),
}
DEFAULT_WAYS = ("dynamic_tree",)
# Whole batches only: a plan is for one shape.
QUICK = Pace(128, 1, 64, 0.05)
SHORT = Pace(4_992, 5, 32, 0.05)
FULL_PACE = Pace(49_920, WHOLE.epochs, WHOLE.batch, WHOLE.rate, WHOLE.steps_down)

Split = tuple[torch.Tensor, torch.Tensor]


def built(build: Callable[[], nn.Module], data: Split, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net: nn.Module = build().to(data[0].device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def first_batch(split: Split, pace: Pace) -> Split:
    """Of storages of its own: a plan knows how many bytes those of its inputs have."""
    images, labels = split
    return images[: pace.batch].clone(), labels[: pace.batch].clone()


def encodes_all(net: nn.Module, images: torch.Tensor, lossy: LossyOptions) -> Plan:
    """The plan that keeps everything, and every convolution input that may be encoded in 8 bits."""
    captured, _ = capture_step(net, images, name=type(net).__name__)
    return plan_of_encoded(captured, [offer.storage for offer in offers(captured, lossy)], lossy)


def compiled(net: nn.Module, images: torch.Tensor, options: Options | None) -> nn.Module:
    """The network, in place: exact with everything kept, or with all that may be encoded."""
    if options is None:
        return shoal.compile(net, offload_to=None, options=shoal.Options(planner="keep_all"))
    return shoal.compile(net, offload_to=None, options=shoal.Options(plan=encodes_all(net, images, options.encoding)))


def bytes_of_a_step(build: Callable[[], nn.Module], batch: Split, ways: Sequence[str]) -> dict[str, dict[str, float]]:
    """Peak and saved bytes of plain PyTorch, of Shoal with everything kept, and of each way; errors of its gradients.

    Raises:
        WrongResult: the forward pass of an encoded step gives other bits.
    """
    images, labels = batch
    found: dict[str, dict[str, float]] = {}
    for way in ("plain PyTorch", EXACT, *ways):
        net = built(build, batch, seed=0).train()
        options = WAYS.get(way)
        model = net if way == "plain PyTorch" else compiled(net, images, options)
        workload = Workload(way, model, images, labels)
        for _ in range(3):  # the first ones are captured, profiled and measured
            workload.reset()
            workload.step(model)
        found[way] = {"peak_bytes": workload.peak_bytes(model), "saved_bytes": saved_bytes(workload, model)}
        if options is not None:
            status = shoal.compile(built(build, batch, seed=0)).shoal
            report = status.lossy_report(images, options, loss=lambda outputs: F.cross_entropy(outputs, labels))
            if not report.same_outputs or not report.layers:
                raise WrongResult(f"{way}: the forward pass gave other bits, or nothing is encoded")
            found[way] |= {
                "encoded_layers": len(report.layers),
                "exact_bytes": sum(layer.exact_bytes for layer in report.layers),
                "encoded_bytes": sum(layer.encoded_bytes for layer in report.layers),
                "largest_gradient_error": report.largest_error,
            }
    return found


def error_of(build: Callable[[], nn.Module], way: str, pace: Pace, data: Mapping[str, Split], seed: int) -> float:
    """Train one network; its test error in percent.

    Raises:
        InputError: the images do not fill whole batches.
    """
    if pace.images % pace.batch:
        raise InputError(f"--images {pace.images}: give a multiple of {pace.batch}; a plan is for one shape of batch")
    net = built(build, data["train"], seed)
    if way != EXACT:
        compiled(net.train(), first_batch(data["train"], pace)[0], WAYS[way])
        torch.manual_seed(seed)
    train(net, pace, data["train"], seed)
    return error_percent(net, data["test"])


def table(network: str, errors: Mapping[str, list[float]], of_a_step: Mapping[str, Mapping[str, float]]) -> Table:
    """One row a way: what it learnt, and what a step of it takes."""
    plain = of_a_step["plain PyTorch"]
    shown = new_table(
        f"{network}: test error over {len(errors[EXACT])} seeds, and the bytes of one step",
        "<trained | test error | to exact | peak | of plain | saved | of plain | gradients off by",
    )
    for way, row in of_a_step.items():
        mine = errors.get(EXACT if way == "plain PyTorch" else way, []) if way != EXACT else []
        shown.add_row(
            way if way != EXACT else "Shoal, everything kept",
            mean_and_spread(mine) if mine else "the same bits",
            finding(mine, errors[EXACT]) if way in WAYS and mine else "",
            format_bytes(int(row["peak_bytes"])),
            f"{100 * row['peak_bytes'] / plain['peak_bytes']:.1f} %",
            format_bytes(int(row["saved_bytes"])),
            f"{100 * row['saved_bytes'] / plain['saved_bytes']:.1f} %",
            f"{100 * row['largest_gradient_error']:.2f} % at most" if "largest_gradient_error" in row else "",
        )
    return shown


def _run(run: Run) -> None:
    asked = run.asked
    pace = paced(run, FULL_PACE if asked.full else run.pick(SHORT, QUICK))
    known = run.resume("errors_percent", pace=vars(pace)).get("errors_percent", {})
    data = images_of(run.device, tests=run.pick(None, 500))
    run.say(f"{pace.images} images, {pace.epochs} epochs, batches of {pace.batch}")
    run.result |= {"pace": vars(pace), "errors_percent": dict(known), "of_a_step": {}}
    for network in asked.networks:
        build = (FULL if asked.full else NARROW)[network]
        of_a_step = bytes_of_a_step(build, first_batch(data["train"], pace), asked.ways)
        run.result["of_a_step"][network] = of_a_step
        errors = run.result["errors_percent"].setdefault(network, {})
        for seed in range(run.pick(asked.seeds, 1)):
            for way in (EXACT, *asked.ways):
                if seed < len(errors.setdefault(way, [])):
                    continue
                errors[way].append(error_of(build, way, pace, data, seed))
                run.save()
        run.say(table(network, errors, of_a_step))
    run.save()


main = Bench(
    _run,
    *TRAINING_OPTIONS,
    option(
        "--ways",
        known=WAYS,
        type=lambda text: [way.strip() for way in text.split("/")],
        default=list(DEFAULT_WAYS),
        help=f"of {' / '.join(WAYS)}, with slashes between",
    ),
    quick="a few images: does it run?",
    resume="a file of the same pace: what is in it is not run again",
    device=True,
)

if __name__ == "__main__":
    sys.exit(main())
