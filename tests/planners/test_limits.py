"""A plan depends on counts, not on the clock; each part of `joint` can be turned off; a guard that struck says so."""

from __future__ import annotations

import itertools
import time
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest

from shoal.core.hardware import Link
from shoal.core.plan import Plan
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError
from shoal.planners import integer_program, local_search, on_demand, simulated, smallest_plan
from shoal.planners import joint as planning
from shoal.planners.joint import joint
from shoal.planners.keep_all import keep_all
from shoal.planners.limits import Effort, Guard, Limits, cached_unless_stopped, forget_searches
from tests.random_steps import HARDWARE, conv_bn_relu_chain, densenet_like, resnet_like

SWITCHES = [field.name for field in fields(Limits) if field.type == "bool"]
PARTS: dict[str, tuple[tuple[ModuleType, str], ...]] = {  # switch → what it keeps from being called
    "lower_bound": (),
    "integer_program": (),
    "iterated_search": ((planning, "IteratedSearch"),),
    "later_readers": ((planning, "with_later_readers"),),
    "chain": ((planning, "chain"), (smallest_plan, "smallest_peak")),
    "local_search": ((planning, "local_search"), (smallest_plan, "local_search")),
    "recompute_earlier": ((local_search, "_recompute_earlier"),),
    "fill_slack": ((planning, "fill_slack"),),
    "order": ((simulated, "lower_peak"), (on_demand, "best_order"), (planning, "with_later_readers")),
    "on_demand": (
        (planning, "plans_on_demand"),
        (smallest_plan, "plans_on_demand"),
    ),
    "hold_longer": ((planning, "hold_longer"),),
    "smallest_search": ((smallest_plan, "_smallest_in_either_order"),),
}
STEPS = {
    "chain": conv_bn_relu_chain(6),
    "resnet": resnet_like((1, 2, 1, 1)),
    "densenet": densenet_like((2, 3)),
}
QUICK = Limits(iterated_search_ops=30_000, guard_seconds=1e9)


def with_link(graph: StepGraph) -> StepGraph:
    """The step with a link that carries half of what is saved while the forward pass runs."""
    saved_bytes = sum(graph.storages[s].nbytes for s in graph.saved)
    rate = saved_bytes / 2 / sum(op.seconds for op in graph.ops[: graph.n_forward])
    return replace(graph, link=Link("link", rate, rate, 0.01))


def budget_bytes(graph: StepGraph, share: float) -> int:
    return int(share * keep_all(graph, HARDWARE, 0).predicted_peak_bytes)


class JumpingClock:
    """A clock that no two machines agree on: now it stands still, now minutes pass between two readings."""

    def __init__(self, jumps_seconds: tuple[float, ...]) -> None:
        self._now = 0.0
        self._jumps_seconds = itertools.cycle(jumps_seconds)

    def __call__(self) -> float:
        self._now += next(self._jumps_seconds)
        return self._now


@pytest.mark.parametrize(("name", "linked"), [("chain", True), ("resnet", False), ("densenet", True)])
def test_a_clock_that_jumps_changes_no_plan(monkeypatch: pytest.MonkeyPatch, name: str, linked: bool) -> None:
    graph = with_link(STEPS[name]) if linked else STEPS[name]
    budget = budget_bytes(graph, 0.7)
    found: list[Plan | int] = []
    for jumps_seconds in (None, (1e-3, 0.0, 30.0)):
        smallest_plan._smallest.cache_clear()
        on_demand.plans_on_demand.cache_clear()
        if jumps_seconds is not None:
            clock = JumpingClock(jumps_seconds)
            for called in ("perf_counter", "monotonic", "time", "process_time"):
                monkeypatch.setattr(time, called, clock)
        try:
            found.append(joint(graph, HARDWARE, budget, limits=QUICK))
        except BudgetError as error:
            found.append(error.least_feasible_bytes)
        monkeypatch.undo()
    assert all(other == found[0] for other in found[1:])
    assert all(not plan.stopped_early for plan in found if isinstance(plan, Plan))


def test_a_guard_that_struck_is_noted_in_the_plan_and_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = with_link(STEPS["resnet"])
    plan = joint(graph, HARDWARE, budget_bytes(graph, 0.75), limits=Limits(guard_seconds=0.0))
    assert "iterated search" in plan.stopped_early
    assert "the time limit of planning" in caplog.text and "iterated search" in caplog.text
    assert "stopped early   " in plan.explain() and "iterated search" in plan.explain()
    assert Plan.load(plan.save(tmp_path / "plan.json")).stopped_early == plan.stopped_early
    assert check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences), plan.budget_bytes)


def test_what_a_time_limit_ended_is_searched_again_in_the_same_process() -> None:
    struck = [True, False, False]

    @cached_unless_stopped(4, lambda found: found)
    def search(step: int) -> tuple[str, ...]:
        return ("order of ops",) if struck.pop(0) else ()

    assert [search(1), search(1), search(1)] == [("order of ops",), (), ()]
    assert struck == [False]


def test_what_was_searched_is_found_again_until_it_is_forgotten() -> None:
    asked: list[int] = []

    @cached_unless_stopped(4, lambda found: ())
    def search(step: int) -> None:
        asked.append(step)

    search(1), search(1)
    forget_searches()
    search(1)
    assert asked == [1, 1]


def test_a_plan_that_was_not_stopped_says_nothing_of_it() -> None:
    graph = STEPS["chain"]
    assert "stopped early" not in joint(graph, HARDWARE, budget_bytes(graph, 0.75)).explain()


def test_every_switch_is_tried() -> None:
    assert set(SWITCHES) == set(PARTS)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("linked", [False, True])
def test_a_part_that_is_turned_off_takes_no_part_and_the_plan_is_valid(
    monkeypatch: pytest.MonkeyPatch, switch: str, linked: bool
) -> None:
    asked: list[tuple[object, object]] = []

    def watched(choice: object, room: object, **options: object) -> object:
        asked.append((options.get("early", True), options.get("whole", True)))
        return solve(choice, room, **options)  # type: ignore[arg-type]

    def refused(*_: object, **__: object) -> None:
        raise AssertionError(f"{switch} is off")

    solve = planning.solve
    for module in (planning, smallest_plan, integer_program):
        monkeypatch.setattr(module, "solve", watched)
    for module, part in PARTS[switch]:
        monkeypatch.setattr(module, part, refused)
    limits = replace(QUICK, **{switch: False})
    for name, share in (("chain", 0.6), ("densenet", 0.6)) if linked else (("resnet", 0.8),):
        graph = with_link(STEPS[name]) if linked else STEPS[name]
        budget = budget_bytes(graph, share)
        smallest_plan._smallest.cache_clear()
        on_demand.plans_on_demand.cache_clear()
        try:
            plan = joint(graph, HARDWARE, budget, limits=limits)
        except BudgetError as error:
            assert error.least_feasible_bytes > budget
            continue
        assert check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences), budget) <= budget
        assert plan.lower_bound_seconds == 0 or switch != "lower_bound"
    relaxed = [ask for ask in asked if ask[0] is False]
    programs = [ask for ask in asked if ask[0] is not False]
    assert bool(relaxed) == (switch != "lower_bound")
    assert bool(programs) == (switch != "integer_program")


@pytest.mark.parametrize("linked", [False, True])
def test_with_every_part_off_there_is_a_plan_or_an_error(linked: bool) -> None:
    graph = with_link(STEPS["chain"]) if linked else STEPS["chain"]
    limits = Limits(**dict.fromkeys(SWITCHES, False))
    with pytest.raises(BudgetError) as refused:
        joint(graph, HARDWARE, graph.resident_bytes + 1, limits=limits)
    budget = refused.value.least_feasible_bytes
    plan = joint(graph, HARDWARE, budget, limits=limits)
    assert check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences), budget) <= budget


def test_effort_ends_with_what_is_spent_or_with_the_guard() -> None:
    guard = Guard(1e9)
    effort = Effort("search", 10, guard)
    assert not effort.is_spent
    effort.spend(10)
    assert effort.is_spent and not guard.stopped, "that is no work for the guard"
    struck = Guard(-1.0)
    assert Effort("search", 10, struck).is_spent
    assert list(struck.stopped) == ["search"] and struck.left_seconds == 0


def test_few_nodes_for_the_smallest_peak_still_name_a_budget_that_is_enough() -> None:
    graph = STEPS["densenet"]
    limits = replace(QUICK, max_peak_entries=1)
    with pytest.raises(BudgetError) as refused:
        joint(graph, HARDWARE, 1, limits=limits)
    least_bytes = refused.value.least_feasible_bytes
    assert joint(graph, HARDWARE, least_bytes, limits=limits).predicted_peak_bytes <= least_bytes
