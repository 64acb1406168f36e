"""Steps of any batch size for a device that is not here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.core import presets
from shoal.engine.search import steps_by_batch as module
from shoal.engine.search.steps_by_batch import StepsByBatch
from shoal.errors import CaptureError
from tests.engine.training_laws import blocks

P100 = presets.get("p100-nvlink")


def shape_of(batch: int) -> tuple[int, ...]:
    return (batch, 3, 8, 8)


@pytest.fixture
def net() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*blocks(3, 8, 8), nn.Flatten())


@pytest.mark.parametrize("batch", [2, 4, 10])
def test_it_is_the_step_that_shoal_plan_plans(net: nn.Module, batch: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    steps = StepsByBatch(net, shape_of, P100, optimizer=optimizer)
    example = torch.empty(shape_of(batch), device="meta")
    planned = shoal.plan(net, example, hardware=P100, optimizer=optimizer).graph
    assert steps(batch).ops == planned.ops
    assert steps(batch).storages == planned.storages
    assert steps(batch).static_bytes == planned.static_bytes > 0
    assert steps(batch).link == P100.link


def test_few_steps_are_captured_and_none_twice(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def counting(model: nn.Module, example: torch.Tensor, **options: object) -> object:
        captured.append(example.shape[0])
        return capture_step(model, example, **options)

    capture_step = module.capture_step
    monkeypatch.setattr(module, "capture_step", counting)
    steps = StepsByBatch(net, shape_of, P100)
    for batch in (1, 4, 9, 9, 5, 16, 17):
        steps(batch)
    assert captured == [1, 4, 16, 64]


def test_steps_of_two_forms_have_those_between_captured(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "scaled_step", lambda *arguments: None)
    by_capture = StepsByBatch(net, shape_of, P100)(10)
    monkeypatch.undo()
    assert StepsByBatch(net, shape_of, P100)(10) == by_capture


def test_a_batch_that_the_network_cannot_take_is_told() -> None:
    with torch.device("meta"):
        narrow = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.Flatten())
    with pytest.raises(
        CaptureError, match=r"narrow cannot take an input of shape \(1, [^)]*\): .*more than 1 value per channel"
    ) as caught:
        StepsByBatch(narrow, shape_of, P100, name="narrow")(1)
    assert "\n" not in str(caught.value)


def test_nothing_is_allocated(net: nn.Module) -> None:
    """A batch of half a terabyte."""
    graph = StepsByBatch(net, lambda batch: (batch, 3, 512, 512), P100)(2**17)
    assert graph.resident_bytes > 2**38
    assert all(parameter.is_meta and parameter.grad is None for parameter in net.parameters())
