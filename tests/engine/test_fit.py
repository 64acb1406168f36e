"""`shoal.fit` finds the batch that trying every one finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.engine import plans_by_batch as module
from shoal.errors import BudgetError, InputError
from tests.engine.training_laws import blocks
from tests.raising import raising

HOW: dict[str, Any] = {"hardware": "p100-nvlink", "allow": "recompute, fuse"}


def network() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*blocks(3, 8), nn.Flatten())


class HalfDown(nn.Module):
    """Two branches, of which the one that ends small runs second as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, narrow = self.wide(x).relu(), self.narrow(x).relu()
        return wide.mean((2, 3)) + narrow.mean((2, 3))


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


def test_of_the_batches_that_are_tried_the_answer_alone_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    original = module.best_variant

    def counting(candidates: Any, *rest: Any) -> Any:
        planned.append(candidates)
        return original(candidates, *rest)

    monkeypatch.setattr(module, "best_variant", counting)
    tried: list[int] = []
    found = shoal.fit(network(), images, 400_000, first=4, trying=tried.append, **HOW)
    assert found.batch > 1 and len(tried) >= 4 and len(planned) == 1


def test_a_batch_that_fits_in_an_order_that_is_not_allowed_is_none() -> None:
    """Whether one fits is asked of plans that order ops; the answer has a plan by what is allowed."""
    how = HOW | {"allow": "recompute"}
    with torch.device("meta"):
        net = HalfDown()

    def wide(batch: int) -> torch.Tensor:
        return torch.empty(batch, 3, 16, 16, device="meta")

    found = shoal.fit(net, wide, 300_000, first=4, **how)
    assert found.plan == shoal.plan(net, wide(found.batch), 300_000, **how)
    with pytest.raises(BudgetError):
        shoal.plan(net, wide(found.too_many), 300_000, **how)


def test_it_finds_the_largest_image_too() -> None:
    found = shoal.fit(
        network(), lambda side: (torch.empty(2, 3, side, side, device="meta"),), "300KB", max_batch=24, **HOW
    )
    assert found.batch == 24 and found.too_many == 0  # where it was told to stop
    assert found.plan.predicted_peak_bytes <= 300_000


def test_where_not_even_one_fits_the_least_is_told() -> None:
    with pytest.raises(BudgetError) as refused:
        shoal.fit(network(), images, 6000, first=2, **HOW)
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None and fits(1, least_bytes) and not fits(1, least_bytes - 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"make_example": images(2)}, "make_example="),
        ({"make_example": lambda batch: batch}, "make_example(16)"),
        ({"budget": None}, ""),
        ({"budget": "few"}, "budget='few'"),
        ({"first": 0}, "first=0"),
        ({"max_batch": 1.5}, "max_batch=1.5"),
        ({"trying": None}, "trying=None"),
        ({"allow": "magic"}, "'magic'"),
        ({"model": 3}, ""),
    ],
)
def test_a_mistake_is_told(arguments: dict[str, Any], said: str) -> None:
    with raising(InputError, said):
        shoal.fit(**{"model": network(), "make_example": images, "budget": "1MiB", **arguments})


class Halving(nn.Module):
    """Halves two of three axes twice and joins what it had before: a U-Net in little."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv3d(n, 4, 3, (1, 2, 2), 1) for n in (1, 4))
        self.up = nn.ModuleList(nn.ConvTranspose3d(n, 4, (1, 2, 2), (1, 2, 2)) for n in (4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.down[0](x)
        return torch.cat([x, self.up[1](torch.cat([half, self.up[0](self.down[1](half))], 1))], 1)


def halving() -> nn.Module:
    with torch.device("meta"):
        return Halving()


def volumes(patch: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(2, 1, *patch, device="meta")


def patch_fits(patch: tuple[int, ...], budget: int) -> bool:
    try:
        return shoal.plan(halving(), volumes(patch), budget, **HOW).predicted_peak_bytes <= budget
    except BudgetError:
        return False


@pytest.mark.slow
def test_the_largest_patch_grows_by_what_the_strides_divide_within_its_limits() -> None:
    budget = 1_500_000
    tried: list[Any] = []
    found = shoal.fit(
        halving(), volumes, budget, patch=(8, 16, 16), max_patch=(19, 999, 999), trying=tried.append, **HOW
    )
    assert found.multiple_of == (1, 4, 4) and found.batch == 2 and found.too_many == 0
    assert found.patch[0] <= 19 and found.patch[1] % 4 == found.patch[2] % 4 == 0
    assert found.plan == shoal.plan(halving(), volumes(found.patch), budget, **HOW)
    assert tried[0] == (8, 16, 16) and found.patch in tried and found.too_large in tried
    deep, high, wide = found.patch
    assert not patch_fits(found.too_large, budget)
    assert not patch_fits((deep, high + 4, wide), budget) and not patch_fits((deep, high, wide + 4), budget)
    assert str(found).startswith(
        f"{deep}x{high}x{wide}, 2 at a time ({'x'.join(map(str, found.too_large))} does not fit)"
    )
    assert found.to_json()["patch"] == [deep, high, wide]


def test_it_stops_at_the_largest_patch_that_it_may_take() -> None:
    found = shoal.fit(halving(), volumes, "1GB", patch=(4, 8, 8), max_patch=(6, 19, 16), multiple_of=(2, 4, 4), **HOW)
    assert found.patch == (6, 16, 16) and found.too_large == ()


def test_where_no_patch_fits_the_smallest_and_its_least_are_told() -> None:
    with raising(BudgetError, "1x4x4") as refused:
        shoal.fit(halving(), volumes, 3000, patch=(8, 16, 16), **HOW)
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None and patch_fits((1, 4, 4), least_bytes) and not patch_fits((1, 4, 4), least_bytes - 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"patch": (8, 18, 17)}, "8x16x16"),
        ({"patch": 16}, "(64, 128, 128)"),
        ({"patch": (8, 0, 8)}, "patch=(8, 0, 8)"),
        ({"patch": (8, 16, 16), "multiple_of": (4, 4)}, "multiple_of=(4, 4)"),
        ({"patch": (8, 16, 16), "max_patch": (8, 3, 16)}, "1x4x4"),
        ({"multiple_of": 4}, "patch="),
        ({"patch": (8, 16, 16), "max_batch": 4}, "patch="),
        ({"patch": (8, 16)}, "8x16"),
        ({"patch": (8, 16, 16), "make_example": 3}, "make_example=3"),
    ],
)
def test_a_mistaken_patch_is_told(arguments: dict[str, Any], said: str) -> None:
    with raising(InputError, said):
        shoal.fit(**{"model": halving(), "make_example": volumes, "budget": "1MiB", **HOW, **arguments})
