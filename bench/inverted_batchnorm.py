"""Batch norm and its activation in the inverted form: bytes, time, exactness of what is made again, and accuracy.

    python -m bench.inverted_batchnorm                           half an hour on one core, most of it training
    python -m bench.inverted_batchnorm --parts steps,reconstruction      a minute or two
    python -m bench.inverted_batchnorm --quick                   small networks, few images: does it run?

`steps`: a training step of ResNet-50 beside plain PyTorch, checkpointing and inplace_abn (`bench.inverted_steps`).
`reconstruction`: how far the normalised input is from what it was (`bench.reconstruction`). `training`: CIFAR-10 with
narrow networks, and the way there and back of what was trained (`bench.inverted_training`); it needs the data, see
`shoal.app.data`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench import inverted_steps, inverted_training, reconstruction
from bench.frame import conditions, describe, file_name, make_console, make_folder
from bench.split_accuracy import NARROW, QUICK, SHORT, Pace, images_of
from shoal.app.data.cifar10 import open_cifar10
from shoal.core.files import write_json
from shoal.errors import InputError

PARTS = ("steps", "reconstruction", "training")
_WRONG = ()
_QUICK_ROWS = 64


def run_steps(asked: argparse.Namespace, console: Console, write: Callable[..., None]) -> None:
    """ResNet-50, or a smaller one where it has to be quick."""
    network, batch, image, turns = ("resnet18", 4, 64, 1) if asked.quick else ("resnet50", 8, 128, 7)
    found = inverted_steps.measure(
        network,
        asked.batch or batch,
        asked.image or image,
        asked.turns or turns,
        time.thread_time if asked.cpu_time else time.perf_counter,
    )
    write(steps=found)
    console.print(inverted_steps.table(found))


def run_reconstruction(asked: argparse.Namespace, console: Console, write: Callable[..., None]) -> None:
    cells = reconstruction.measure_all(*[_QUICK_ROWS] * asked.quick)
    write(reconstruction=cells)
    console.print(reconstruction.table(cells))


def run_training(asked: argparse.Namespace, console: Console, write: Callable[..., None]) -> None:
    """Seeds one after the other, so that what is there when it is stopped is whole."""
    data = images_of(torch.device("cpu"))
    if asked.quick:
        data["test"] = (data["test"][0][:500], data["test"][1][:500])
    base = QUICK if asked.quick else SHORT
    pace = Pace(asked.images or base.images, asked.epochs or base.epochs, base.batch, base.rate)
    found: dict[str, Any] = {}
    for network in asked.networks.split(","):
        errors: dict[str, list[float]] = {name: [] for name in inverted_training.WAYS}
        away: dict[str, list[float]] = {name: [] for name in inverted_training.WAYS}
        found[network] = {"errors_percent": errors, "there_and_back": away}
        for seed in range(1 if asked.quick else asked.seeds):
            for name, error, off in inverted_training.trained(network, pace, data, seed):
                errors[name].append(error)
                away[name].append(off)
                write(training={"pace": vars(pace), "networks": found})
        console.print(inverted_training.table(network, pace, errors, away))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 unless an argument or the data was wrong, or a contender computes something else."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.inverted_batchnorm", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="small networks, few images: does it run?")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--batch", type=int, help="images in a step; default 8")
    parser.add_argument("--image", type=int, help="pixels along each side; default 128")
    parser.add_argument("--turns", type=int, help="timed steps of each contender; default 7")
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread: for a machine that others use too")
    parser.add_argument("--networks", default="resnet", help="of vgg, resnet, to train")
    parser.add_argument("--seeds", type=int, default=3, help="of training")
    parser.add_argument("--images", type=int, help="to train on; by default as fits the pace")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    asked = parser.parse_args(arguments)
    device = torch.device("cpu")
    try:
        if not set(asked.parts.split(",")) <= set(PARTS) or not set(asked.networks.split(",")) <= set(NARROW):
            known = f"{', '.join(PARTS)}; {', '.join(NARROW)}"
            raise InputError(f"--parts {asked.parts} --networks {asked.networks}: give some of {known}")
        if asked.cpu_time and torch.get_num_threads() > 1:
            raise InputError("--cpu-time counts one thread's time: run it with OMP_NUM_THREADS=1")
        counts = (asked.batch, asked.image, asked.turns, asked.seeds, asked.images, asked.epochs)
        if any(count is not None and count < 1 for count in counts):
            raise InputError("--batch, --image, --turns, --seeds, --images and --epochs are 1 or more")
        if "training" in asked.parts.split(","):
            open_cifar10()  # says what is missing before half an hour is spent
        out = make_folder(asked.out)
        found = conditions(device, 0)
        console = make_console()
        console.print(describe(found), highlight=False, markup=False)
        result: dict[str, Any] = {"conditions": found}

        def write(**part: Any) -> None:
            result.update(part)
            write_json(out / file_name("inverted_batchnorm", device), result)

        for part, run in (("steps", run_steps), ("reconstruction", run_reconstruction), ("training", run_training)):
            if part in asked.parts.split(","):
                run(asked, console, write)
    except (InputError, *_WRONG) as error:
        print(f"bench.inverted_batchnorm: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    console.print(f"Figures in {out / file_name('inverted_batchnorm', device)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
