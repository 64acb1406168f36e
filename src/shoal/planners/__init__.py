"""Strategies that choose residences: one a file, all of one signature, `(StepGraph, Hardware, budget_bytes) → Plan`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable

from shoal.errors import InputError
from shoal.hardware import Hardware
from shoal.plan import Plan
from shoal.step import StepGraph

Planner = Callable[[StepGraph, Hardware, int], Plan]
NAMES = ("joint", "chain", "sqrt", "keep_all", "hmms", "hmms_recompute", "layerwise", "hascoet")


def get(name: str | Planner) -> Planner:
    """The planner called `name`; a function of your own with the same signature is taken as it is.

    Raises:
        InputError: there is none of that name.
    """
    if callable(name):
        return name
    if not isinstance(name, str):
        raise InputError(f"planner is a {type(name).__name__}; expected a name or a function")
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"no planner is called {name!r}; {hint}there are {', '.join(NAMES)}")
    planner: Planner = getattr(importlib.import_module(f"shoal.planners.{name}"), name)
    return planner
