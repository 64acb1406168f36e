"""Plans are found again in a later run; nothing in the cache but time can be lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shoal.planners.joint
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.engine import plan_cache
from shoal.engine.plan_cache import remembered
from shoal.errors import BudgetError
from shoal.planners.keep_all import keep_all
from shoal.planners.limits import DEFAULT
from shoal.planners.smallest_plan import smallest_plan
from tests.random_steps import HARDWARE, resnet_like

STEP = resnet_like((1, 1))
PEAK_BYTES = keep_all(STEP, HARDWARE, 0).predicted_peak_bytes
BUDGET_BYTES = int(0.8 * PEAK_BYTES)


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_cache, "_WORTH_SECONDS", 0.0)
    return tmp_path / "plans"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What the planner itself was asked for."""
    plans: list[Plan] = []
    joint = shoal.planners.get("joint")

    def counting(*arguments: Any, **limits: Any) -> Plan:
        plans.append(joint(*arguments, **limits))
        return plans[-1]

    monkeypatch.setattr("shoal.planners.joint.joint", counting)
    return plans


def planned(graph: StepGraph = STEP, budget_bytes: int = BUDGET_BYTES) -> Plan:
    return remembered("joint")(graph, HARDWARE, budget_bytes)


def test_the_same_step_is_planned_once(made):
    first = planned()
    again = planned(replace(STEP, ops=tuple(replace(op) for op in STEP.ops)))
    assert again == first and len(made) == 1
    assert first.recomputed


@pytest.mark.parametrize(
    "other",
    [
        {"graph": replace(STEP, static_bytes=8)},
        {"graph": replace(STEP, ops=(replace(STEP.ops[0], seconds=1.0), *STEP.ops[1:]))},
        {"budget_bytes": PEAK_BYTES},
    ],
    ids=["bytes", "times", "budget"],
)
def test_another_step_or_budget_is_another_plan(made, other):
    planned()
    planned(**other)
    assert len(made) == 2


def test_a_plan_of_other_code_is_not_taken(made, monkeypatch):
    planned()
    monkeypatch.setattr(plan_cache, "_code", lambda: "newer")
    planned()
    assert len(made) == 2


def kept(plan: dict[str, Any]) -> dict[str, Any]:
    return {**plan, "residences": {name: {"residence": "keep"} for name in plan["residences"]}}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "format": "another"}),
        lambda text: json.dumps({**json.loads(text), "step": "another"}),
        lambda text: json.dumps({**json.loads(text), "lower_bound_seconds": -1.0}),
        lambda text: json.dumps({**json.loads(text), "lower_bound_seconds": "none"}),
        lambda text: json.dumps({**json.loads(text), "residences": {"no such storage": {"residence": "keep"}}}),
        lambda text: json.dumps({**json.loads(text), "residences": {STEP.storages[0].name: 7}}),
        lambda text: json.dumps({**json.loads(text), "order": ["no such op"]}),
        lambda text: json.dumps({**json.loads(text), "order": [op.name for op in reversed(STEP.ops)]}),
        lambda text: json.dumps(kept(json.loads(text))),
    ],
    ids=[
        "cut",
        "deep",
        "list",
        "format",
        "step",
        "bound",
        "type",
        "name",
        "residence",
        "op",
        "order",
        "over the budget",
    ],
)
def test_a_damaged_file_is_replaced_without_a_word(plans, made, damage, recwarn):
    first = planned()
    (path,) = plans.iterdir()
    whole = path.read_text()
    path.write_text(damage(whole))
    assert planned() == first and len(made) == 2
    assert path.read_text() == whole
    assert not recwarn.list


def test_a_plan_that_a_time_limit_cut_short_is_not_kept(plans, made, monkeypatch):
    counting = shoal.planners.get("joint")
    monkeypatch.setattr(
        "shoal.planners.joint.joint", lambda *a, **limits: replace(counting(*a, **limits), stopped_early=("search",))
    )
    planned()
    planned()
    assert len(made) == 2 and not plans.exists()


def test_what_is_planned_at_once_is_not_written(plans, made, monkeypatch):
    monkeypatch.setattr(plan_cache, "_WORTH_SECONDS", 1e9)
    planned()
    assert not plans.exists()


def test_the_plan_that_was_used_last_stays_within_the_limit(plans, monkeypatch):
    planned()
    (oldest,) = plans.iterdir()
    planned(budget_bytes=PEAK_BYTES - 1)
    (newer,) = set(plans.iterdir()) - {oldest}
    os.utime(oldest, (1, 1))
    os.utime(newer, (2, 2))
    planned()  # found, and so the last one used
    monkeypatch.setattr(plan_cache, "_MAX_BYTES", oldest.stat().st_size * 5 // 2)
    planned(budget_bytes=PEAK_BYTES - 2)
    assert oldest.exists() and not newer.exists()


def test_a_folder_that_cannot_be_written_costs_only_time(made, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", "/proc/nowhere")
    assert planned() == planned() and len(made) == 2


def test_a_planner_of_ones_own_is_asked_every_time(plans):
    asked = []

    def own(*arguments: Any) -> Plan:
        asked.append(arguments)
        return keep_all(*arguments)

    for _ in range(2):
        remembered(own)(STEP, HARDWARE, PEAK_BYTES)
    assert len(asked) == 2 and not plans.exists()


def test_a_plan_in_an_order_with_fewer_waits_for_launches_is_kept_though_its_bound_is_below_0(plans, made):
    launched = replace(STEP, ops=tuple(replace(op, launch_seconds=1e-3) for op in STEP.ops))
    first = planned(launched)
    (path,) = plans.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "lower_bound_seconds": -1e-6}))
    again = planned(launched)
    assert len(made) == 1
    assert again == replace(first, lower_bound_seconds=-1e-6)


def test_a_refusal_is_searched_for_once_and_raised_again_with_a_traceback_of_its_own(
    made: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "_refused", {})
    searched = []
    monkeypatch.setattr("shoal.planners.joint.smallest_plan", partial(_noting, searched, smallest_plan))
    errors = []
    for _ in range(2):
        with pytest.raises(BudgetError) as refused:
            planned(budget_bytes=STEP.resident_bytes + 1)
        errors.append(refused.value)
    assert len(searched) == 1
    assert errors[0] is not errors[1] and errors[0].least_feasible_bytes == errors[1].least_feasible_bytes
    assert planned(budget_bytes=errors[1].least_feasible_bytes).predicted_peak_bytes <= errors[1].least_feasible_bytes


def test_a_refusal_whose_search_a_time_limit_ended_is_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_refused", {})
    refusals = []
    for guard_seconds in (0.0, 600.0, 600.0):
        monkeypatch.setattr(plan_cache, "DEFAULT", replace(DEFAULT, guard_seconds=guard_seconds))
        monkeypatch.setattr(plan_cache, "_digest", lambda *_: "the same")  # the limit is of the clock, not of the step
        with pytest.raises(BudgetError) as refused:
            planned(budget_bytes=STEP.resident_bytes + 1)
        refusals.append(refused.value)
    assert refusals[0].stopped_early and "by a time limit" in refusals[0].details["stopped early"]
    assert not refusals[1].stopped_early and not refusals[2].stopped_early
    assert refusals[1].least_feasible_bytes == refusals[2].least_feasible_bytes
    assert refusals[1].least_feasible_bytes <= refusals[0].least_feasible_bytes


def _noting(calls: list[Any], function: Callable[..., Any], *arguments: Any) -> Any:
    calls.append(arguments)
    return function(*arguments)
