"""`model.shoal` says in words, in numbers and on a page what a model was planned for and what was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.sizes import format_bytes
from shoal.engine.status import Status
from shoal.errors import InputError
from tests.engine.training_laws import costs_that_do_not_matter, keep_nothing

BUDGET = 2**20


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())


def shape_of(plan: Any) -> str:
    (images,) = [storage for storage in plan.graph.storages if storage.kind == "input"]
    return " x ".join(str(size) for size in images.shape)


def train(model: nn.Module, *batches: int) -> None:
    with costs_that_do_not_matter():
        for batch in batches:
            model(torch.randn(batch, 3, 16, 16)).square().mean().backward()
            model.zero_grad()


@pytest.fixture(scope="module")
def trained() -> Any:
    """After steps of three images, and of two."""
    model = shoal.compile(network(), BUDGET, name="small [net]", options=shoal.Options(planner=keep_nothing))
    train(model, 3, 3, 2)
    return model


def test_before_the_first_step_there_is_the_budget_alone() -> None:
    status = shoal.compile(network(), BUDGET).shoal
    assert str(status) == "1.000 MiB; no training step has been planned yet"
    assert str(Status(None)).startswith("no budget; ")
    assert status.metrics()["shoal/budget_bytes"] == BUDGET and status.metrics()["shoal/plans"] == 0
    assert not {"shoal/plain_seconds", "shoal/measured_peak_bytes"} & status.metrics().keys()
    with pytest.raises(InputError):
        status.report("page.html")


def test_the_plan_is_the_one_that_steps_of_the_largest_sizes_run_by(trained: Any) -> None:
    """Not that of all sizes up to them, which other steps run by."""
    status = trained.shoal
    exact, up_to = sorted(status.plans, key=lambda plan: plan.is_at_most)
    assert up_to.is_at_most and not exact.is_at_most
    assert shape_of(exact) == shape_of(up_to) and status.plan is exact
    assert f"up to {shape_of(up_to)}" in str(status)


def test_printed_it_says_what_was_planned_and_measured(trained: Any) -> None:
    status = trained.shoal
    lines = str(status).splitlines()
    said = {line[:16].strip(): line[16:] for line in lines}
    assert lines[0] == "small [net]" and said["budget"] == "1.000 MiB"
    assert said["predicted peak"].startswith(format_bytes(status.predicted_peak_bytes))
    assert said["measured peak"] == format_bytes(status.measured_peak_bytes)
    assert said["computed"] == "unmodified" and said["repairs"] == "none"
    rows = lines[-2:]
    assert [row.split("  ")[0] for row in rows] == [
        "up to " * plan.is_at_most + shape_of(plan) for plan in status.plans
    ]
    assert rows[0].startswith("3 x 3 x 16 x 16  ")
    assert len(rows[0].split()) == len(rows[1].removeprefix("up to ").split()) and "recomputed" in lines[-3]
    assert len(repr(status)) < 60, "a debugger shows it in a line"


def test_it_says_why_a_step_was_prepared_again(trained: Any) -> None:
    whys = [preparation.why for preparation in trained.shoal.preparations]
    assert whys == ["", "size 0 of args[0] is 2, was 3"]
    assert re.search(r"again in \d+\.\d s: size 0 of args\[0\] is 2, was 3", str(trained.shoal))


def test_a_reason_is_that_of_this_call_and_not_of_the_last_capture() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.doubled = nn.Linear(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(2 * x if self.doubled else x)

    model: Any = shoal.compile(Switched(), BUDGET, options=shoal.Options(planner=keep_nothing))

    def step(batch: int) -> str:
        with costs_that_do_not_matter():
            model(torch.randn(batch, 8)).sum().backward()
        model.zero_grad()
        return str(model.shoal.preparations[-1].why)

    assert step(2) == ""
    assert step(3) == "size 0 of args[0] is 3, was 2"
    model.doubled = True
    assert "model.doubled" in step(3)
    assert step(2) == "something besides its tensors has changed (TORCH_LOGS=recompiles says what)"
    model.layer.bias.requires_grad_(False)
    assert step(2) == "requires_grad of model.layer.bias is no longer 1"


def test_gradients_that_are_there_are_a_reason_too() -> None:
    model = shoal.compile(network(), BUDGET, options=shoal.Options(planner=keep_nothing))
    with costs_that_do_not_matter():
        for _ in range(2):
            model(torch.randn(2, 3, 16, 16)).square().mean().backward()
    assert [one.why for one in model.shoal.preparations] == ["", "there are gradients before the step"]


def test_a_model_that_breaks_says_where_and_is_prepared_in_three_parts() -> None:
    class Breaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x)

    model: Any = shoal.compile(Breaking(), BUDGET)
    with costs_that_do_not_matter():
        for _ in range(4):
            model(torch.randn(2, 8)).sum().backward()
            model.zero_grad()
    assert [one.why for one in model.shoal.preparations][:2] == ["", "its graphs have been measured"]
    assert len(model.shoal.preparations) <= 4, "a step that runs as planned is not prepared"
    assert "\nbreaks          " in str(model.shoal) and "test_status.py" in str(model.shoal)
    assert model.shoal.metrics()["shoal/measured_peak_bytes"] == model.shoal.measured_peak_bytes


def test_every_second_before_a_step_belongs_to_a_stage(trained: Any) -> None:
    status = trained.shoal
    for preparation in status.preparations:
        assert preparation.stages.keys() >= {"capture", "plan", "first run"}
        assert all(seconds >= 0 for seconds in preparation.stages.values())
    assert sum(one.seconds for one in status.preparations) >= status.planning_seconds


def test_the_metrics_are_numbers_by_the_names_that_are_documented(trained: Any) -> None:
    status, found = trained.shoal, trained.shoal.metrics()
    assert all(type(value) in (int, float) for value in found.values())
    assert found["shoal/measured_peak_bytes"] == status.measured_peak_bytes
    assert found["shoal/predicted_peak_bytes"] == max(plan.predicted_peak_bytes for plan in status.plans)
    largest = status.plan
    assert found["shoal/predicted_seconds"] - found["shoal/added_seconds"] == pytest.approx(largest.plain_seconds)
    assert found["shoal/recomputed_bytes"] == sum(storage.nbytes for storage in largest.recomputed) > 0
    assert (found["shoal/plans"], found["shoal/preparations"], found["shoal/repairs"]) == (2, 2, 0)
    text = (Path(__file__).parents[2] / "docs" / "what-you-see.md").read_text()
    assert found.keys() == set(re.findall(r"^\| `(shoal/\w+)` \|", text, re.MULTILINE))
    assert all(name in str(Status.metrics.__doc__) for name in found)


def test_the_page_of_a_script_says_what_the_page_of_a_run_says(trained: Any, tmp_path: Path) -> None:
    path = trained.shoal.report(
        tmp_path / "page.html",
        losses=[2.0, 1.0],
        accuracies=[0.5],
        settings={"lr": 0.1},
        outcome={"test accuracy": "50 %"},
    )
    page = path.read_text()
    for words in ("small [net]", "3 x 3 x 16 x 16", "Measured peak", "Test accuracy", "50 %", "loss-chart", "Threads"):
        assert words in page
    assert "Patches of the input" not in page
    other = trained.shoal.report(tmp_path / "other.html", plan=trained.shoal.plans[1], title="the small one")
    assert shape_of(trained.shoal.plans[1]) in other.read_text() and "the small one" in other.read_text()


def test_the_page_of_a_split_network_draws_its_patches(tmp_path: Path) -> None:
    split = shoal.split(network(), depth=1.0, grid=(2, 2))
    model = shoal.compile(split, BUDGET, options=shoal.Options(planner=keep_nothing))
    train(model, 2)
    assert "Patches of the input" in model.shoal.report(tmp_path / "page.html").read_text()
