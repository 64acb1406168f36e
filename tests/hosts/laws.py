"""What a run under a budget owes to the same run under plain PyTorch, whatever the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.hosts.meter import HostMeter

EPOCHS, BATCHES, BATCH = 2, 3, 8
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
    """What a host's run left behind: parameters and buffers by name, and the highest peak of its later steps."""

    state: dict[str, np.ndarray]
    peak_bytes: int
    steps: int


def metered(train: Callable[[], nn.Module]) -> Run:
    """Let a host train, and measure it from outside."""
    with HostMeter() as meter:
        model = train()
    named = model.state_dict().items()  # as arrays, which the next run's meter does not count
    state = {name.replace("_orig_mod.", ""): value.detach().numpy().copy() for name, value in named}
    return Run(state, meter.peak_bytes, meter.steps)


def holds_to(
    budget_share: float,
    train: Callable[[int | None], nn.Module],
    beside_bytes: int = 0,
) -> tuple[Run, int]:
    """Train plainly, then inside that share of what this took: the same bits, and never a byte over the budget.

    Args:
        train: trains a new model inside a budget, None for plain PyTorch, and returns it.
        beside_bytes: what the host holds beside the step, as its page says: such as the next batch, which some read
            before they run a step.

    Returns:
        The run inside the budget, and the budget.
    """
    plain = metered(lambda: train(None))
    budget = int(budget_share * (plain.peak_bytes - beside_bytes))
    planned = metered(lambda: train(budget))
    assert planned.steps == plain.steps >= EPOCHS * BATCHES
    assert planned.state.keys() == plain.state.keys()
    assert not [name for name, value in plain.state.items() if not np.array_equal(value, planned.state[name])]
    assert 0 < planned.peak_bytes - beside_bytes <= budget, f"plain: {plain.peak_bytes} bytes"
    return planned, budget
