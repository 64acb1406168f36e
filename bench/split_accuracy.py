"""Accuracy of Split-CNN and Stochastic Split-CNN on CIFAR-10: table 1 and figures 4 to 6 of the paper.

    python -m bench.split_accuracy                      narrow networks, few epochs: an hour and a half on one core
    python -m bench.split_accuracy --quick              one run of each kind on a few images: does it run?
    python -m bench.split_accuracy --full --device cuda the paper's networks and 350 epochs

Trains a VGG and a ResNet with batch norm from the same start for each seed, split to several depths and into several
numbers of patches, and evaluates each with the *unsplit* network; the split ones also as they were trained. The paper's
errors are of full-size networks trained for 350 epochs: they have a column of their own, and what can be compared
is the difference to the baseline. Seeds give mean and standard deviation; a difference below two standard errors is
reported as none.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import Bench, Run, option, switch
from bench.tables import new_table
from examples import networks as models
from examples.data.cifar10 import open_cifar10
from shoal.app.data.source import Images

P = TypeVar("P", bound=Any)  # a Pace
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


def images_of(device: torch.device, tests: int | None = None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """CIFAR-10, normalised: float images and labels by split; of "test" the first `tests`."""
    source = open_cifar10()
    mean = torch.tensor(source.mean).reshape(1, 3, 1, 1)
    deviation = torch.tensor(source.deviation).reshape(1, 3, 1, 1)
    found = {}
    for name, images in (("train", source.train), ("test", source.test)):
        assert isinstance(images, Images)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # they lie class by class
        pixels = torch.from_numpy(images.pixels).permute(0, 3, 1, 2)[order].float()
        x = ((pixels - mean) / deviation).to(device, memory_format=torch.channels_last)
        kept = slice(tests if name == "test" else None)
        found[name] = x[kept], torch.from_numpy(images.labels)[order].to(device)[kept]
    return found


def batches(
    x: torch.Tensor, y: torch.Tensor, batch: int, draw: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One epoch in random order, each image moved by up to four pixels and mirrored at random."""
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
    shown = new_table(
        f"{network}: test error, mean and standard deviation over seeds",
        "<trained | evaluated unsplit | to the baseline | evaluated split | paper, 350 epochs",
    )
    paper = dict(zip(("baseline", "split 50 %, 4 patches", "stochastic 50 %, 4 patches"), PAPER[network], strict=True))
    for name, errors in rows.items():
        away = "" if name == "baseline" else finding(errors["unsplit"], rows["baseline"]["unsplit"])
        as_trained = "" if name == "baseline" else mean_and_spread(errors["split"])
        shown.add_row(
            name, mean_and_spread(errors["unsplit"]), away, as_trained, f"{paper[name]} %" if name in paper else ""
        )
    return shown


def mean_and_spread(errors: list[float]) -> str:
    spread = statistics.stdev(errors) if len(errors) > 1 else 0.0
    return f"{statistics.mean(errors):.1f} % ± {spread:.1f}"


def paced(run: Run, base: P) -> P:
    """`base`, with the images and epochs that `PACE_OPTIONS` name."""
    return replace(base, images=run.asked.images or base.images, epochs=run.asked.epochs or base.epochs)


PACE_OPTIONS = (
    option("--seeds", type=int, default=3, help="of training"),
    option("--images", type=int, help="to train on; by default as fits the pace"),
    option("--epochs", type=int),
)
TRAINING_OPTIONS = (
    *PACE_OPTIONS,
    switch("--full", "the papers' networks and epochs"),
    option("--networks", known=NARROW, default=list(NARROW)),
)


def _run(run: Run) -> None:
    asked = run.asked
    pace = paced(run, WHOLE if asked.full else run.pick(SHORT, QUICK))
    known = run.resume("errors_percent", pace=vars(pace)).get("errors_percent", {})
    data = images_of(run.device, tests=run.pick(None, 500))
    networks = FULL if asked.full else NARROW
    kinds = run.pick(CONDITIONS, (CONDITIONS[0], CONDITIONS[4], CONDITIONS[5]))
    run.say(f"{pace.images} images, {pace.epochs} epochs, batches of {pace.batch}, {asked.seeds} seeds")
    run.result |= {"pace": vars(pace), "errors_percent": {}}
    for network in asked.networks:
        rows: dict[str, dict[str, list[float]]] = {kind.name: {"unsplit": [], "split": []} for kind in kinds}
        rows |= {kind: errors for kind, errors in known.get(network, {}).items() if kind in rows}
        run.result["errors_percent"][network] = rows
        for seed in range(run.pick(asked.seeds, 1)):
            for kind in kinds:
                if seed < len(rows[kind.name]["unsplit"]):
                    continue
                for how, error in errors_of(networks[network], kind, pace, data, seed).items():
                    rows[kind.name][how].append(error)
                run.save()
        run.say(table(network, rows))


main = Bench(
    _run,
    *TRAINING_OPTIONS,
    quick="a few images: does it run?",
    resume="a file of the same pace: what is in it is not run again",
    device=True,
)

if __name__ == "__main__":
    sys.exit(main())
