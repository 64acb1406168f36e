"""`split="auto"`: whole where that is as fast, in overlapping patches where only they fit, and the same training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shoal
from shoal.cost.measure import measure
from shoal.engine.search.choose_split import choose_split
from shoal.errors import BudgetError, InputError
from shoal.memory.static_memory import StaticMemory
from shoal.transforms.split.split import SplitModule
from tests.engine.training_laws import blocks

IMAGES = (2, 3, 64, 64)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.search.choose_split._DEPTHS", (0.5,))
    monkeypatch.setattr("shoal.engine.search.choose_split._PARTS", (2,))


def wide_at_first() -> nn.Module:
    """What fills its peak are two tensors of the first layers, which recomputation cannot make smaller."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(8),
        *blocks(32, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def least_bytes(model: nn.Module) -> int:
    with pytest.raises(BudgetError) as refused:
        shoal.plan(model, torch.empty(IMAGES), 100_000, offload_to=None)
    return refused.value.least_feasible_bytes


def chosen(model: nn.Module, budget_bytes: int) -> nn.Module:
    example = (torch.empty(IMAGES),)
    return choose_split(model, example, budget_bytes, measure("cpu"), static=StaticMemory(model), name="wide")


def test_what_fits_as_it_is_stays_whole() -> None:
    model = wide_at_first()
    assert chosen(model, 2**30) is model


def test_below_the_least_that_the_whole_needs_it_is_split_without_changing_its_function() -> None:
    model = wide_at_first()
    again = copy.deepcopy(model)
    divided = chosen(model, int(0.8 * least_bytes(model)))
    assert isinstance(divided, SplitModule) and divided.plan is not None and divided.plan.exact
    x = torch.randn(IMAGES)
    torch.testing.assert_close(divided(x), again(x))


def test_where_nothing_fits_the_nearest_is_told() -> None:
    model = wide_at_first()
    with pytest.raises(BudgetError) as refused:
        chosen(model, 200_000)
    assert 200_000 < refused.value.least_feasible_bytes < least_bytes(model)


def test_a_compiled_model_trains_split_under_its_own_names() -> None:
    model = wide_at_first()
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    whole = shoal.plan(model, torch.empty(IMAGES), 100_000_000)
    budget_bytes = int(0.45 * whole.plain_peak_bytes)
    trained = shoal.compile(model, budget_bytes, split="auto")
    for step in range(2):
        x = torch.randn(IMAGES, generator=torch.Generator().manual_seed(step))
        for one in (plain, trained):
            one.zero_grad()
            one(x).square().mean().backward()
    for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert list(trained.state_dict()) == names
    assert trained.shoal.measured_peak_bytes <= budget_bytes  # type: ignore[union-attr,operator]
    torch.testing.assert_close(trained.eval()(x), plain.eval()(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budget": "1GiB", "split": "much"}, "split='much': expected 'auto' or None"),
        ({"split": "auto"}, "chooses for a budget"),
    ],
)
def test_a_mistake_is_told(arguments: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        shoal.compile(wide_at_first(), **arguments)  # type: ignore[arg-type]
