"""What the loss is given besides the model's outputs is of the step: it counts in what is measured and in the plans."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.errors import BudgetError
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="the loss is metered only with a C++ compiler"
)
Loss = Callable[[torch.Tensor], torch.Tensor]

CLASSES = 3
IMAGE = (2, 3, 24, 24)
LABELS = torch.zeros(2, 24, 24, dtype=torch.long)
MASK, CLASS_WEIGHTS = torch.ones(2, 1, 24, 24), torch.ones(CLASSES)
MAPS = torch.zeros(2, CLASSES, 24, 24)  # of a teacher that was called before
ALL_LABELS = torch.zeros(200, 24, 24, dtype=torch.long)


def network() -> nn.Sequential:
    block = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*block, nn.Conv2d(8, CLASSES, 3, padding=1))


def labels_alone(outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, LABELS)


def masked(outputs: torch.Tensor) -> torch.Tensor:
    return (F.cross_entropy(outputs, LABELS, CLASS_WEIGHTS) * MASK).mean()


def distilled(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - MAPS).square().mean()  # nothing of the maps is saved for the backward pass


def two_of_many(outputs: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, ALL_LABELS[4:6])


LOSSES: list[tuple[Loss, int]] = [
    (labels_alone, LABELS.nbytes),
    (masked, LABELS.nbytes + CLASS_WEIGHTS.nbytes + MASK.nbytes),
    (distilled, MAPS.nbytes),
    (two_of_many, LABELS.nbytes),
]


def bytes_of_a_step(model: nn.Module, batch: torch.Tensor, loss: Loss) -> int:
    """What one more step uses, by PyTorch's own memory events, without what the loss is given."""
    model.zero_grad()
    _, changes = allocations.record(lambda: loss(model(batch)).backward())
    model.zero_grad()
    return distinct_bytes([*model.parameters(), batch]) + allocations.peak_bytes(changes)


@pytest.mark.parametrize(("loss", "given_bytes"), LOSSES)
def test_what_the_loss_is_given_counts(loss: Loss, given_bytes: int) -> None:
    unread = torch.zeros(10**6)
    model, batch = shoal.compile(network()), torch.randn(IMAGE)
    for _ in range(3):
        loss(model(batch)).backward()
        model.zero_grad()
    used_bytes = bytes_of_a_step(model, batch, loss) + given_bytes
    status = model.shoal
    assert status.measured_peak_bytes == pytest.approx(used_bytes, rel=0.001)
    assert status.predicted_peak_bytes == pytest.approx(used_bytes, rel=0.02)
    assert unread.numel() == 10**6


@pytest.mark.parametrize(("loss", "given_bytes"), LOSSES)
def test_the_minimum_that_is_named_has_room_for_it(loss: Loss, given_bytes: int) -> None:
    batch = torch.randn(IMAGE)
    with pytest.raises(BudgetError) as refused:
        loss(shoal.compile(network(), budget=distinct_bytes(network().parameters()) + 100, allow="bitwise")(batch))
    budget = refused.value.least_feasible_bytes
    assert budget is not None
    model = shoal.compile(network(), budget=budget, allow="bitwise")
    for _ in range(4):
        loss(model(batch)).backward()
        assert bytes_of_a_step(model, batch, loss) + given_bytes <= budget


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = network()[:2], network()[2:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_it_counts_for_a_model_of_several_graphs_and_for_models_of_one_budget() -> None:
    batch = torch.randn(IMAGE)
    for model in (shoal.compile(Broken(), budget="8MiB"), shoal.compile(network(), budget=shoal.Budget("8MiB"))):
        for _ in range(3):
            labels_alone(model(batch)).backward()
            model.zero_grad()
        used_bytes = bytes_of_a_step(model, batch, labels_alone) + LABELS.nbytes
        assert used_bytes <= (model.shoal.measured_peak_bytes or 0)


def test_what_another_model_reads_between_the_passes_counts_in_its_own_budget() -> None:
    batch = torch.randn(IMAGE)
    critic = shoal.compile(nn.Sequential(nn.Conv2d(CLASSES, 64, 3), nn.Conv2d(64, 64, 3)))

    def judged(outputs: torch.Tensor) -> torch.Tensor:
        return critic(outputs).square().mean()

    model = shoal.compile(network())
    for _ in range(3):
        judged(model(batch)).backward()
        model.zero_grad()
        critic.zero_grad()
    used_bytes = bytes_of_a_step(model, batch, judged)
    assert model.shoal.measured_peak_bytes == pytest.approx(used_bytes, rel=0.001)
