"""Loss curves of a small segmentation: inside a budget, and in the invertible form, beside plain PyTorch.

    python -m bench.phantoms             three seeds; minutes on one core
    python -m bench.phantoms --quick     a few steps: does it run?

Volumes are phantoms made here: ellipsoids of two kinds with noise. The network is a U-Net of two levels as nnU-Net
makes them, instance norms with leaky ReLUs. For each seed, of weights and data, it is trained by plain PyTorch, inside
a budget by means that give the same bits, which is checked weight by weight, and by `shoal.invert_norm`. The inverted
form rounds otherwise; its mean loss has to lie within what the seeds of plain PyTorch differ by, in each tenth of
training.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import Bench, Run, WrongResult, bar, option
from bench.tables import cells, new_table

SEEDS, STEPS, SIDE, BATCH = (0, 1, 2), 60, 24, 2
CLASSES = 3  # background, and ellipsoids of two kinds
NOISE = 0.6  # of the intensity by which two kinds differ
SHARE = 0.8  # of plain PyTorch's peak
TENTHS = 10
_HELD_OUT = 8


class SmallUNet(nn.Module):
    """Two levels; instance norms with weights, leaky ReLUs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.down = _twice(1, width), _twice(width, 2 * width, stride=2)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.last, self.head = _twice(2 * width, width), nn.Conv3d(width, CLASSES, 1)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        skip = self.first(volumes)
        return self.head(self.last(torch.cat([skip, self.up(self.down(skip))], 1)))


def _twice(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels, by in ((inputs, stride), (outputs, 1)):
        layers += [nn.Conv3d(channels, outputs, 3, by, 1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*layers)


def phantoms(count: int, side: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Volumes of (count, 1, side, side, side) and their classes."""
    axis = torch.linspace(0, 1, side)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))
    labels = torch.zeros(count, side, side, side, dtype=torch.long)
    for case in labels:
        for kind in (1, 2):
            center = 0.3 + 0.4 * torch.rand(3, generator=generator)
            radii = 0.1 + 0.2 * torch.rand(3, generator=generator)
            distance = ((grid - center.view(3, 1, 1, 1)) / radii.view(3, 1, 1, 1)).square().sum(0)
            case[distance < 1] = kind
    noise = torch.randn(labels.shape, generator=generator)
    return (labels + NOISE * noise).unsqueeze(1), labels


@dataclass(frozen=True)
class Trained:
    """A training run: the loss of each step, Dice of held-out phantoms, the weights, how many norms are inverted."""

    losses: list[float]
    dice: float
    weights: Mapping[str, torch.Tensor]
    inverted: str


def train(who: str, seed: int, steps: int, side: int) -> Trained:
    """One run from the seed's weights over the seed's phantoms.

    Args:
        who: "plain", "budget" or "inverted".
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network: nn.Module = SmallUNet()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    model, inverted = network, "none"
    if who == "budget":
        batch = torch.empty(BATCH, 1, side, side, side)
        plain_bytes = shoal.plan(network, batch, optimizer=optimizer).plain_peak_bytes
        model = shoal.compile(network, int(SHARE * plain_bytes), optimizer=optimizer, allow="bitwise")
    elif who == "inverted":
        model = shoal.invert_norm(network)
        inverted = model.describe().splitlines()[0]
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        volumes, labels = phantoms(BATCH, side, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(volumes), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        volumes, labels = phantoms(_HELD_OUT, side, torch.Generator().manual_seed(1000))
        found = model.eval()(volumes).argmax(1)
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    return Trained(losses, dice(found, labels), weights, inverted)


def dice(found: torch.Tensor, labels: torch.Tensor) -> float:
    """The mean over the kinds of twice the voxels in both, of those in either.

    >>> dice(torch.tensor([1, 1, 2, 0]), torch.tensor([1, 0, 2, 0]))
    0.8333333333333333
    """
    scores = []
    for kind in range(1, CLASSES):
        ours, theirs = found == kind, labels == kind
        scores.append(2 * int((ours & theirs).sum()) / max(int(ours.sum() + theirs.sum()), 1))
    return statistics.fmean(scores)


def tenths(losses: Sequence[float]) -> list[float]:
    """The mean loss of each tenth of a run.

    >>> tenths([float(step) for step in range(20)])[:2]
    [0.5, 2.5]
    """
    size = max(1, len(losses) // TENTHS)
    return [statistics.fmean(losses[start : start + size]) for start in range(0, size * TENTHS, size)]


def rows_of(plain: Sequence[Trained], inverted: Sequence[Trained]) -> list[dict[str, Any]]:
    """By tenth of the training: the mean losses, what plain PyTorch's seeds differ by, and the largest difference that
    the inversion makes within a seed."""
    curves = [tenths(run.losses) for run in plain]
    theirs = [tenths(run.losses) for run in inverted]
    rows = []
    for tenth in range(TENTHS):
        ours, other = [curve[tenth] for curve in curves], [curve[tenth] for curve in theirs]
        difference = abs(statistics.fmean(other) - statistics.fmean(ours))
        rows.append(
            {
                "tenth": tenth + 1,
                "plain": statistics.fmean(ours),
                "inverted": statistics.fmean(other),
                "difference": difference,
                "seeds_spread": max(ours) - min(ours),
                "largest_within_seed": max(abs(a - b) for a, b in zip(ours, other, strict=True)),
                "within": difference <= max(ours) - min(ours),
            }
        )
    return rows


COLUMNS = "tenth | plain | inverted | means differ by | seeds differ by | within a seed at most | <within"
FORMATS = "{tenth} | {plain:.4f} | {inverted:.4f} | {difference:.1e} | {seeds_spread:.1e} | {largest_within_seed:.1e}"
FORMATS += " | {within}"


def table(result: Mapping[str, Any]) -> Table:
    """The losses by tenth of the training."""
    title = "{steps} steps of {batch} x {side}^3, {count} seeds; Dice: plain {dice[plain]:.3f}, inverted "
    title += "{dice[inverted]:.3f}; {inverted}; inside {share:.0%} of the bytes all weights are plain PyTorch's"
    made = new_table(title.format_map({**result, "count": len(result["seeds"])}), COLUMNS)
    for row in result["rows"]:
        made.add_row(*cells(FORMATS, row))
    return made


def _run(run: Run) -> int:
    seeds = SEEDS[: run.pick(len(SEEDS), 2)]
    steps, side = run.asked.steps or run.pick(STEPS, TENTHS), run.pick(SIDE, 12)
    runs: dict[str, list[Trained]] = {"plain": [], "budget": [], "inverted": []}
    with bar(len(runs) * len(seeds)) as show:
        for seed in seeds:
            for who, done in runs.items():
                done.append(train(who, seed, steps, side))
                show(f"seed {seed}", who, 1)
            plain, inside = runs["plain"][-1], runs["budget"][-1]
            unequal = [name for name, value in plain.weights.items() if not torch.equal(value, inside.weights[name])]
            if unequal or plain.losses != inside.losses:
                raise WrongResult(f"seed {seed}: a budget changed {', '.join(unequal) or 'the losses'}")
    rows = rows_of(runs["plain"], runs["inverted"])
    run.save(
        steps=steps,
        side=side,
        batch=BATCH,
        seeds=seeds,
        share=SHARE,
        dice={who: statistics.fmean(one.dice for one in done) for who, done in runs.items()},
        inverted=runs["inverted"][0].inverted,
        rows=rows,
        losses={who: [one.losses for one in done] for who, done in runs.items()},
    )
    run.say(table(run.result))
    outside = [row["tenth"] for row in rows if not row["within"]]
    run.say(f"outside of the seeds' spread: {outside or 'none'}")
    return int(bool(outside))


main = Bench(
    _run,
    option("--steps", type=int, help=f"of each run; by default {STEPS}", minimum=TENTHS),
    quick="a few steps on small volumes: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
