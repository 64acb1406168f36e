"""Accelerate's loop inside a budget, also in mixed precision and with accumulated gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.hosts import page
from tests.hosts.laws import batch_bytes, holds_to, loader, network

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-hosts")
LINES = page.block("accelerate.md")


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "code",
    [LINES, LINES.replace("cpu=True", 'cpu=True, mixed_precision="bf16"')],
    ids=["float32", "bfloat16"],
)
def test_it_trains_inside_the_budget_as_plain_pytorch_does(code: str) -> None:
    batches = loader()

    def train(budget: int | None, code: str = code) -> nn.Module:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the last run's precision is not ours
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        page.run(code, budget, net=net, optimizer=optimizer, batches=batches, nn=nn)
        return net

    def in_float32() -> nn.Module:
        return train(None, LINES)

    data = batches.dataset.tensors
    holds_to(0.7, train, batch_bytes(data), more_precisely=None if code == LINES else in_float32)


def test_its_enum_still_does_not_know_the_backend() -> None:
    """Once it does, the page's change is no longer needed."""
    with pytest.raises(ValueError, match="SHOAL"):
        accelerate.Accelerator(dynamo_backend="shoal")
