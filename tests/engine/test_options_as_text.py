"""Budgets, means and optimizers as text are understood by every entry, also from the environment."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shoal
from examples.networks.alexnet import AlexNet
from shoal.app.cli import app
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.backend import backend
from shoal.errors import BudgetError, InputError
from shoal.memory import budget
from shoal.memory.optimizer_state import NamedOptimizer
from tests.engine.keywords import keywords
from tests.engine.training_laws import costs_that_do_not_matter, keep_nothing
from tests.raising import raising

P100 = "p100-nvlink"
P100_BYTES = 16 * 2**30
HERE_BYTES = 8 * 2**30
IMAGES = (2, 3, 8, 8)


def network(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))


def on_meta(batch: int = 2) -> torch.Tensor:
    return torch.empty(batch, *IMAGES[1:], device="meta")


class Noted:
    """A planner that notes the budget and whether it may recompute."""

    def __init__(self) -> None:
        self.budget_bytes: set[int] = set()
        self.may_recompute: set[bool] = set()

    def __call__(self, graph: Any, hardware: Any, budget_bytes: int) -> Plan:
        self.budget_bytes.add(budget_bytes)
        self.may_recompute.add(any(op.recomputable for op in graph.ops))
        return keep_nothing(graph, hardware, budget_bytes)


def train_step(model: Callable[..., Any]) -> None:
    with costs_that_do_not_matter():
        model(torch.randn(IMAGES)).sum().backward()


def by_compile(**given: Any) -> None:
    train_step(shoal.compile(network(), **keywords(given)))


def by_backend(**given: Any) -> None:
    train_step(torch.compile(network(), backend=backend, options=given))


def by_plan(**given: Any) -> None:
    shoal.plan(network("meta"), on_meta(), hardware=P100, **keywords(given))


def by_fit(**given: Any) -> None:
    shoal.fit(network("meta"), on_meta, hardware=P100, max_batch=1, **keywords(given))


ENTRIES: dict[str, tuple[Callable[..., None], int]] = {
    "compile": (by_compile, HERE_BYTES),
    "backend": (by_backend, HERE_BYTES),
    "plan": (by_plan, P100_BYTES),
    "fit": (by_fit, P100_BYTES),
}


@pytest.fixture(autouse=True)
def a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=HERE_BYTES, total=HERE_BYTES))
    monkeypatch.setattr(budget, "psutil", memory)
    monkeypatch.delenv("SHOAL_BUDGET", raising=False)
    monkeypatch.delenv("SHOAL_ALLOW", raising=False)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_takes_budgets_in_terms_of_the_device_and_means(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter, all_bytes = ENTRIES[entry]
    monkeypatch.setenv("SHOAL_BUDGET", "80%")
    monkeypatch.setenv("SHOAL_ALLOW", "offload")
    of_environment, given = Noted(), Noted()
    enter(planner=of_environment)
    enter(planner=given, budget="auto", allow="recompute")
    assert of_environment.budget_bytes == {int(0.8 * all_bytes)} and of_environment.may_recompute == {False}
    assert given.budget_bytes == {int(0.95 * all_bytes)} and given.may_recompute == {True}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("SHOAL_BUDGET", "much", "SHOAL_BUDGET='much'"),
        ("SHOAL_BUDGET", "101%", "SHOAL_BUDGET='101%'"),
        ("SHOAL_ALLOW", "fast", "SHOAL_ALLOW"),
        ("SHOAL_ALLOW", "lossy", "SHOAL_ALLOW='lossy'"),
    ],
)
def test_a_mistake_in_the_environment_is_told_by_its_name(
    entry: str, name: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_BUDGET", "1GiB")
    monkeypatch.setenv(name, text)
    with raising(InputError, said):
        ENTRIES[entry][0](planner=Noted())


def test_a_frontier_stands_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_BUDGET", "25%")
    monkeypatch.setenv("SHOAL_ALLOW", "recompute")
    made = shoal.frontier(network("meta"), on_meta(), hardware=P100, points=2)
    assert made.budget_bytes == P100_BYTES // 4 and made.means == ("recompute",)
    by_batch = shoal.frontier(network("meta"), on_meta, hardware=P100, points=2, max_batch=1)
    assert by_batch.budget_bytes == P100_BYTES // 4 and by_batch.means == ("recompute",)


COMMAND = [
    "--model",
    "examples.networks.alexnet:AlexNet",
    "--image",
    "64",
    "--hardware",
    P100,
    "--optimizer",
    "adamw",
    "--json",
]


def command(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [arguments[0], *COMMAND, *arguments[1:]])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_commands_take_them_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_BUDGET", "50%")
    monkeypatch.setenv("SHOAL_ALLOW", "recompute,order")
    planned = command("plan", "--batch", "2", "--planner", "chain", "--out", str(tmp_path))
    assert planned["budget_bytes"] == P100_BYTES // 2
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.options["means"] == ["order", "recompute"]
    with torch.device("meta"):
        parameters = list(AlexNet().parameters())
    loss_bytes = 512 + 2 * 1000 * 4  # the loss, and a target like the results
    assert plan.graph.static_bytes == NamedOptimizer("adamw").state_bytes(parameters) + loss_bytes


def test_the_batches_of_a_frontier_fit_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["frontier", "--model", "resnet18", "--batch", "auto", "--points", "1"]
    assert "needs a budget that all batches have to fit in" in CliRunner().invoke(app, arguments).output
    monkeypatch.setenv("SHOAL_BUDGET", "50%")
    assert "--points 1: expected an int from 2 to 100" in CliRunner().invoke(app, arguments).output


def test_an_optimizer_by_name_counts_as_one_that_is_there() -> None:
    net = network("meta")
    there, named, none = (
        shoal.plan(net, on_meta(), hardware=P100, optimizer=optimizer).predicted_peak_bytes
        for optimizer in (torch.optim.AdamW(net.parameters()), "adamw", None)
    )
    assert named == there == none + NamedOptimizer("adamw").state_bytes(net.parameters())
    with raising(InputError, "optimizer='adamx'", "'adam"):
        shoal.plan(net, on_meta(), hardware=P100, optimizer="adamx")


def test_a_budget_that_parameters_and_the_named_optimizers_state_fill_is_refused_at_once() -> None:
    net = nn.Linear(1000, 10, bias=False)
    with raising(BudgetError, "78.13 KiB"):
        shoal.compile(net, budget=3 * 40_000, optimizer="adamw")


def trained(optimizer: Any, made: Callable[..., torch.optim.Optimizer]) -> Any:
    net = network()
    model = shoal.compile(net, "1GiB", optimizer=optimizer, allow="recompute")
    owner = made(net.parameters())
    for _ in range(3):
        model(torch.randn(IMAGES)).sum().backward()
        owner.step()
        owner.zero_grad()
    return model.shoal


def test_the_named_optimizer_is_replaced_by_the_one_that_steps(caplog: pytest.LogCaptureFixture) -> None:
    as_named = trained("adamw", torch.optim.AdamW)
    assert not caplog.records
    assert 0 <= as_named.predicted_peak_bytes - as_named.measured_peak_bytes <= 512  # counted for small tensors
    other = trained("adamw", lambda parameters: torch.optim.SGD(parameters, momentum=0.9))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "'adamw' was declared, and SGD has stepped, and holds" in said[0]
    assert other.predicted_peak_bytes < as_named.predicted_peak_bytes


def test_optimizers_of_single_parameters_are_told_together(caplog: pytest.LogCaptureFixture) -> None:
    net = network()
    model = shoal.compile(net, budget="1GiB", allow="keep")
    for parameter in net.parameters():
        owner = torch.optim.Adam([parameter], foreach=False)
        parameter.register_post_accumulate_grad_hook(lambda p, owner=owner: (owner.step(), owner.zero_grad())[0])
    for _ in range(3):
        model(torch.randn(IMAGES)).sum().backward()
    first, others = caplog.messages
    held = format_bytes(sum(optimizer_bytes(p) for p in net.parameters()))
    assert "Adam has stepped, and holds" in first
    assert f"{len(list(net.parameters())) - 1} more optimizers have stepped, and all hold {held} of state" in others


def optimizer_bytes(parameter: nn.Parameter) -> int:
    return 2 * parameter.nbytes + 4  # two averages, and the number of its steps


class WithHistory(torch.optim.Optimizer):
    """Keeps the gradients of its last steps in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("past", []).append(parameter.grad.clone())


def test_state_that_grows_from_step_to_step_counts_as_it_grows(caplog: pytest.LogCaptureFixture) -> None:
    net = network()
    owner = WithHistory(net.parameters())
    plain_bytes = shoal.plan(net, torch.empty(IMAGES), allow="keep", budget="1GiB").predicted_peak_bytes
    parameter_bytes = sum(p.nbytes for p in net.parameters())
    model = shoal.compile(net, budget=plain_bytes + 4 * parameter_bytes, allow="keep", optimizer=owner)
    predicted = []
    with pytest.raises(BudgetError):
        for _ in range(20):
            model(torch.randn(IMAGES)).sum().backward()
            owner.step()
            owner.zero_grad()
            predicted.append(model.shoal.predicted_peak_bytes)
    assert len(predicted) >= 3
    assert {after - before for before, after in itertools.pairwise(predicted[:3])} == {parameter_bytes}
    assert "WithHistory has stepped, and holds" in caplog.messages[0]


def test_an_optimizers_step_that_passes_the_budget_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(1000, 10, bias=False)
    for foreach in (True, False):  # at the first step of one that was not declared
        model = shoal.compile(nn.Linear(1000, 10, bias=False), budget=4 * 40_000 + 20_000)
        owner = torch.optim.AdamW(model.parameters(), foreach=foreach, fused=not foreach)
        model(torch.randn(1, 1000)).sum().backward()
        owner.step()
        said = [text for text in caplog.messages if "for itself" in text]
        assert len(said) == 1 and "takes 195.3 KiB, 39.06 KiB of it for itself" in said[0], "once, of the first"
    shoal.compile(net, budget=4 * 40_000 + 20_000, optimizer=torch.optim.AdamW(net.parameters(), foreach=True))
    assert "make the optimizer with fused=True" in caplog.messages[-1]


def test_the_backend_says_where_an_optimizer_that_steps_was_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    net = network()
    plain_bytes = shoal.plan(net, torch.empty(IMAGES), allow="keep", budget="1GiB").predicted_peak_bytes
    options = {"budget": plain_bytes + 5000, "allow": "keep"}
    model = torch.compile(net, backend=backend, options=options)
    owner = torch.optim.AdamW(net.parameters())
    with caplog.at_level(logging.WARNING):
        model(torch.randn(IMAGES)).sum().backward()
        owner.step()
    # How far the step itself is over, if it is, depends on the scratch of this processor's convolutions.
    said = [text for text in caplog.messages if "for itself" not in text]
    assert len(said) == 2 and "AdamW has stepped, and holds" in said[0]
    assert "over the budget" in said[1] and "cannot plan again: declare it in options" in said[1]


def test_an_optimizer_in_options_that_were_copied_is_refused() -> None:
    net = network()
    options = {"budget": "1GiB", "optimizer": torch.optim.SGD(net.parameters(), momentum=0.9)}
    with raising(InputError, "optimizer=", "='sgd-momentum'"):
        train_step(torch.compile(net, backend=backend, options=copy.deepcopy(options)))
    with pytest.raises(InputError):
        shoal.compile(net, **copy.deepcopy(options))
    for allowed in (options, copy.deepcopy({**options, "optimizer": "sgd-momentum"})):
        train_step(torch.compile(net, backend=backend, options=allowed))
