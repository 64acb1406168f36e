"""Models that set themselves up in their first call: several graphs in that, which then begins again as one."""

from __future__ import annotations

import copy
import logging
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import shoal
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    classifier,
    costs_that_do_not_matter,
    differences,
    images,
    train,
)
from tests.scratch import needs_little_scratch

LOCK = threading.Lock()


class HookingItself(nn.Module):
    """Registers its hooks in its first call, under a lock, as the backbones of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = classifier(3, 4, 4)
        self.is_hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            with LOCK:
                self.net[0].register_forward_hook(lambda layer, inputs, output: output * 1.5)
                self.is_hooked = True
        return self.net(x)


class HookingItselfAndBreaking(HookingItself):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        torch._dynamo.graph_break()
        return out * 2


@pytest.mark.slow
def test_it_is_planned_as_one_graph_from_its_first_step_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        planned = assert_same_training(HookingItself(), images(1, 2, 3, 8, 8))
        assert not planned.shoal.plan.breaks
        planned = assert_same_training(HookingItself(), images(4, 2, 3, 8, 8))
    assert not planned.shoal.plan.breaks
    assert len(planned.shoal.plans) == 1
    assert "HookingItself is one graph since its first call" in caplog.text


class HookingItselfHalfway(HookingItself):
    """What its first half saves is kept while its graphs are several."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*blocks(3, 16, 16, 16, 16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


@pytest.mark.slow
@needs_little_scratch
def test_it_trains_in_a_budget_in_which_it_fits_as_one_graph_alone() -> None:
    torch.manual_seed(0)
    model = HookingItselfHalfway()
    plain, batches = copy.deepcopy(model), images(3, 2, 3, 32, 32)
    hooked = copy.deepcopy(model)
    hooked(batches[0])
    least = shoal.plan(hooked, batches[0], budget="1GiB", allow="bitwise").predicted_peak_bytes // 2
    found = train(shoal.compile(model, budget=least, allow="bitwise"), batches)
    assert not differences(found, train(plain, batches))
    assert not model.shoal.plan.breaks


def test_one_that_breaks_in_later_calls_too_is_still_planned_as_several_graphs() -> None:
    planned = assert_same_training(HookingItselfAndBreaking(), images(4, 2, 3, 8, 8))
    assert planned.shoal.plan.breaks


def test_it_is_tried_again_once_no_call_is_under_way() -> None:
    batches = [torch.cat(pair) for pair in zip(*[iter(images(8, 2, 3, 8, 8))] * 2, strict=True)]

    class Twice(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x[:2]) + self.model(x[2:])

    torch.manual_seed(0)
    model = HookingItself()
    plain = Twice(copy.deepcopy(model))
    with costs_that_do_not_matter():
        found = train(Twice(shoal.compile(model, budget="1GiB", allow="bitwise")), batches)
    assert not differences(found, train(plain, batches))
    assert not model.shoal.plan.breaks


def test_what_changes_in_every_call_makes_no_new_graph() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier(3, 4, 4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            torch._dynamo.graph_break()
            return self.net(x)

    planned = assert_same_training(Counting(), images(3, 2, 3, 8, 8))
    assert planned.shoal.plan.breaks
    assert planned.calls == 3


def test_a_tensor_that_a_captured_call_replaces_is_freed_by_it() -> None:
    """The weight of a pruned layer is an attribute of it, and another one after each call."""
    net = nn.Sequential(prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), nn.ReLU(), nn.Linear(8, 1))
    model = shoal.compile(net, "1GiB", optimizer="sgd", allow="bitwise")
    captures = []
    for batch in (4, 4, 6, 9):
        replaced = weakref.ref(net[0].weight)
        loss = model(torch.randn(batch, 8)).square().mean()
        assert replaced() is None
        loss.backward()
        captures.append(model.shoal.captures)
    assert captures[0] < captures[-1]  # other sizes were captured again
