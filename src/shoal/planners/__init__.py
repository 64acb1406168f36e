"""Strategies that choose residences: one a file, all of one signature, `(StepGraph, Hardware, budget_bytes) → Plan`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from shoal.check_plan import check_plan
from shoal.core.plan import Plan
from shoal.errors import InputError, PlanError, brief
from shoal.hardware import Hardware
from shoal.step import StepGraph

Planner = Callable[[StepGraph, Hardware, int], Plan]
NAMES = ("joint", "chain", "sqrt", "keep_all", "hmms", "hmms_recompute", "layerwise", "hascoet")


def get(name: str | Planner) -> Planner:
    """The planner called `name`, or a function of your own with the same signature.

    What your function returns is held against `shoal.check` before anything is made of it: PlanError where it is no
    `Plan`, is of another step, breaks a rule or passes the budget.

    Raises:
        InputError: there is none of that name.
    """
    if callable(name):
        return _checked(name)
    if not isinstance(name, str):
        raise InputError(f"planner is a {type(name).__name__}; expected a name or a function")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"no planner is called {name!r}; {hint}there are {', '.join(NAMES)}")
    planner: Planner = getattr(importlib.import_module(f"shoal.planners.{name}"), name)
    return planner


def _checked(planner: Planner) -> Planner:
    who = f"the planner {getattr(planner, '__name__', type(planner).__name__)!r}"

    @wraps(planner, updated=())
    def plan(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        made: object = planner(graph, hardware, budget_bytes)
        if not isinstance(made, Plan):
            raise PlanError(f"{who} returned {brief(made)}; expected a shoal.Plan")
        if not isinstance(made.graph, StepGraph) or made.graph.fingerprint != graph.fingerprint:
            raise PlanError(f"{who} returned a plan of another step; expected one of the step it was given")
        try:
            check_plan(graph, made.residences, budget_bytes)
        except PlanError as error:
            raise PlanError(f"{who} returned a plan that breaks a rule: {error}") from None
        return replace(made, graph=graph)

    return plan
