"""`shoal.fit` finds the batch that trying every one finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import BudgetError, InputError
from tests.engine.training_laws import blocks

HOW: dict[str, Any] = {"hardware": "p100-nvlink", "allow": "recompute, fuse"}


def network() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*blocks(3, 8), nn.Flatten())


def images(batch: int) -> torch.Tensor:
    return torch.empty(batch, 3, 16, 16, device="meta")


def fits(batch: int, budget: int) -> bool:
    try:
        return shoal.plan(network(), images(batch), budget, **HOW).predicted_peak_bytes <= budget
    except BudgetError:
        return False


def test_the_next_one_does_not_fit() -> None:
    budget = 200_000
    tried: list[int] = []
    found = shoal.fit(network(), images, budget, first=4, trying=tried.append, **HOW)
    assert found.batch > 1 and found.too_many == found.batch + 1
    assert fits(found.batch, budget) and not fits(found.batch + 1, budget)
    assert found.plan == shoal.plan(network(), images(found.batch), budget, **HOW)
    assert found.images_per_second == pytest.approx(found.batch / found.plan.predicted_seconds)
    assert tried[0] == 4 and set(tried) >= {found.batch, found.too_many}


def test_it_finds_the_largest_image_too() -> None:
    found = shoal.fit(
        network(), lambda side: (torch.empty(2, 3, side, side, device="meta"),), "300KB", max_batch=24, **HOW
    )
    assert found.batch == 24 and found.too_many == 0  # where it was told to stop
    assert found.plan.predicted_peak_bytes <= 300_000


def test_where_not_even_one_fits_the_least_is_told() -> None:
    with pytest.raises(BudgetError, match="no plan of Sequential fits") as refused:
        shoal.fit(network(), images, 6000, first=2, **HOW)
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None and fits(1, least_bytes) and not fits(1, least_bytes - 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"make_example": images(2)}, "make_example=.*expected a function of a batch size"),
        ({"make_example": lambda batch: batch}, r"make_example\(16\) is 16; expected a tensor"),
        ({"budget": None}, "no budget was given"),
        ({"budget": "few"}, "budget='few' is not a size"),
        ({"first": 0}, "first=0: expected a positive int"),
        ({"max_batch": 1.5}, "max_batch=1.5: expected a positive int"),
        ({"allow": "magic"}, "allow has an unknown name 'magic'"),
        ({"model": 3}, "model is a int"),
    ],
)
def test_a_mistake_is_told(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        shoal.fit(**{"model": network(), "make_example": images, "budget": "1MiB", **arguments})
