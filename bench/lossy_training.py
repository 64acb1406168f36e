"""Whether a network whose convolution inputs wait in 8 bits learns what it learns exactly, and what that saves.

    python -m bench.lossy_training                    narrow networks, three seeds: a quarter of an hour on two cores
    python -m bench.lossy_training --quick            one run of each kind on a few images: does it run?
    python -m bench.lossy_training --full --device cuda    the papers' networks and 350 epochs

Trains a VGG and a ResNet with batch norm on CIFAR-10 from the same start and over the same batches for each seed: in
plain PyTorch, and with `shoal.compile` where every convolution input that may be encoded is, whatever a budget would
ask for. Peaks and saved bytes are those of one step, exact, from the allocator's events. Before anything is trained,
the encoded step's outputs are held against the exact ones bit for bit, and the error of each weight's gradient is
measured. A difference in test error below two standard errors over the seeds is told as none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from bench import tables
from bench.budgets import comma_separated, make_folder
from bench.conditions import conditions, describe, file_name
from bench.inverted_steps import saved_bytes
from bench.resume import earlier_errors
from bench.split_accuracy import FULL, NARROW, WHOLE, Pace, error_percent, finding, images_of, told, train
from bench.workload import Workload
from shoal.capture.capture_step import capture_step
from shoal.capture.encode_activations import offers
from shoal.core.files import write_json
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.cost.measurement_cache import device_of
from shoal.engine.lossy_report import plan_of_encoded
from shoal.errors import InputError

EXACT = "exact"
WAYS: Mapping[str, LossyOptions] = {
    "dynamic_tree": LossyOptions("dynamic_tree"),
    "dynamic_tree, stochastic": LossyOptions("dynamic_tree", seed=1),
    "linear": LossyOptions("linear"),
    "linear, stochastic": LossyOptions("linear", seed=1),
}
DEFAULT_WAYS = ("dynamic_tree",)
# Whole batches only: a plan is for one shape.
QUICK = Pace(128, 1, 64, 0.05)
SHORT = Pace(4_992, 5, 32, 0.05)
FULL_PACE = Pace(49_920, WHOLE.epochs, WHOLE.batch, WHOLE.rate, WHOLE.steps_down)

Split = tuple[torch.Tensor, torch.Tensor]


class WrongTraining(Exception):
    """Encoding changed what it must not."""


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


def compiled(net: nn.Module, images: torch.Tensor, lossy: LossyOptions | None) -> nn.Module:
    """The network, in place: exact with everything kept, or with all that may be encoded."""
    if lossy is None:
        return shoal.compile(net, planner="keep_all", offload_to=None)
    return shoal.compile(net, plan=encodes_all(net, images, lossy), offload_to=None)


def bytes_of_a_step(build: Callable[[], nn.Module], batch: Split, ways: Sequence[str]) -> dict[str, dict[str, float]]:
    """Peak and saved bytes of plain PyTorch, of Shoal with everything kept, and of each way; errors of its gradients.

    Raises:
        WrongTraining: the forward pass of an encoded step gives other bits.
    """
    images, labels = batch
    found: dict[str, dict[str, float]] = {}
    for way in ("plain PyTorch", EXACT, *ways):
        net = built(build, batch, seed=0).train()
        lossy = WAYS.get(way)
        model = net if way == "plain PyTorch" else compiled(net, images, lossy)
        workload = Workload(way, model, images, labels)
        for _ in range(3):  # the first ones are captured, profiled and measured
            workload.reset()
            workload.step(model)
        found[way] = {"peak_bytes": workload.peak_bytes(model), "saved_bytes": saved_bytes(workload, model)}
        if lossy is not None:
            status = shoal.compile(built(build, batch, seed=0)).shoal
            report = status.lossy_report(images, lossy, loss=lambda outputs: F.cross_entropy(outputs, labels))
            if not report.same_outputs or not report.layers:
                raise WrongTraining(f"{way}: the forward pass gave other bits, or nothing is encoded")
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
    shown = Table(title=f"{network}: test error over {len(errors[EXACT])} seeds, and the bytes of one step")
    for column in ("trained", "test error", "to exact", "peak", "of plain", "saved", "of plain", "gradients off by"):
        shown.add_column(column, justify="left" if column == "trained" else "right")
    for way, row in of_a_step.items():
        mine = errors.get(EXACT if way == "plain PyTorch" else way, []) if way != EXACT else []
        shown.add_row(
            way if way != EXACT else "Shoal, everything kept",
            told(mine) if mine else "the same bits",
            finding(mine, errors[EXACT]) if way in WAYS and mine else "",
            format_bytes(int(row["peak_bytes"])),
            f"{100 * row['peak_bytes'] / plain['peak_bytes']:.1f} %",
            format_bytes(int(row["saved_bytes"])),
            f"{100 * row['saved_bytes'] / plain['saved_bytes']:.1f} %",
            f"{100 * row['largest_gradient_error']:.2f} % at most" if "largest_gradient_error" in row else "",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 unless a result was wrong (1), or an argument or the data was (2)."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except (InputError, WrongTraining) as error:
        print(f"bench.lossy_training: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _run(asked: argparse.Namespace) -> int:
    device = device_of(asked.device)
    if unknown := (set(asked.networks) - set(NARROW)) | (set(asked.ways) - set(WAYS)):
        raise InputError(f"{sorted(unknown)}: networks are {', '.join(NARROW)}, ways are {' / '.join(WAYS)}")
    if asked.seeds < 1 or (asked.images or 1) < 1 or (asked.epochs or 1) < 1:
        raise InputError(f"--seeds {asked.seeds} --images {asked.images} --epochs {asked.epochs}: give 1 or more")
    pace = QUICK if asked.quick else FULL_PACE if asked.full else SHORT
    pace = Pace(asked.images or pace.images, asked.epochs or pace.epochs, pace.batch, pace.rate, pace.steps_down)
    known = earlier_errors(asked.resume, vars(pace), "bench.lossy_training") if asked.resume else {}
    data = images_of(device)
    if asked.quick:
        data["test"] = (data["test"][0][:500], data["test"][1][:500])
    path = make_folder(asked.out) / file_name("lossy_training", device)
    console = tables.console()
    found = conditions(device, 0)
    console.print(describe(found), highlight=False, markup=False)
    console.print(f"{pace.images} images, {pace.epochs} epochs, batches of {pace.batch}", highlight=False)
    result: dict[str, Any] = {"conditions": found, "pace": vars(pace), "errors_percent": dict(known), "of_a_step": {}}
    for network in asked.networks:
        build = (FULL if asked.full else NARROW)[network]
        of_a_step = bytes_of_a_step(build, first_batch(data["train"], pace), asked.ways)
        result["of_a_step"][network] = of_a_step
        errors = result["errors_percent"].setdefault(network, {})
        for seed in range(1 if asked.quick else asked.seeds):
            for way in (EXACT, *asked.ways):
                if seed < len(errors.setdefault(way, [])):
                    continue
                errors[way].append(error_of(build, way, pace, data, seed))
                write_json(path, result)
        console.print(table(network, errors, of_a_step))
    write_json(path, result)
    console.print(f"Figures in {path}", highlight=False, markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.lossy_training", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few images: does it run?")
    parser.add_argument("--full", action="store_true", help="the papers' networks and epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", type=comma_separated, default=list(NARROW), help="of vgg, resnet")
    parser.add_argument(
        "--ways",
        type=lambda text: [way.strip() for way in text.split("/")],
        default=list(DEFAULT_WAYS),
        help=f"of {' / '.join(WAYS)}, with slashes between",
    )
    parser.add_argument("--images", type=int, help="training images; by default as fits the pace")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--resume", type=Path, help="a file of figures of the same pace: what is in it is not run again"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
