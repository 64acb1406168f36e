"""Accuracy of Split-CNN and Stochastic Split-CNN on CIFAR-10: table 1 and figures 4 to 6 of the paper.

    python -m bench.split_accuracy                      narrow networks, few epochs: an hour and a half on one core
    python -m bench.split_accuracy --quick              one run of each kind on a few images: does it run?
    python -m bench.split_accuracy --full --device cuda the paper's networks and 350 epochs

Trains a VGG and a ResNet with batch norm from the same start for each seed, split to several depths and into several
numbers of patches, and evaluates each with the *unsplit* network; the split ones also as they were trained. The paper's
errors are of full-size networks trained for 350 epochs: they stand in a column of their own, and what can be compared
is the difference to the baseline. Seeds give mean and standard deviation; a difference below two standard errors is
told as none.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from bench import tables
from bench.budgets import make_folder
from bench.conditions import conditions, describe, file_name
from bench.resume import earlier_errors
from shoal.app import models
from shoal.app.data.cifar10 import open_cifar10
from shoal.app.data.source import Images
from shoal.core.files import write_json
from shoal.cost.measurement_cache import device_of
from shoal.errors import InputError

# Test errors in percent with four patches at half the depth, from table 1: baseline, split, stochastic.
PAPER = {"vgg": (5.86, 6.98, 5.42), "resnet": (4.7, 5.2, 4.5)}
_CONVOLUTIONS = (1, 1, 2, 2, 2)  # of VGG-11
_WIDTHS = (32, 64, 96, 96, 96)


@dataclass(frozen=True)
class Condition:
    """What is trained: how it is split, and how the table calls it."""

    name: str
    depth: float = 0.0
    grid: tuple[int, int] = (2, 2)
    stochastic: float | None = None


CONDITIONS = (
    Condition("baseline"),
    Condition("split 12.5 %, 4 patches", 0.125),
    Condition("split 25 %, 4 patches", 0.25),
    Condition("split 37.5 %, 4 patches", 0.375),
    Condition("split 50 %, 4 patches", 0.5),
    Condition("stochastic 50 %, 4 patches", 0.5, stochastic=0.2),
    Condition("split 25 %, 2 patches", 0.25, (1, 2)),
    Condition("split 25 %, 3 patches", 0.25, (1, 3)),
    Condition("split 25 %, 6 patches", 0.25, (2, 3)),
    Condition("split 25 %, 9 patches", 0.25, (3, 3)),
)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def narrow_resnet() -> nn.Module:
    """ResNet-10: one block each at 32, 16, 8 and 4 pixels, a quarter to an eighth as wide as the paper's."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for width, stride in ((16, 1), (32, 2), (64, 2), (64, 2)):
        layers.append(Block(inputs, width, stride))
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def narrow_vgg() -> nn.Module:
    """The eight convolutions of VGG-11, half to a fifth as wide, and batch norm: VGG-19 learns nothing in that time."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, convolutions in zip(_WIDTHS, _CONVOLUTIONS, strict=True):
        for _ in range(convolutions):
            layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(_WIDTHS[-1], 10))


NARROW: dict[str, Callable[[], nn.Module]] = {"vgg": narrow_vgg, "resnet": narrow_resnet}
FULL: dict[str, Callable[[], nn.Module]] = {
    "vgg": lambda: models.build("vgg19_cifar"),
    "resnet": lambda: models.build("resnet18_cifar"),
}


@dataclass(frozen=True)
class Pace:
    """How long and on what is trained.

    Attributes:
        images: how many of the training split, drawn once.
        epochs, batch: as they are called.
        rate: the highest learning rate.
        steps_down: shares of the epochs at which it falls to a tenth; empty for a cosine to nothing.
    """

    images: int
    epochs: int
    batch: int
    rate: float
    steps_down: tuple[float, ...] = ()


QUICK = Pace(256, 1, 64, 0.05)
SHORT = Pace(5_000, 5, 32, 0.05)
WHOLE = Pace(50_000, 350, 128, 0.1, (150 / 350, 250 / 350))


def images_of(device: torch.device) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """CIFAR-10, normalised: float images and labels by split."""
    source = open_cifar10()
    mean = torch.tensor(source.mean).reshape(1, 3, 1, 1)
    deviation = torch.tensor(source.deviation).reshape(1, 3, 1, 1)
    found = {}
    for name, images in (("train", source.train), ("test", source.test)):
        assert isinstance(images, Images)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # they lie class by class
        pixels = torch.from_numpy(images.pixels).permute(0, 3, 1, 2)[order].float()
        x = ((pixels - mean) / deviation).to(device, memory_format=torch.channels_last)
        found[name] = x, torch.from_numpy(images.labels)[order].to(device)
    return found


def batches(
    x: torch.Tensor, y: torch.Tensor, batch: int, draw: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One epoch in random order, each image moved by up to four pixels and mirrored by chance."""
    order = torch.randperm(len(x), generator=draw)
    for part in order.split(batch):
        images = F.pad(x[part], (4, 4, 4, 4))
        top, left = (int(torch.randint(0, 9, (), generator=draw)) for _ in range(2))
        images = images[..., top : top + 32, left : left + 32]
        if torch.rand((), generator=draw) < 0.5:
            images = images.flip(-1)
        yield images.contiguous(memory_format=torch.channels_last), y[part]


def errors_of(
    build: Callable[[], nn.Module],
    condition: Condition,
    pace: Pace,
    data: dict[str, tuple[torch.Tensor, torch.Tensor]],
    seed: int,
) -> dict[str, float]:
    """Train one network; its test errors in percent, unsplit and as trained."""
    torch.manual_seed(seed)
    net = build().to(data["train"][0].device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = shoal.split(net, condition.depth, condition.grid, condition.stochastic)
    train(model, pace, data["train"], seed)
    found = {"unsplit": error_percent(model, data["test"])}
    model.split_in_eval = True
    found["split"] = error_percent(model, data["test"])
    return found


def train(model: nn.Module, pace: Pace, split: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    """Train on the first images of a split, in an order that is the seed's."""
    x, y = (tensor[: pace.images] for tensor in split)
    optimizer = torch.optim.SGD(model.parameters(), lr=pace.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    draw = torch.Generator().manual_seed(seed)
    steps, done = math.ceil(len(x) / pace.batch) * pace.epochs, 0
    for _ in range(pace.epochs):
        model.train()
        for images, labels in batches(x, y, pace.batch, draw):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(pace, done / steps)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            done += 1


def rate_at(pace: Pace, share: float) -> float:
    """The learning rate after a share of the steps.

    >>> rate_at(SHORT, 0.0), round(rate_at(SHORT, 0.5), 3), rate_at(WHOLE, 0.5)
    (0.05, 0.025, 0.010000000000000002)
    """
    if pace.steps_down:
        return pace.rate * 0.1 ** sum(share >= at for at in pace.steps_down)
    return pace.rate * 0.5 * (1 + math.cos(math.pi * share))


@torch.no_grad()
def error_percent(model: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> float:
    model.eval()
    wrong = 0
    for images, labels in zip(test[0].split(500), test[1].split(500), strict=True):
        wrong += int((model(images).argmax(1) != labels).sum())
    return 100 * wrong / len(test[0])


def finding(errors: list[float], baseline: list[float]) -> str:
    """How a condition differs from the baseline, in points, where it does by more than two standard errors.

    >>> finding([10.0, 10.4, 10.2], [10.1, 10.3, 10.2])
    'none'
    >>> finding([12.0, 12.2, 12.1], [10.1, 10.3, 10.2])
    '+1.9'
    """
    difference = statistics.mean(errors) - statistics.mean(baseline)
    spread = math.sqrt(sum(statistics.variance(one) / len(one) if len(one) > 1 else 0.0 for one in (errors, baseline)))
    return "none" if abs(difference) <= 2 * spread else f"{difference:+.1f}"


def table(network: str, rows: dict[str, dict[str, list[float]]]) -> Table:
    shown = Table(title=f"{network}: test error, mean and standard deviation over seeds")
    for column in ("trained", "evaluated unsplit", "to the baseline", "evaluated split", "paper, 350 epochs"):
        shown.add_column(column, justify="left" if column == "trained" else "right")
    paper = dict(zip(("baseline", "split 50 %, 4 patches", "stochastic 50 %, 4 patches"), PAPER[network], strict=True))
    for name, errors in rows.items():
        away = "" if name == "baseline" else finding(errors["unsplit"], rows["baseline"]["unsplit"])
        as_trained = "" if name == "baseline" else told(errors["split"])
        shown.add_row(name, told(errors["unsplit"]), away, as_trained, f"{paper[name]} %" if name in paper else "")
    return shown


def told(errors: list[float]) -> str:
    spread = statistics.stdev(errors) if len(errors) > 1 else 0.0
    return f"{statistics.mean(errors):.1f} % ± {spread:.1f}"


def main(arguments: list[str] | None = None) -> int:
    """Run it; 0 unless an argument or the data was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.split_accuracy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few images: does it run?")
    parser.add_argument("--full", action="store_true", help="the paper's networks and epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", default="vgg,resnet", help="of vgg, resnet")
    parser.add_argument("--images", type=int, help="training images; by default as fits the pace")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--resume", type=Path, help="a file of figures of the same pace: what is in it is not run again"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    asked = parser.parse_args(arguments)
    pace = QUICK if asked.quick else WHOLE if asked.full else SHORT
    pace = Pace(asked.images or pace.images, asked.epochs or pace.epochs, pace.batch, pace.rate, pace.steps_down)
    try:
        device = device_of(asked.device)
        unknown = set(asked.networks.split(",")) - set(NARROW)
        if unknown or asked.seeds < 1:
            raise InputError(
                f"--networks {asked.networks} --seeds {asked.seeds}: give vgg, resnet or both, and 1 or more"
            )
        out = make_folder(asked.out)
        known = earlier_errors(asked.resume, vars(pace), "bench.split_accuracy") if asked.resume else {}
        data = images_of(device)
    except InputError as error:
        print(f"bench.split_accuracy: {error}", file=sys.stderr)
        return 2
    networks = FULL if asked.full else NARROW
    kinds = CONDITIONS if not asked.quick else (CONDITIONS[0], CONDITIONS[4], CONDITIONS[5])
    if asked.quick:
        data["test"] = (data["test"][0][:500], data["test"][1][:500])
    console = tables.console()
    found = conditions(device, 0)
    console.print(describe(found), highlight=False, markup=False)
    console.print(
        f"{pace.images} images, {pace.epochs} epochs, batches of {pace.batch}, {asked.seeds} seeds", highlight=False
    )
    result: dict[str, Any] = {"conditions": found, "pace": vars(pace), "errors_percent": {}}
    path = out / file_name("split_accuracy", device)
    for network in asked.networks.split(","):
        rows: dict[str, dict[str, list[float]]] = {kind.name: {"unsplit": [], "split": []} for kind in kinds}
        rows |= {kind: errors for kind, errors in known.get(network, {}).items() if kind in rows}
        for seed in range(asked.seeds if not asked.quick else 1):
            for kind in kinds:
                if seed < len(rows[kind.name]["unsplit"]):
                    continue
                for how, error in errors_of(networks[network], kind, pace, data, seed).items():
                    rows[kind.name][how].append(error)
                result["errors_percent"][network] = rows
                write_json(path, result)
        console.print(table(network, rows))
    console.print(f"Figures in {path}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
