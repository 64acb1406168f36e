"""`torch.compile(model, backend="shoal")`: the same engine through PyTorch's own entry point."""

from __future__ import annotations

import copy
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.engine.backend import backend
from shoal.errors import BudgetError, CaptureError, InputError
from tests.engine.training_laws import (
    classifier,
    costs_that_do_not_matter,
    differences,
    images,
    keep_by_chance,
    keep_nothing,
    train,
)
from tests.raising import raising


def through_torch(net: nn.Module, **options: Any) -> Any:
    return torch.compile(copy.deepcopy(net), backend=backend, options=options)


def wrong_after_training(planned: nn.Module, plain: nn.Module, batches: list[torch.Tensor]) -> list[str]:
    """What differs between the two once both have trained; torch.compile gives parameters longer names."""
    with costs_that_do_not_matter():
        found = {name.replace("_orig_mod.", ""): value for name, value in train(planned, batches).items()}
    return differences(found, train(plain, batches))


@pytest.mark.parametrize("planner", [keep_by_chance(3, 0.5, 0.5), "joint"])
def test_it_trains_like_plain_pytorch_with_a_planner_of_ones_own_and_one_by_name(planner: Any) -> None:
    net, batches = nn.Sequential(*classifier(3, 8, 8), nn.Dropout(0.3)), images(3, 4, 3, 8, 8)
    assert not wrong_after_training(through_torch(net, budget="1TiB", planner=planner), net, batches)


def test_without_options_it_keeps_everything_and_trains_like_plain_pytorch() -> None:
    net, batches = classifier(3, 8, 8), images(2, 4, 3, 8, 8)
    planned = torch.compile(copy.deepcopy(net), backend=backend)
    assert not wrong_after_training(planned, net, batches)


@pytest.mark.parametrize(
    ("dynamic", "planned_for"),
    [(False, (8, 6, 5)), (None, (8, 12))],  # without a record of earlier calls, a size that varies is taken to grow
)
def test_each_shape_gets_its_plan_unless_torch_makes_its_sizes_symbolic(
    dynamic: bool | None, planned_for: tuple[int, ...]
) -> None:
    sizes = []

    def planner(graph: Any, hardware: Any, budget_bytes: int) -> Any:
        sizes.append(next(s.shape for s in graph.storages if s.kind == "input"))
        return keep_nothing(graph, hardware, budget_bytes)

    net = classifier(3, 8, 8)
    batches = [batch for size in (8, 6, 5, 8) for batch in images(1, size, 3, 8, 8)]
    options = {"budget": "1TiB", "planner": planner}
    planned = torch.compile(copy.deepcopy(net), backend=backend, dynamic=dynamic, options=options)
    assert not wrong_after_training(planned, net, batches)
    assert sizes == [(size, 3, 8, 8) for size in planned_for]


def test_the_planner_gets_the_budget_in_bytes() -> None:
    budgets = []

    def planner(graph: Any, hardware: Any, budget_bytes: int) -> Any:
        budgets.append(budget_bytes)
        return keep_nothing(graph, hardware, budget_bytes)

    with costs_that_do_not_matter():
        through_torch(classifier(3, 8), budget="2GiB", planner=planner)(*images(1, 4, 3, 8, 8))
    assert budgets == [2 * 2**30]


def test_a_budget_that_no_plan_fits_names_what_would_do() -> None:
    planned = through_torch(classifier(3, 8, 8), budget="10KiB")
    with costs_that_do_not_matter(), pytest.raises(BudgetError) as caught:
        planned(*images(1, 4, 3, 8, 8))
    assert caught.value.least_feasible_bytes > 10 * 1024


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"buget": "2GiB"}, "options= of the backend 'shoal' has no 'buget'; type 'budget'"),
        ({"plan": None}, "options= of the backend 'shoal' has no 'plan'; type 'planner'"),
        ({"budget": "much"}, "budget='much' is not a size"),
        ({"budget": 0}, "budget=0 is less than a byte; it must be positive"),
        ({"planner": "keepall"}, "no planner is called 'keepall'; did you mean 'keep_all'?"),
        ({"kernels": "nvfuser"}, "kernels='nvfuser': expected"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    with raising(InputError, complaint):
        through_torch(nn.Conv2d(3, 4, 3), **options)(*images(1, 2, 3, 8, 8))


def test_torchs_modes_are_refused() -> None:
    planned = torch.compile(nn.Conv2d(3, 4, 3), backend=backend, mode="max-autotune")
    with raising(InputError, "mode='max-autotune'", "'shoal'"):
        planned(*images(1, 2, 3, 8, 8))


class Halting(nn.Module):
    """Two convolutions and something between them that Dynamo cannot capture."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()  # here
        return self.two(x)


def test_a_graph_break_is_refused_with_its_line() -> None:
    text = Path(__file__).read_text().splitlines()
    number = next(n for n, line in enumerate(text, 1) if line.endswith("graph_break()  # here"))
    with raising(CaptureError, f"{Path(__file__).name}:{number}"):
        through_torch(Halting(), budget="1TiB")(*images(1, 2, 3, 8, 8))


@pytest.mark.skipif(
    not any(entry.name == "shoal" for entry in entry_points(group="torch_dynamo_backends")),
    reason="torch finds the backend by name where shoal is installed",
)
def test_torch_knows_it_by_name() -> None:
    net, batches = classifier(3, 8), images(2, 4, 3, 8, 8)
    planned = torch.compile(copy.deepcopy(net), backend="shoal", options={"budget": "1TiB", "planner": keep_nothing})
    assert not wrong_after_training(planned, net, batches)
