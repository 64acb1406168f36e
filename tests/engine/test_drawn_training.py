"""Stochastic Split-CNN under a plan: one capture and one plan for all draws, each as in eager PyTorch and in budget."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import planners
from shoal.core.plan import Plan
from shoal.engine import backend
from shoal.errors import CaptureError
from shoal.transforms.split import drawn_cuts
from shoal.transforms.split.split import SplitModule, split
from tests.engine.training_laws import (
    classifier,
    costs_that_do_not_matter,
    images,
    keep_by_chance,
    keep_nothing,
    mean_square,
    needs_compiler,
    offload_by_chance,
)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.conv(torch.relu(self.norm(self.conv(x)))))


def network() -> nn.Sequential:
    """What breaks where sizes vary: strides, encoded pooling, in-place ops, dropout, a sum, a shared layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        nn.Dropout(0.2),
        Residual(),
        *classifier(8, 8),
    )


def divided(seed: int = 0, **changes: Any) -> SplitModule:
    torch.manual_seed(seed)
    return split(network(), **{"depth": 1.0, "stochastic": 0.3, "join": "4", **changes})


def small() -> SplitModule:
    """A convolution with batch norm and a ReLU, split: quick to compile."""
    torch.manual_seed(0)
    return split(classifier(3, 8), 1.0, (2, 1), stochastic=0.3, join="0.1")


def same_steps(ours: nn.Module, theirs: nn.Module, batches: list[torch.Tensor], *, accumulate: int = 1) -> set[Any]:
    """Train both on the same draws, hold them against each other bit by bit, and tell what was drawn."""
    seen = set()
    for number, batch in enumerate(batches):
        outputs = []
        for model in (ours, theirs):
            if number % accumulate == 0:
                model.zero_grad()
            torch.manual_seed(number)
            outputs.append(model(batch))
            mean_square(outputs[-1]).backward()
        assert torch.equal(*outputs)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
        for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(one, other)
        torch.manual_seed(number)
        seen.add(drawn_cuts.draw(ours.plan, batch.shape[2:], ours.stochastic))  # type: ignore[union-attr,arg-type]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planner", "batch_norm", "grid"),
    [
        (keep_by_chance(1, 0.4, 0.2), "joint", (1, 2)),
        (offload_by_chance(2), "patch", (2, 1)),
    ],
)
def test_every_draw_trains_as_in_eager_pytorch_and_one_capture_serves_all(
    planner: planners.Planner, batch_norm: str, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = []
    capture = backend.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        captures.append(1)
        return capture(*args, **kwargs)

    monkeypatch.setattr(backend, "capture", counted)
    ours = divided(batch_norm=batch_norm, grid=grid)
    theirs = copy.deepcopy(ours)
    shoal.compile(ours, "1TiB", offload_to="host", options=shoal.Options(planner=planner))
    with costs_that_do_not_matter():
        drawn = same_steps(ours, theirs, images(12, 2, 3, 64, 64))
    assert len(drawn) > 3
    assert len(captures) == len(ours.shoal.plans) == 1


_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_POOLINGS = {
    "max": {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d},
    "average": {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d},
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("average", (63,)), ("max", (25, 30)), ("max", (16,) * 3)])
def test_poolings_in_one_two_and_three_dimensions(kind: str, size: tuple[int, ...]) -> None:
    dims = len(size)
    convolution, pooling = _CONVOLUTIONS[dims], _POOLINGS[kind][dims]
    window: Any = {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True} if dims < 3 else {"kernel_size": 2}
    layers = [convolution(2, 4, 3, padding=1), nn.ReLU(), pooling(**window), nn.Tanh()]
    ours = split(nn.Sequential(*layers), 1.0, (2, 2, 1)[:dims], stochastic=0.3)
    theirs = copy.deepcopy(ours)
    shoal.compile(ours, "1TiB", options=shoal.Options(planner=keep_nothing))
    with costs_that_do_not_matter():
        assert len(same_steps(ours, theirs, images(6, 2, 2, *size))) > 2
    assert len(ours.shoal.plans) == 1


@pytest.mark.slow
def test_a_last_short_batch_and_accumulated_gradients_have_their_plans() -> None:
    ours = small()
    theirs = copy.deepcopy(ours)
    shoal.compile(ours, "1TiB", options=shoal.Options(planner=keep_nothing))
    with costs_that_do_not_matter():
        same_steps(ours, theirs, [*images(2, 4, 3, 48, 48), *images(1, 3, 3, 48, 48)], accumulate=2)
    assert len(ours.shoal.plans) == 3  # the second step begins with gradients of the first


def test_in_channels_last() -> None:
    ours = small().to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(ours)
    shoal.compile(ours, "1TiB", options=shoal.Options(planner=keep_nothing))
    with costs_that_do_not_matter():
        same_steps(ours, theirs, [x.to(memory_format=torch.channels_last) for x in images(4, 2, 3, 48, 48)])


def test_with_autocast_it_is_nearer_to_float64_than_eager_pytorch() -> None:
    planned = small()
    eager, exact = copy.deepcopy(planned), copy.deepcopy(planned).double()
    shoal.compile(planned, "1TiB", options=shoal.Options(planner=keep_nothing))
    for number, x in enumerate(images(4, 2, 3, 24, 24)):
        for model in (planned, eager, exact):
            model.zero_grad()
            torch.manual_seed(number)
            with costs_that_do_not_matter(), torch.autocast("cpu", torch.bfloat16, enabled=model is not exact):
                mean_square(model(x.to(next(model.parameters()).dtype))).backward()
        for ours, theirs, right in zip(*(m.parameters() for m in (planned, eager, exact)), strict=True):
            assert ours.grad is not None and theirs.grad is not None and right.grad is not None
            naive = (theirs.grad - right.grad).abs().max()
            assert (ours.grad - right.grad).abs().max() <= 1.1 * naive + 1e-3 * right.grad.abs().max()


def test_evaluation_is_of_the_unsplit_network() -> None:
    ours = divided()
    unsplit = copy.deepcopy(ours.unsplit).eval()
    shoal.compile(ours, "1TiB")
    (x,) = images(1, 2, 3, 48, 48)
    assert torch.equal(ours.eval()(x), unsplit(x))


@needs_compiler
@pytest.mark.slow
def test_the_budget_holds_at_the_corners_of_all_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "STEPS_TO_METER", 1000)
    ours = split(classifier(3, 16, 16), 0.9, (2, 1), stochastic=0.3, join="1")
    (x,) = images(1, 8, 3, 40, 40)
    budget = int(0.75 * shoal.plan(ours, x).predicted_peak_bytes) + 2048  # for what the loop holds
    shoal.compile(ours, budget, allow="recompute")
    assert ours.plan is not None
    limits = drawn_cuts.limits(ours.plan, (40, 40), 0.3)
    for cuts in itertools.product(*zip(*limits, strict=True)):  # the least or the most, along each dimension
        monkeypatch.setattr(drawn_cuts, "draw", lambda *_, cuts=cuts: cuts)
        ours.zero_grad()
        mean_square(ours(x)).backward()
        assert ours.shoal.measured_peak_bytes is not None
        assert ours.shoal.measured_peak_bytes <= ours.shoal.predicted_peak_bytes <= budget
    assert ours.shoal.repairs == 0


def test_where_nothing_varies_the_prediction_is_exact() -> None:
    still = split(classifier(3, 16, 16), 0.6, stochastic=0.0)
    even = split(copy.deepcopy(still.unsplit), 0.6)
    (x,) = images(1, 8, 3, 40, 40)
    assert shoal.plan(still, x).predicted_peak_bytes == shoal.plan(even, x).predicted_peak_bytes


def test_a_plan_of_a_file_serves_every_draw(tmp_path: Path) -> None:
    ours = small()
    theirs = copy.deepcopy(ours)
    batches = images(4, 2, 3, 48, 48)
    with costs_that_do_not_matter():
        torch.manual_seed(7)
        shoal.plan(ours, batches[0], "1TiB", options=shoal.Options(planner=keep_nothing)).save(tmp_path / "plan.json")
        shoal.compile(ours, options=shoal.Options(plan=Plan.load(tmp_path / "plan.json")))
        same_steps(ours, theirs, batches)


def test_planning_draws_nothing() -> None:
    ours, (x,) = split(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), 1.0, stochastic=0.2), images(1, 2, 3, 48, 48)
    before = torch.get_rng_state()
    shoal.plan(ours, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_that_is_split_at_drawn_cuts_is_refused_in_a_sentence() -> None:
    ours = nn.Sequential(divided(), nn.ReLU())
    shoal.compile(ours, "1TiB")
    with pytest.raises(CaptureError):
        ours(images(1, 2, 3, 48, 48)[0])
