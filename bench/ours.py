"""Shoal as a contender: compiled inside a byte budget, checked against plain PyTorch, then metered from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.plain import Plain
from bench.workload import Forward, Workload
from shoal.core.plan import Plan
from shoal.engine.api import compile as compile_model
from shoal.engine.options import Options
from shoal.engine.plan import plan as plan_model
from shoal.engine.session import Status
from shoal.errors import BudgetError

_MAX_REPAIRS = 6
_HALVINGS = 6


Check = Callable[[Forward, str], str]


class Unsettled(Exception):
    """Every plan was over the budget when measured, and so were those made with what was learnt."""


@dataclass(frozen=True)
class Ours:
    """One budget, run.

    Attributes:
        forward: the compiled model.
        plan: what it runs.
        measured_peak_bytes: measured here, over the whole step with its loss.
        planning_seconds: capture, profiling of ops not yet in the cache, planning, repairs.
        repairs: plans that a measured peak over the budget replaced.
        exactness: how its gradients compare to plain PyTorch's.
    """

    forward: Forward
    plan: Plan
    measured_peak_bytes: int
    planning_seconds: float
    repairs: int
    exactness: str

    @property
    def predicted_peak_bytes(self) -> int:
        return self.plan.predicted_peak_bytes


def run_within(
    plain: Plain,
    budget_bytes: int,
    *,
    brief: bool = False,
    check: Check | None = None,
    options: Options | None = None,
    **arguments: Any,
) -> Ours:
    """Compile, step until no plan is repaired any more, and measure.

    Args:
        plain: the step as plain PyTorch runs it.
        budget_bytes: not to be exceeded.
        check: takes a step and raises where it is wrong; None: all bits, by `Reference.check`.
        options, arguments: of `shoal.compile`; `allow` is "bitwise" unless given: the default check is of all bits.
        brief: one checked step instead of two, for slow steps on the CPU.

    Raises:
        BudgetError: no plan fits.
        WrongResult: gradients, buffers or random numbers differ from plain PyTorch's.
        Unsettled: repairs did not end.
    """
    check = check or plain.reference.check
    arguments = {"allow": "bitwise", **arguments}
    model = compile_model(
        plain.workload.shared_copy(), budget_bytes, name=plain.workload.name, options=options, **arguments
    )
    status: Status = model.shoal  # type: ignore[assignment]  # nn.Module's attributes are tensors to mypy
    who = ", ".join(
        [
            f"shoal inside {budget_bytes} bytes",
            *(f"{key}={value}" for key, value in {**arguments, **(options or Options()).given}.items()),
        ]
    )
    exactness = check(model, who)
    for _ in range(_MAX_REPAIRS):
        repairs = status.repairs
        if not brief or not status.plans:
            exactness = check(model, who)
        if status.repairs == repairs and status.plans:
            break
    else:
        raise Unsettled(f"{status.repairs} plans were over the budget when measured")
    measured_peak_bytes = plain.metered(model)
    plan = status.plan
    assert plan is not None
    return Ours(model, plan, measured_peak_bytes, status.planning_seconds, status.repairs, exactness)


def least_budget(workload: Workload, planner: str, known_bytes: int) -> int:
    """The least budget for which a plan is found, by halving the interval between what no plan can save and what fits.

    Args:
        workload, planner: the step and Shoal's planner.
        known_bytes: a budget that is known to be feasible.
    """
    hopeless_bytes = workload.resident_bytes + workload.parameter_bytes
    for _ in range(_HALVINGS):
        asked_bytes = (hopeless_bytes + known_bytes) // 2
        try:
            made = plan_model(
                workload.model,
                workload.images,
                asked_bytes,
                allow="bitwise",
                name=workload.name,
                options=Options(planner=planner),
            )
            known_bytes = min(asked_bytes, made.predicted_peak_bytes)
        except BudgetError as error:
            hopeless_bytes = asked_bytes
            if asked_bytes < error.least_feasible_bytes < known_bytes:
                known_bytes = error.least_feasible_bytes
    return known_bytes
