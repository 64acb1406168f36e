"""`shoal.frontier` holds, at each of its points, what `shoal.plan` promises there, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE
from shoal.errors import BudgetError, CaptureError, InputError
from tests.engine.keywords import keywords
from tests.engine.search.test_best_variant import FUSED, normalised
from tests.engine.training_laws import blocks
from tests.raising import raising
from tests.scratch import needs_little_scratch

IMAGES = torch.empty(2, 3, 64, 64)
P100 = "p100-nvlink"


@pytest.mark.slow
@needs_little_scratch
def test_no_plan_made_by_itself_is_faster_and_none_fits_in_less() -> None:
    how: dict[str, Any] = {"allow": "recompute, fuse"}  # on the made-up machine, where what is fused is faster
    said: list[str] = []
    frontier = shoal.frontier(normalised(), IMAGES, points=3, budget="3MiB", trying=said.append, **how)
    assert frontier.means == ("fuse", "recompute") and frontier.hardware == "this machine"
    assert 3 * 2**20 in [point.budget_bytes for point in frontier.points]
    assert {point.variant for point in frontier.points} == {WHOLE, FUSED}
    for point in frontier.points:
        plan = shoal.plan(normalised(), IMAGES, point.budget_bytes, **how)
        assert point.seconds <= plan.predicted_seconds * (1 + 1e-9)
    plain = shoal.plan(normalised(), IMAGES)
    assert (frontier.plain_seconds, frontier.plain_peak_bytes) == (plain.predicted_seconds, plain.plain_peak_bytes)
    states_bytes = 2 * torch.get_rng_state().nbytes  # a budget that is named has room for all that dropout may keep
    least_bytes = frontier.points[0].budget_bytes - states_bytes
    with pytest.raises(BudgetError):
        shoal.plan(normalised(), IMAGES, least_bytes - 1, **how)
    assert said[0] == "the unmodified step" and "the smallest budget" in said


def test_nothing_but_keeping_is_one_point() -> None:
    frontier = shoal.frontier(normalised(), IMAGES, hardware=P100, allow="keep")
    (point,) = frontier.points
    plain = shoal.plan(normalised(), IMAGES, hardware=P100)
    assert (point.budget_bytes, frontier.plain_peak_bytes) == (plain.rewritten_peak_bytes, plain.plain_peak_bytes)
    assert point.seconds == frontier.plain_seconds
    assert point.recomputed.count == point.offloaded.count == point.encoded.count == 0 < point.kept.count
    assert format_bytes(point.budget_bytes) in str(frontier)  # printed as its table
    assert "FrontierPoint" not in str(frontier)


def test_a_planner_of_ones_own_that_names_no_least_has_a_frontier() -> None:
    def keeps_all(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        plan = Plan(graph, {}, "mine", hardware.name, budget_bytes)
        if budget_bytes and plan.predicted_peak_bytes > budget_bytes:
            raise BudgetError("it does not fit")
        return plan

    options = shoal.Options(planner=keeps_all)
    frontier = shoal.frontier(normalised(), IMAGES, hardware=P100, allow="recompute", points=2, options=options)
    assert frontier.points and all(point.recomputed.count == 0 for point in frontier.points)


@needs_little_scratch
def test_what_is_encoded_is_counted() -> None:
    frontier = shoal.frontier(normalised(), IMAGES, allow="recompute, encode", points=3)
    assert any(point.encoded.count > 0 for point in frontier.points)
    assert all(point.bound_seconds <= point.seconds * (1 + 1e-6) for point in frontier.points)


@pytest.mark.slow
def test_with_a_function_it_is_images_per_second_by_batch_as_every_plan_by_itself_says() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*blocks(3, 8), nn.Flatten())
    how: dict[str, Any] = {"hardware": P100, "allow": "recompute, fuse"}

    def images(batch: int) -> torch.Tensor:
        return torch.empty(batch, 3, 16, 16, device="meta")

    frontier = shoal.frontier(net, images, budget=250_000, points=100, **how)
    plans = {point.batch: shoal.plan(net, images(point.batch), 250_000, **how) for point in frontier.points}
    assert list(plans) == list(range(1, frontier.largest.batch + 1)) and len(plans) > 2
    for point in frontier.points:
        plan = plans[point.batch]
        assert (point.seconds, point.predicted_peak_bytes) == (plan.predicted_seconds, plan.predicted_peak_bytes)
        assert point.variant == plan.variant
    plain = shoal.plan(net, images(frontier.largest.batch), hardware=P100)
    assert frontier.largest.plain_seconds == plain.predicted_seconds
    assert frontier.largest.plain_peak_bytes == plain.plain_peak_bytes
    assert frontier.best.batch == max(plans, key=lambda batch: batch / plans[batch].predicted_seconds)
    assert frontier.too_many == frontier.largest.batch + 1
    with pytest.raises(BudgetError):
        shoal.plan(net, images(frontier.largest.batch + 1), 250_000, **how)
    fitted = shoal.fit(net, images, 250_000, **how)
    assert fitted.batch == frontier.largest.batch

    few = shoal.frontier(net, images, budget=250_000, points=2, max_batch=2, **how)
    assert [point.batch for point in few.points] == [1, 2] and few.too_many is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"points": 1}, "points=1"),
        ({"points": True}, "points=True"),
        ({"trying": "print"}, "trying='print'"),
        ({"points": "ten"}, "points='ten'"),
        ({"allow": "magic"}, "'magic'"),
        ({"allow": "recompute", "codec": "linear"}, "allow='exact"),
        ({"budget": "few"}, "budget='few'"),
        ({"hardware": "p1000"}, "hardware='p1000'"),
        ({"optimizer": 7}, ""),
        ({"planner": "fast"}, ""),
        ({"max_batch": 8}, "max_batch="),
        ({"example": lambda batch: IMAGES}, ""),
        ({"example": lambda batch: IMAGES, "budget": "1GiB", "max_batch": 0}, "max_batch=0"),
        ({"example": lambda batch: batch, "budget": "1GiB"}, "make_example(16)"),
    ],
)
def test_a_mistake_is_told(arguments: dict[str, Any], said: str) -> None:
    with raising(InputError, said):
        shoal.frontier(**{"model": normalised(), "example": IMAGES, **keywords(arguments)})


def test_what_is_no_model_or_no_graph_is_told() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InputError):
        shoal.frontier("resnet18", IMAGES)  # type: ignore[arg-type]
    with pytest.raises(CaptureError):
        shoal.frontier(Branches(), torch.ones(2, 3))
