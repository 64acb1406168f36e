"""Strategies that choose residences: one a file, all of one signature, `(StepGraph, Hardware, budget_bytes) → Plan`.

Imports `core`, and `lowlevel` for the native library.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from shoal.core.hardware import Hardware
from shoal.core.named import function_named
from shoal.core.order import op_names, reordered
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_order, check_plan
from shoal.errors import InputError, PlanError, brief

Planner = Callable[[StepGraph, Hardware, int], Plan]
NAMES = ("joint", "chain", "keep_all")


def get(name: str | Planner) -> Planner:
    """The planner called `name`, or a function of your own with the same signature.

    A function is given as such, or as MODULE:FUNCTION or FILE.py:FUNCTION, such as "examples.planners.sqrt:sqrt". What
    it returns is held against `shoal.core.validate` before anything is made of it: PlanError where it is not a `Plan`,
    belongs to another step, breaks a rule or exceeds the budget.

    Raises:
        InputError: there is none of that name.
    """
    if callable(name):
        return _checked(name)
    if not isinstance(name, str):
        raise InputError(f"planner is a {type(name).__name__}; expected a name or a function")
    if ":" in name:
        return _checked(function_named(name))
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"no planner is called {brief(name)}; {hint}there are {', '.join(NAMES)}, and MODULE:FUNCTION")
    planner: Planner = getattr(importlib.import_module(f"shoal.planners.{name}"), name)
    return planner


def _checked(planner: Planner) -> Planner:
    who = f"the planner {getattr(planner, '__name__', type(planner).__name__)!r}"

    @wraps(planner, updated=())
    def plan(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        made: object = planner(graph, hardware, budget_bytes)
        if not isinstance(made, Plan):
            raise PlanError(f"{who} returned {brief(made)}; expected a shoal.Plan")
        if not isinstance(made.graph, StepGraph):
            raise PlanError(f"{who} returned a plan of another step; expected one of the step it was given")
        try:
            if made.captured_graph.fingerprint != graph.fingerprint:
                raise PlanError("it is a plan of another step; expected one of the step it was given")
            ordered = reordered(graph, op_names(made.graph))
            check_plan(ordered, made.residences, budget_bytes)
            check_order(graph, ordered)
        except PlanError as error:
            raise PlanError(f"{who} returned a plan that breaks a rule: {error}") from None
        return replace(made, graph=ordered)

    return plan
