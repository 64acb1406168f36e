"""No plan runs that breaks a rule: from a planner of one's own, read from elsewhere, or Shoal's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import planners
from shoal.core import validate_plan
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.residence import Encode, Keep, Offload, Recompute
from shoal.core.step import StepGraph
from shoal.errors import PlanError
from tests.engine.compile.wrong_values import is_readable

Break = Callable[[StepGraph], Any]


def _net() -> nn.Sequential:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(64, 2))


def _batch() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def _activation(graph: StepGraph) -> str:
    """A saved one that may be recomputed."""
    names = [graph.storages[s].name for s in graph.saved if graph.storages[s].kind == "activation"]
    return next(name for name in names if graph.ops[graph.producer[graph.storage_called[name].id]].recomputable)


def _with_an_overwriting_op_that_writes_nothing(graph: StepGraph) -> StepGraph:
    op = next(op for op in graph.ops if op.overwrites != -1)
    broken = replace(op, writes=())
    return replace(graph, ops=(*graph.ops[: op.id], broken, *graph.ops[op.id + 1 :]))


def _of_kind(graph: StepGraph, kind: str) -> str:
    return next(storage.name for storage in graph.storages if storage.kind == kind)


def _forward(graph: StepGraph) -> str:
    return graph.ops[graph.n_forward - 1].name


def _backward(graph: StepGraph, place: int = -1) -> str:
    return [op.name for op in graph.ops if op.phase == "backward"][place]


RESIDENCES: dict[str, tuple[Break, str]] = {
    "unknown storage": (lambda g: {"nobody": Recompute()}, "storage 'nobody' that this step does not have"),
    "unknown storage, kept": (lambda g: {"nobody": Keep()}, "storage 'nobody' that this step does not have"),
    "name that is not a text": (lambda g: {3: Keep()}, "storage 3 that"),
    "no mapping": (lambda g: [Keep()], "expected a mapping"),
    "no residence": (lambda g: {_activation(g): "recompute"}, "is 'recompute'; expected Keep"),
    "nothing": (lambda g: {_activation(g): None}, "is None; expected Keep"),
    "recompute before None": (lambda g: {_activation(g): Recompute(None)}, "Recompute"),  # type: ignore[arg-type]
    "recompute before a number": (lambda g: {_activation(g): Recompute((3,))}, "is 3"),  # type: ignore[arg-type]
    "recompute a parameter": (lambda g: {_of_kind(g, "parameter"): Recompute()}, "cannot be recomputed: only"),
    "recompute an output": (lambda g: {_of_kind(g, "output"): Recompute()}, "cannot be recomputed: only"),
    "recompute a gradient": (lambda g: {_of_kind(g, "gradient"): Recompute()}, "cannot be recomputed: only"),
    "give up for good": (lambda g: {_activation(g): Recompute()}, "was given up and is not recomputed"),
    "recompute too late": (lambda g: {_activation(g): Recompute((_backward(g),))}, ""),
    "recompute in the forward pass": (lambda g: {_activation(g): Recompute((_forward(g),))}, "no backward op"),
    "recompute twice at once": (lambda g: {_activation(g): Recompute((_backward(g, 0),) * 2)}, ""),
    "fetch before never": (lambda g: {_activation(g): Offload(_forward(g), "never")}, "'never', no backward op"),
    "fetch in the forward pass": (lambda g: {_activation(g): Offload(_forward(g), _forward(g))}, "no backward op"),
    "free after never": (lambda g: {_activation(g): Offload("never", _backward(g, 0))}, "'never', no forward op"),
    "free before it is read": (lambda g: {_activation(g): Offload(g.ops[0].name, _backward(g, 0))}, "reads it later"),
    "offload without a link": (
        lambda g: {_activation(g): Offload(_forward(g), _backward(g, 0))},
        "no link to the host",
    ),
    "offload a parameter": (lambda g: {_of_kind(g, "parameter"): Offload(_forward(g), _backward(g, 0))}, "cannot be"),
    "encode in nothing": (lambda g: {_activation(g): Encode("linear", 0, None, "nowhere")}, "in 'nowhere'"),
    "encode in something else": (
        lambda g: {_activation(g): Encode("linear", 0, None, _of_kind(g, "gradient"))},
        "holds",
    ),
}
PLANS: dict[str, tuple[Callable[[StepGraph], Any], str]] = {
    "None": (lambda g: None, "returned None; expected a shoal.Plan"),
    "residences only": (lambda g: {}, "returned {}; expected a shoal.Plan"),
    "the plan's class": (lambda g: Plan, "expected a shoal.Plan"),
    "another step": (lambda g: Plan(replace(g, ops=g.ops[:-1]), {}, "mine"), "a plan of another step"),
    "no step": (lambda g: Plan(None, {}, "mine"), "a plan of another step"),  # type: ignore[arg-type]
}


def _planner(make: Callable[[StepGraph], Any]) -> planners.Planner:
    def mine(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        made: Plan = make(graph)
        return made

    return mine


def _cases() -> Iterator[Any]:
    for name, (residences, said) in RESIDENCES.items():
        yield pytest.param(lambda g, r=residences: Plan(g, r(g), "mine"), said, id=name)
    for name, (make, said) in PLANS.items():
        yield pytest.param(make, said, id=name)


@cache
def _given() -> tuple[StepGraph, Hardware]:
    """What a planner of one's own is given."""
    given: list[tuple[StepGraph, Hardware]] = []

    def watching(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        given.append((graph, hardware))
        return planners.get("keep_all")(graph, hardware, budget_bytes)

    shoal.plan(_net(), _batch(), "1GiB", hardware="h200", offload_to=None, options=shoal.Options(planner=watching))
    return given[-1]


@pytest.mark.parametrize(("make", "said"), list(_cases()))
def test_a_broken_plan_of_ones_own_planner_is_refused(make: Callable[[StepGraph], Any], said: str) -> None:
    with pytest.raises(PlanError) as told:
        planners.get(_planner(make))(*_given(), 2**30)
    assert said in str(told.value)
    assert str(told.value).startswith("the planner 'mine' returned ")
    assert is_readable(told.value)


@pytest.mark.parametrize(
    "make", [lambda g: Plan(g, {}, "mine"), lambda g: None, lambda g: Plan(g, {"nobody": Keep()}, "mine")]
)
def test_nothing_runs_of_a_broken_plan(make: Callable[[StepGraph], Any]) -> None:
    net = _net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    budget = shoal.plan(_net(), _batch()).predicted_peak_bytes - 1
    model = shoal.compile(net, budget, offload_to=None, options=shoal.Options(planner=_planner(make)))
    with pytest.raises(PlanError) as told:
        model(_batch())
    assert is_readable(told.value)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert model.shoal.plans == ()


def test_a_sound_plan_of_ones_own_planner_runs_with_the_costs_it_was_given() -> None:
    def mine(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        without_link = replace(graph, link=None)
        return replace(planners.get("chain")(without_link, hardware, budget_bytes), planner="mine")

    net, plain = _net(), _net()
    plain.load_state_dict(net.state_dict())
    x = _batch()
    model = shoal.compile(net, "1GiB", offload_to="host", options=shoal.Options(planner=mine))
    for trained in (model, plain):
        trained(x).square().sum().backward()
    assert model.shoal.plan.planner == "mine"
    assert model.shoal.plan.graph.link is not None
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_plan_given_to_compile_is_held_against_the_rules_and_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    x = _batch()
    made = shoal.plan(_net(), x)
    as_given = shoal.compile(_net(), offload_to=None, options=shoal.Options(plan=made))
    as_given(x).sum().backward()
    peak = as_given.shoal.predicted_peak_bytes or 0  # what is given is run in whatever loop
    assert peak <= made.predicted_peak_bytes
    broken = [
        (replace(made, residences={"nobody": Keep()}), None, "nobody"),
        (replace(made, residences={_activation(made.graph): Recompute()}), None, "given up"),
        (replace(made, residences=7), None, "expected a mapping"),
        (replace(made, graph=replace(made.graph, ops=made.graph.ops[::-1])), None, "ids of the step's ops"),
        (replace(made, graph=None), None, "expected a StepGraph"),
        (replace(made, graph=_with_an_overwriting_op_that_writes_nothing(made.graph)), None, "but writes nothing"),
        (made, peak - 1, f"over the budget of {peak - 1}"),
    ]
    for plan, budget, said in broken:
        model = shoal.compile(_net(), budget, offload_to=None, options=shoal.Options(plan=plan))
        with pytest.raises(PlanError) as told:
            model(x)
        assert said in str(told.value) and is_readable(told.value)
    shoal.compile(_net(), peak, offload_to=None, options=shoal.Options(plan=made))(x).sum().backward()
    assert not caplog.records
    shoal.compile(_net(), offload_to=None, options=shoal.Options(plan=replace(made, budget_bytes=peak - 1)))(
        x
    ).sum().backward()
    assert "but takes" in caplog.text


def test_own_plans_are_checked_where_the_switch_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    real = validate_plan.check_plan

    def counted(graph: StepGraph, residences: Any, budget_bytes: int = 0) -> None:
        held.append(budget_bytes)
        real(graph, residences, budget_bytes)

    monkeypatch.setattr(validate_plan, "check_plan", counted)
    for switch, times in (("1", 2), ("0", 0), (None, 0)):
        held.clear()
        if switch is None:
            monkeypatch.delenv(validate_plan.SWITCH)
        else:
            monkeypatch.setenv(validate_plan.SWITCH, switch)
        shoal.plan(_net(), _batch(), 2**30)
        shoal.compile(_net(), 2**30)(_batch())
        assert held == [2**30] * times
