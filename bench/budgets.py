"""Networks × budgets: is each budget met, what does it cost, and what would PyTorch's own means cost at the same bytes?

    python -m bench.budgets                      every network and budget: hours on two cores
    python -m bench.budgets --quick              the same on tiny inputs, to see that it runs
    python -m bench.budgets --networks unet --budgets 40,33 --least

Budgets are shares of plain PyTorch's peak, measured here: forward, cross entropy and backward in channels_last float32,
no gradients at the start. Shoal's loss, gradients, batch norm statistics and random numbers are compared bit for bit
with plain PyTorch's before anything is timed (under the float64 rule where plain PyTorch does not repeat itself).

`activation_memory_budget` runs without Inductor, as Shoal does by default: its batch norms are decomposed and not fused
again, so its added time is higher than compiled code's would be. Its peaks are what its partitioner decides.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import tables
from bench.conditions import conditions, describe, file_name
from bench.network import Options, Setting, measure_network
from bench.paper import SHARES
from bench.progress import bar
from bench.reference import WrongTraining
from shoal.app import models
from shoal.core.files import write_json
from shoal.cost.measurement_cache import device_of
from shoal.errors import InputError

# Batches such that parameters and gradients are under 15 % of plain PyTorch's peak.
SETTINGS = {
    "mobilenet_v2": Setting(batch=16, image=224),
    "googlenet": Setting(batch=16, image=224),
    "unet3d": Setting(batch=2, image=64),
    "densenet121": Setting(batch=8, image=224, scout_batches=(2, 4)),
    "resnet50": Setting(batch=20, image=224, scout_batches=(2, 4)),
    "unet": Setting(batch=5, image=256, scout_batches=(1, 2)),
    "vgg16_bn": Setting(batch=68, image=224, scout_batches=(4, 8)),
}
CUDA_SETTINGS = {
    "resnet50": Setting(batch=128, image=224),
    "vgg16_bn": Setting(batch=128, image=224),
    "densenet121": Setting(batch=64, image=224),
}
QUICK_SETTINGS = {name: Setting(8, 96) for name in SETTINGS} | {"unet": Setting(2, 64), "unet3d": Setting(1, 32)}

SWEEP = 21  # values of activation_memory_budget from 0 to 1
QUICK_SWEEP = 2
QUICK_SHARES = (90.0, 75.0)  # parameters are a large part of so small a step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 unless a budget was exceeded or a training was wrong."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except InputError as error:
        print(f"bench.budgets: {error}", file=sys.stderr)
        return 2


def _run(asked: argparse.Namespace) -> int:
    device = device_of(asked.device)
    settings = QUICK_SETTINGS if asked.quick else CUDA_SETTINGS if device.type == "cuda" else SETTINGS
    names = asked.networks or list(settings)
    _know(names, settings)
    options = Options(
        shares=tuple(asked.budgets or (QUICK_SHARES if asked.quick else SHARES)),
        values=sweep(asked.sweep or (QUICK_SWEEP if asked.quick else SWEEP)),
        peers=not asked.no_peers,
        planner=asked.planner,
        repeats=asked.repeats or (1 if asked.quick else None),
        least=asked.least,
        device=device.type,
        seed=asked.seed,
    )
    use_exact_kernels()
    found_conditions = conditions(device, asked.seed)
    out = make_folder(asked.out)
    console = tables.console()
    console.print(describe(found_conditions), highlight=False, markup=False)
    results = []
    with bar(len(names)) as show:
        for name in names:
            path = out / file_name(f"budgets-{name}", device)
            wanted = {"setting": asdict(settings[name]), "options": asdict(options)}
            result = _finished(path, wanted) if asked.resume else None
            if result is None:
                try:
                    result = measure_network(name, settings[name], options, partial(show, name))
                except WrongTraining as error:
                    print(f"bench.budgets: {error}", file=sys.stderr)
                    return 1
                result["conditions"] = found_conditions
                write_json(path, result)
            results.append(result)
            console.print(tables.network_table(result))
            for setting, reason in result["peers_failed"].items():
                console.print(f"{setting} failed: {reason}", highlight=False, markup=False)
            show(name, "done", 1)
    if asked.least:
        console.print(tables.least_table(results))
    totals = tables.summary(results)
    console.print(f"{tables.summary_line(totals)}. Figures in {out}", highlight=False)
    return 1 if totals["exceeded"] else 0


def sweep(count: int) -> tuple[float, ...]:
    """`count` values from 0 to 1, evenly spaced.

    >>> sweep(5)
    (0.0, 0.25, 0.5, 0.75, 1.0)
    """
    return tuple(round(step / max(count - 1, 1), 4) for step in range(count))


def use_exact_kernels() -> None:
    """No TF32, and the same kernels every time, where there is a GPU."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.budgets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", type=comma_separated, help="comma-separated; by default all")
    parser.add_argument("--budgets", type=_shares, help="percent of plain PyTorch's peak, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for one JSON file a network")
    parser.add_argument("--resume", action="store_true", help="skip networks whose file of today is there")
    parser.add_argument("--least", action="store_true", help="go on to the least feasible peak of each contender")
    parser.add_argument("--quick", action="store_true", help="tiny inputs, one repeat: does it run?")
    parser.add_argument("--repeats", type=_positive, help="timed steps of each contender; by default 2 to 5")
    parser.add_argument("--no-peers", action="store_true", help="plain PyTorch and Shoal only")
    parser.add_argument("--sweep", type=_positive, help=f"values of activation_memory_budget; by default {SWEEP}")
    parser.add_argument("--planner", default="joint", help="Shoal's planner")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def comma_separated(text: str) -> list[str]:
    """The names in `text`.

    >>> comma_separated("unet, unet3d")
    ['unet', 'unet3d']
    """
    return [name.strip() for name in text.split(",") if name.strip()]


def _shares(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected percentages such as 66,40") from None
    if not all(0 < share <= 100 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r}: a budget is above 0 and at most 100 % of the peak")
    return shares


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number")
    return int(text)


def _know(names: Sequence[str], settings: dict[str, Setting]) -> None:
    for name in names:
        if name not in settings:
            known = "no such network" if name not in models.names() else "it has no setting here"
            raise InputError(f"network {name!r}: {known}; there are {', '.join(settings)}")


def make_folder(path: Path) -> Path:
    """The folder `path`, made where it is not there yet."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}; give another with --out") from error
    return path


def _finished(path: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The result at `path`, where it was measured as is wanted now."""
    try:
        result = json.loads(path.read_text())
        same = all(result[key] == json.loads(json.dumps(value)) for key, value in wanted.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if same else None


if __name__ == "__main__":
    sys.exit(main())
