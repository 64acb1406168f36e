"""Numbers that change from one step to the next are inputs of the step: it is captured twice, not each time."""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.backend import PlannedStep
from tests.engine.compile.compiled import compiled
from tests.engine.training_laws import blocks, costs_that_do_not_matter, images, mean_square, same_bits

STEPS = 6


class Net(nn.Module):
    """Two convolutions; what is between them is given a number."""

    def __init__(self, between: Callable[[Any, torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), between
        self.tau, self.calls = 2.0, 1

    def forward(self, x: torch.Tensor, number: float = 1.0) -> torch.Tensor:
        return self.two(self.between(self, self.one(x), number).sigmoid()).sigmoid()


def counted(net: Any, y: torch.Tensor, number: Any) -> torch.Tensor:
    net.calls += 1
    return y * net.calls


def counted_only(net: Any, y: torch.Tensor, number: Any) -> torch.Tensor:
    net.calls += 1
    return y


def trained(model: Any, numbers: Sequence[float], before: Callable[[Any], None]) -> list[Any]:
    left: list[Any] = []
    torch.manual_seed(1)
    for x, number in zip(images(len(numbers), 2, 3, 6, 6), numbers, strict=True):
        before(model)
        model.zero_grad()
        y = model(x, number)
        mean_square(y).backward()
        left += [y.detach(), *(p.grad for p in model.parameters()), torch.tensor([model.tau, model.calls])]
    return left


FLOATS = [1 / (place + 1.5) for place in range(STEPS)]


@pytest.mark.parametrize(
    ("between", "numbers", "before", "captures"),
    [
        (lambda net, y, number: y / number, FLOATS, lambda net: None, 2),
        (lambda net, y, number: F.softmax(y * (2 * number + 0.3), 1), FLOATS, lambda net: None, 2),
        (lambda net, y, number: F.gumbel_softmax(y, tau=number, dim=1), FLOATS, lambda net: None, 2),
        (lambda net, y, number: y / net.tau, [1.0] * STEPS, lambda net: setattr(net, "tau", 0.9 * net.tau), 2),
        (lambda net, y, number: y * number - number, range(2, 2 + STEPS), lambda net: None, 2),
        (counted, [1.0] * STEPS, lambda net: None, 2),
        (counted_only, [1.0] * STEPS, lambda net: None, 2),
        # What PyTorch can have as a number only, or as a size, is captured for each.
        (lambda net, y, number: y.clamp(max=number), FLOATS, lambda net: None, STEPS),
        (lambda net, y, number: y[:, :, : number + 1], range(2), lambda net: None, 2),
        (lambda net, y, number: y * number, [1.0, 2.0, float("inf"), 3.0], lambda net: None, 2),
    ],
    ids=["divided", "scaled", "gumbel", "attribute", "int", "counter", "unused counter", "clamp", "size", "infinite"],
)
def test_numbers_that_change_train_as_in_plain_pytorch_and_are_captured_twice(
    between: Any, numbers: Sequence[float], before: Any, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[PlannedStep] = []
    partition = PlannedStep.partition

    def counting(self: PlannedStep, *args: Any, **kwargs: Any) -> Any:
        planned.append(self)
        return partition(self, *args, **kwargs)

    monkeypatch.setattr(PlannedStep, "partition", counting)
    torch.manual_seed(0)
    net = Net(between)
    expected = trained(copy.deepcopy(net), numbers, before)
    with costs_that_do_not_matter():
        found = trained(compiled(net), numbers, before)
    assert all(same_bits(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert len(planned) == captures


def test_a_number_that_is_an_input_does_not_make_sizes_inputs() -> None:
    net = Net(lambda net, y, number: y / number)
    model = compiled(net)
    with costs_that_do_not_matter():
        for side, number in ((6, 1.0), (6, 2.0), (7, 3.0), (8, 4.0), (6, 5.0), (7, 6.0)):
            mean_square(model(torch.randn(2, 3, side, side), number)).backward()
            model.zero_grad()
    sizes = {s.shape for plan in model.shoal.plans for s in plan.graph.storages if s.kind == "input" and s.shape}
    assert sizes == {(2, 3, 6, 6), (2, 3, 9, 9)}  # of the first one, and the one plan for sizes that vary


@pytest.mark.parametrize(
    ("between", "calls", "what"),
    [
        (lambda net, y, number: y.clamp(max=number), lambda step: (6, 1.5 + step), r"args\[1\] == 2\.5"),
        (lambda net, y, number: y**net.tau, lambda step: (6, step), r"model\.tau == 3\.0"),
    ],
    ids=["argument", "attribute"],
)
def test_past_the_most_captures_a_step_is_captured_anew_and_what_varied_is_named(
    between: Any, calls: Any, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["shoal.capture.dynamo"], "MOST_CAPTURES", 2)
    monkeypatch.setattr(sys.modules["shoal.capture.dynamo"], "_MANY_CAPTURES", 2)
    torch.manual_seed(0)
    net = Net(between)
    model = compiled(net)
    with costs_that_do_not_matter(), caplog.at_level(logging.WARNING, "shoal"):
        for step in range(4):
            side, number = calls(step)
            x = torch.randn(2, 3, side, side)
            for one in (net, model):
                one.tau = 2.0 + step
                one.zero_grad()
                mean_square(one(x, number)).backward()
            pairs = zip(net.parameters(), model.parameters(), strict=True)
            assert all(same_bits(ours.grad, theirs.grad) for ours, theirs in pairs)
    assert "captured and planned 2 times" in caplog.text
    (said,) = [record.getMessage() for record in caplog.records if "more than 2 different" in record.getMessage()]
    assert re.search(what, said)


def test_a_step_that_was_planned_before_in_another_layout_has_no_sizes_that_vary() -> None:
    net, (batch,) = nn.Sequential(*blocks(3, 8)), images(1, 2, 3, 8, 8)
    fresh = copy.deepcopy(net)
    shoal.plan(net, batch)
    for model in (fresh, net):
        shoal.compile(model)(batch.to(memory_format=torch.channels_last)).sum().backward()
    assert net.shoal.plan.graph.fingerprint == fresh.shoal.plan.graph.fingerprint
