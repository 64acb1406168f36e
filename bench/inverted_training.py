"""Whether a network in the inverted form learns what it learns in the plain one, and survives the way there and back.

Three networks from the same start and over the same batches for each seed: batch norm and ReLU; batch norm and
LeakyReLU, which is what the inverted form computes; and the inverted form. What the first two differ by is the price of
the slope, what the last two differ by that of the inversion.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from rich.table import Table
from torch import nn

import shoal
from bench.frame import WrongResult
from bench.split_accuracy import NARROW, Pace, error_percent, finding, told, train
from bench.tables import new_table
from shoal.transforms.invert.inverted_model import InvertedModel

SLOPE = 0.01
THERE_AND_BACK = 1e-5  # of the largest output

Split = tuple[torch.Tensor, torch.Tensor]


def plain(net: nn.Module) -> nn.Module:
    return net


def leaky(net: nn.Module) -> nn.Module:
    """LeakyReLU in PyTorch's own modules where the inverted form has it."""
    return shoal.restore_batchnorm(shoal.invert_batchnorm(net, SLOPE))


def inverted(net: nn.Module) -> nn.Module:
    return shoal.invert_batchnorm(net, SLOPE)


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
        restored = shoal.restore_batchnorm(copy.deepcopy(model))
    else:
        there = shoal.invert_batchnorm(copy.deepcopy(model), SLOPE)
        restored = shoal.restore_batchnorm(there, activation="relu")
        state = model.state_dict()
        for name, value in restored.state_dict().items():
            if not torch.allclose(value, state[name], rtol=1e-6, atol=1e-9):
                raise WrongResult(f"{name} came back as another")
    away = float((restored(images) - before).abs().max() / before.abs().max())
    if away > THERE_AND_BACK:
        raise WrongResult(f"outputs came back {away:.1e} off, expected {THERE_AND_BACK:g} at most")
    return away


def table(network: str, pace: Pace, errors: Mapping[str, list[float]], away: Mapping[str, list[float]]) -> Table:
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
        shown.add_row(name, told(found), verdict, f"{max(away[name]):.0e}")
    return shown
