"""What a run under a budget owes to the same run under plain PyTorch, whatever the host."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.engine.status import Status
from tests.float32_rule import too_far
from tests.hosts.meter import HostMeter

ROWS = "SHOAL_HOSTS_ROWS"  # names the file that `bench.hosts` reads, a line of JSON for each comparison
EPOCHS, BATCHES, BATCH = 2, 3, 8
ROUNDING = 1e-3  # of the largest value of a layer: what a few steps of float32 may differ by; no host trains in float64
_METERED_STEPS = 3  # the first of a run, while Shoal plans and meters
CLASSES = 4


def network() -> nn.Sequential:
    """A small convolutional network, most of whose step is activations; the same weights every time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 8, 8, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def images(count: int = BATCHES * BATCH, side: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and their classes; the same every time."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(count, 3, side, side, generator=generator),
        torch.randint(CLASSES, (count,), generator=generator),
    )


def batch_bytes(data: Iterable[torch.Tensor]) -> int:
    """Bytes of one batch of a data set."""
    return sum(t.nbytes * BATCH // len(t) for t in data)


def loader(batch: int = BATCH) -> DataLoader:
    """The data set in batches, in order."""
    return DataLoader(TensorDataset(*images()), batch_size=batch)


@dataclass(frozen=True)
class Run:
    """What a host's run left over: parameters and buffers by name, and the highest peak of its later steps."""

    state: dict[str, np.ndarray]
    peak_bytes: int
    steps: int
    step_seconds: tuple[float, ...]


def metered(train: Callable[[], nn.Module]) -> Run:
    """Let a host train, and measure it from outside."""
    with HostMeter() as meter:
        model = train()
    named = model.state_dict().items()  # as arrays, which the next run's meter does not count
    state = {name.replace("_orig_mod.", ""): value.detach().numpy().copy() for name, value in named}
    return Run(state, meter.peak_bytes, meter.steps, tuple(meter.step_seconds))


def holds_to(
    budget_share: float,
    train: Callable[[int | None], nn.Module],
    beside_bytes: int = 0,
    more_precisely: Callable[[], nn.Module] | None = None,
) -> tuple[Run, int]:
    """Train plainly, then inside that share of what this took: the same to rounding, never a byte over the budget.

    Args:
        train: trains a new model inside a budget, None for plain PyTorch, and returns it.
        beside_bytes: what the host holds in addition to the step, as its page says: such as the next batch, which some
            read before they run a step.
        more_precisely: trains it in plain PyTorch in a wider dtype, where `train` has one narrower than float32: its
            rounding is far more than what is allowed here, and both runs are held against this one.

    Returns:
        The run inside the budget, and the budget.
    """
    plain = metered(lambda: train(None))
    budget = int(budget_share * (plain.peak_bytes - beside_bytes))
    there = {id(status) for status in _statuses()}
    planned = metered(lambda: train(budget))
    assert planned.state.keys() == plain.state.keys()
    right = plain if more_precisely is None else metered(more_precisely)
    unequal = list(beyond_rounding(planned.state, plain.state, right.state))
    _write_row(
        graphs=max((_graphs(status) for status in _statuses() if id(status) not in there), default=None),
        budget_bytes=budget,
        plain_peak_bytes=plain.peak_bytes - beside_bytes,
        peak_bytes=planned.peak_bytes - beside_bytes,
        steps=planned.steps,
        unequal=unequal,
        first_seconds=planned.step_seconds[0] - plain.step_seconds[0],
        step_seconds=planned.step_seconds[_METERED_STEPS:],
        plain_seconds=plain.step_seconds[_METERED_STEPS:],
    )
    assert planned.steps == plain.steps >= EPOCHS * BATCHES
    assert not unequal
    assert 0 < planned.peak_bytes - beside_bytes <= budget, f"plain: {plain.peak_bytes} bytes"
    return planned, budget


def beyond_rounding(
    ours: Mapping[str, np.ndarray], plain: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray] | None = None
) -> dict[str, tuple[float, float]]:
    """The tensors that differ by more than rounding, each with its largest difference and the one allowed.

    `right`: the values of a run in a wider dtype, whose error is none; None: those of `plain`.
    """
    runs = ({name: torch.from_numpy(value) for name, value in run.items()} for run in (ours, plain, right or plain))
    return too_far(*runs, ROUNDING)


def _statuses() -> list[Status]:
    return [
        held for held in gc.get_objects() if type(held) is Status and held.plans
    ]  # a dead proxy has no class to ask for


def _graphs(status: Status) -> int:
    """How many graphs the model's step is."""
    assert status.plan is not None
    return len({op.name.split(".")[0] for op in status.plan.graph.ops if op.name.startswith("part")}) or 1


def _write_row(**figures: Any) -> None:
    if file := os.environ.get(ROWS):
        test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
        with Path(file).open("a") as rows:
            rows.write(json.dumps({"test": test, **figures}) + "\n")
