"""Batch norm and its activation in the inverted form: bytes, time, reconstruction error and accuracy.

    python -m bench.inverted_batchnorm                           half an hour on one core, most of it training
    python -m bench.inverted_batchnorm --parts steps,reconstruction      a minute or two
    python -m bench.inverted_batchnorm --quick                   small networks, few images: does it run?

`steps`: a training step of ResNet-50 beside plain PyTorch, checkpointing and inplace_abn (`bench.inverted_steps`).

`reconstruction`: how far the normalised input that the backward pass reconstructs is from the forward pass's, by slope,
scale and shift. A column of inputs stands in as many channels as it has rows; a gradient that is 1 at one row of each
channel and 0 elsewhere makes that channel's gradient of the scale the normalised input at this row, times the slope
where it is below zero. Held against the same column normalised in float64; the unit is the standard deviation.

`training`: CIFAR-10 with narrow networks, three from the same start and over the same batches for each seed: batch norm
and ReLU; batch norm and LeakyReLU, which is what the inverted form computes; and the inverted form. What the first two
differ by is the price of the slope, what the last two differ by that of the inversion. Each is then converted and
restored. It needs the data, see `examples.data`.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

import shoal
from bench import inverted_steps
from bench.frame import CPU_TIME, Bench, Run, WrongResult, option
from bench.inverted_steps import SLOPE
from bench.split_accuracy import (
    NARROW,
    PACE_OPTIONS,
    QUICK,
    SHORT,
    Pace,
    error_percent,
    finding,
    images_of,
    mean_and_spread,
    paced,
    train,
)
from bench.tables import new_table
from examples.data.cifar10 import open_cifar10
from shoal.kernels.invertible_norm.inverted_norms import (
    inverted_batch_norm,
    inverted_batch_norm_backward,
    kept_from_zero,
    reconstruction_error,
)
from shoal.transforms.invert.inverted_model import InvertedModel

Split = tuple[torch.Tensor, torch.Tensor]
PARTS = ("steps", "reconstruction", "training")
_QUICK_ROWS = 64


THERE_AND_BACK = 1e-5  # of the largest output


def plain(net: nn.Module) -> nn.Module:
    return net


def leaky(net: nn.Module) -> nn.Module:
    """LeakyReLU in PyTorch's own modules where the inverted form has it."""
    return shoal.invert_norm(net, SLOPE).restore()


def inverted(net: nn.Module) -> nn.Module:
    return shoal.invert_norm(net, SLOPE)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "batch norm and ReLU": plain,
    f"batch norm and LeakyReLU({SLOPE:g})": leaky,
    f"inverted, LeakyReLU({SLOPE:g})": inverted,
}


def trained(network: str, pace: Pace, data: Mapping[str, Split], seed: int) -> Iterator[tuple[str, float, float]]:
    """Train a narrow network in each way: its name, test error in percent, and what the way there and back changed.

    The last is relative to the largest output, on a thousand test images: of converting and restoring the plain ones,
    of restoring the inverted one.

    Raises:
        WrongResult: that was more than `THERE_AND_BACK`, or weights came back as others.
    """
    for name, way in WAYS.items():
        torch.manual_seed(seed)
        model = way(NARROW[network]().to(memory_format=torch.channels_last))  # type: ignore[call-overload]
        train(model, pace, data["train"], seed)
        error = error_percent(model, data["test"])
        yield name, error, there_and_back(model, data["test"][0][:1000])


@torch.no_grad()
def there_and_back(model: nn.Module, images: torch.Tensor) -> float:
    """How far a trained network's outputs are from its own after conversion and restoration, by the largest output.

    Raises:
        WrongResult: more than `THERE_AND_BACK`; or weights of a plain network came back as others.
    """
    model.eval()
    before = model(images)
    if isinstance(model, InvertedModel):
        restored = copy.deepcopy(model).restore()
    else:
        there = shoal.invert_norm(copy.deepcopy(model), SLOPE)
        restored = there.restore(activation="relu")
        state = model.state_dict()
        for name, value in restored.state_dict().items():
            if not torch.allclose(value, state[name], rtol=1e-6, atol=1e-9):
                raise WrongResult(f"{name} came back as another")
    away = float((restored(images) - before).abs().max() / before.abs().max())
    if away > THERE_AND_BACK:
        raise WrongResult(f"outputs came back {away:.1e} off, expected {THERE_AND_BACK:g} at most")
    return away


def training_table(
    network: str, pace: Pace, errors: Mapping[str, list[float]], away: Mapping[str, list[float]]
) -> Table:
    """Test errors by way of training, and their differences beyond two standard errors."""
    (baseline, *_) = errors
    shown = new_table(
        f"CIFAR-10, narrow {network}, {pace.images} images, {pace.epochs} epochs, {len(errors[baseline])} seeds: "
        "test error, mean and standard deviation",
        "<trained with | test error | to ReLU | there and back",
    )
    for name, found in errors.items():
        difference = statistics.mean(found) - statistics.mean(errors[baseline])
        verdict = "" if name == baseline else f"{difference:+.2f}, beyond noise: {finding(found, errors[baseline])}"
        shown.add_row(name, mean_and_spread(found), verdict, f"{max(away[name]):.0e}")
    return shown


SLOPES = (0.001, 0.01, 0.1, 0.5, 1.0)
SCALES = (1e-3, 1e-2, 1e-1, 1.0, 1e1)
SHIFTS = (0.0, 1.0)
_EPS = 1e-5
_SPREAD = 4.0  # standard deviations that no input is further from the mean


@dataclass(frozen=True)
class Cell:
    """Errors of one slope, scale and shift, in standard deviations.

    Attributes:
        largest, median: over the inputs.
        predicted: `shoal.kernels.invertible_norm.inverted_norms.reconstruction_error`, an upper bound.
    """

    slope: float
    scale: float
    shift: float
    largest: float
    median: float
    predicted: float


def measure(slope: float, scale: float, shift: float, rows: int = 512) -> Cell:
    """One cell, over `rows` inputs.

    Raises:
        WrongResult: the largest error is more than what is predicted.
    """
    column = torch.randn(rows, generator=torch.Generator().manual_seed(0)).clamp(-_SPREAD + 1, _SPREAD - 1)
    x = column[:, None].expand(rows, rows).contiguous()
    weight, bias = torch.full((rows,), scale - _EPS), torch.full((rows,), shift)
    options = (_EPS, "leaky_relu", slope)
    y, _, variance = inverted_batch_norm(x, weight, bias, None, None, *options)
    deviation = torch.rsqrt(variance + _EPS)
    _, of_weight, _ = inverted_batch_norm_backward(torch.eye(rows), y, weight, bias, deviation, False, *options)
    again = of_weight.double() / torch.where(y.diagonal() > 0, 1.0, slope).double()
    exact = column.double()
    exact = (exact - exact.mean()) * torch.rsqrt(exact.var(correction=0) + _EPS)
    errors = (again - exact).abs()
    used = kept_from_zero(weight[:1].double(), _EPS)
    predicted = float(reconstruction_error(used, bias[:1], "leaky_relu", torch.float32, _SPREAD))
    found = Cell(slope, scale, shift, float(errors.max()), statistics.median(errors.tolist()), predicted)
    if not found.largest <= predicted:
        raise WrongResult(f"an input came back {found.largest:.1e} off, predicted {predicted:.1e}: {found}")
    return found


def measure_all(rows: int = 512) -> list[dict[str, Any]]:
    """Every slope, scale and shift."""
    return [asdict(measure(slope, scale, shift, rows)) for shift in SHIFTS for slope in SLOPES for scale in SCALES]


def reconstruction_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Largest and median error for each slope and scale, and what is predicted, which does not depend on the slope."""
    shown = new_table(
        "What the inverted form reconstructs in float32: largest / median error, in standard deviations",
        f"shift | slope | {' | '.join(f'scale {scale:g}' for scale in SCALES)}",
    )
    for shift in SHIFTS:
        rows = {slope: [c for c in cells if (c["shift"], c["slope"]) == (shift, slope)] for slope in SLOPES}
        for slope, row in rows.items():
            shown.add_row(f"{shift:g}", f"{slope:g}", *(f"{c['largest']:.1e} / {c['median']:.1e}" for c in row))
        bound = [f"≤ {c['predicted']:.1e}" for c in rows[SLOPES[0]]]
        shown.add_row(f"{shift:g}", "predicted", *bound, end_section=True)
    return shown


def run_steps(run: Run) -> None:
    """ResNet-50, or a smaller network where it has to be quick."""
    asked = run.asked
    network, batch, image, turns = run.pick(("resnet50", 8, 128, 7), ("resnet18", 4, 64, 1))
    sizes = asked.batch or batch, asked.image or image, asked.turns or turns
    found = inverted_steps.measure(network, *sizes, run.clock)
    run.save(steps=found)
    run.say(inverted_steps.table(found))


def run_reconstruction(run: Run) -> None:
    cells = measure_all(run.pick(512, _QUICK_ROWS))
    run.save(reconstruction=cells)
    run.say(reconstruction_table(cells))


def run_training(run: Run) -> None:
    """Seeds one after the other, so that what is there when it is stopped is whole."""
    data = images_of(run.device, tests=run.pick(None, 500))
    pace = paced(run, run.pick(SHORT, QUICK))
    found: dict[str, Any] = {}
    for network in run.asked.networks:
        errors: dict[str, list[float]] = {name: [] for name in WAYS}
        away: dict[str, list[float]] = {name: [] for name in WAYS}
        found[network] = {"errors_percent": errors, "there_and_back": away}
        for seed in range(run.pick(run.asked.seeds, 1)):
            for name, error, off in trained(network, pace, data, seed):
                errors[name].append(error)
                away[name].append(off)
                run.save(training={"pace": vars(pace), "networks": found})
        run.say(training_table(network, pace, errors, away))


def _run(run: Run) -> None:
    if "training" in run.asked.parts:
        open_cifar10()  # says what is missing before half an hour is spent
    for part, run_part in zip(PARTS, (run_steps, run_reconstruction, run_training), strict=True):
        if part in run.asked.parts:
            run_part(run)


main = Bench(
    _run,
    option("--parts", known=PARTS, default=list(PARTS)),
    option("--batch", type=int, help="images in a step; default 8"),
    option("--image", type=int, help="pixels along each side; default 128"),
    option("--turns", type=int, help="timed steps of each contender; default 7"),
    CPU_TIME,
    option("--networks", known=NARROW, default=["resnet"], help="of vgg, resnet, to train"),
    *PACE_OPTIONS,
    quick="small networks, few images: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
