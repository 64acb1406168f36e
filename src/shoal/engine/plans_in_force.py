"""The plans that the steps of a model run by, each with what it was made for, as `model.shoal` shows them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.engine.iteration.record import Metered
from shoal.engine.loop_memory import Basis, LoopMemory
from shoal.engine.status import Status


class PlansInForce:
    """Keeps the plans of a status, and the steps that run by them, equal.

    Args:
        status: `model.shoal`.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        self._steps: weakref.WeakSet[Metered] = weakref.WeakSet()

    def put(self, step: Metered, plan: Plan, basis: Basis | None) -> None:
        """Let a step run by a plan, which replaces that of the same step."""
        step.plan, step.basis = plan, basis
        self._steps.add(step)
        if not self._status.plans:
            self._status.measured_peak_bytes = None  # of the plans before this one
        others = (p for p in self._status.plans if not _is_same_step(p.exact_step, plan.exact_step))
        self._status.plans = (*others, plan)
        self._status.planning_seconds += plan.planning_seconds

    def have(self, steps: Iterable[Metered]) -> bool:
        """Whether all these steps run by a plan that is in force."""
        return all(step in self._steps for step in steps)

    def any_is_to_be_metered(self) -> bool:
        """Whether the next run of a step may be a metered one."""
        return any(step.steps_to_meter for step in self._steps)

    def count(self, more_bytes: int) -> None:
        """Count that many more bytes in use all step, from `adapt` on."""
        for step in self._steps:
            step.basis = step.basis and step.basis.with_static(more_bytes)

    def adapt(self, loop: LoopMemory) -> bool:
        """Count what the loop holds; whether a plan exceeds the budget then."""
        now: dict[int, Plan] = {}
        for step in self._steps:
            if step.plan is not None and step.basis is not None:
                plan, step.plan = step.plan, step.basis.of(step.plan, loop)
                now[id(plan)] = step.plan
        self._status.plans = tuple(now.get(id(plan), plan) for plan in self._status.plans)
        budget_bytes = self._status.budget_bytes
        return budget_bytes is not None and any(plan.predicted_peak_bytes > budget_bytes for plan in now.values())

    def learn_errors(self, plan: Plan, errors: Sequence[float]) -> None:
        """Put what a step's encodings really lost into the plan."""
        named = dict(zip((storage.name for storage in plan.encoded), errors, strict=True))
        known = replace(plan, errors=named, errors_measured=True)
        for step in self._steps:
            if step.plan is plan:
                step.plan = known
        self._status.plans = tuple(known if p is plan else p for p in self._status.plans)

    def go_back_to(self, plans: tuple[Plan, ...]) -> None:
        """Have these plans in force, of all that are: a step that was planned since will not run."""
        self._status.plans = plans
        for step in [step for step in self._steps if all(step.plan is not plan for plan in plans)]:
            self._steps.discard(step)

    def end(self) -> None:
        """No plan is in force."""
        self._status.put(())
        self._status.predicted_reserved_bytes = None
        self._steps.clear()


def _is_same_step(one: StepGraph, other: StepGraph) -> bool:
    return one.fingerprint == other.fingerprint and one.static_bytes == other.static_bytes
