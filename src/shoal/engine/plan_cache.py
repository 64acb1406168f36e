"""Plans cached between runs: what a planner found for a step, machine and budget is found again, and checked.

One file a plan, in the folder `plans` of `shoal.core.files.cache_dir()`. A planner is a function of its arguments, so
a plan is filed under a digest of all of them, and of the code of the planners. A file that is damaged, belongs to
something else or breaks a rule is ignored: a broken cache costs only time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path

from shoal import core, planners
from shoal.core.files import cache_dir, write_json
from shoal.core.hardware import Hardware
from shoal.core.order import op_names, reordered
from shoal.core.plan import Plan
from shoal.core.records import read_json, read_object, read_value
from shoal.core.residence import residence_from_json, residence_to_json
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_order, check_plan
from shoal.errors import BudgetError, InputError, PlanError, brief
from shoal.planners.limits import DEFAULT, Limits

_FORMAT = "shoal-cached-plan 2"
_WORTH_SECONDS = 0.5  # a plan that is made faster is made again
_MAX_BYTES = 32 * 2**20  # of all files; the plans that were used last stay
_MAX_REFUSED = 64  # a search tries some ten variants, each in three loops
_refused: dict[str, BudgetError] = {}  # by the digest of what was asked for; of this process

log = logging.getLogger("shoal")


def remembered(planner: str | planners.Planner, *, order: bool = True) -> planners.Planner:
    """`planners.get(planner)`, which finds again what it planned in an earlier run.

    A planner that is a function of your own is called every time.

    Args:
        planner: its name, or the function.
        order: whether ops may run in another order than the captured one; only `joint` looks for one.

    Raises:
        InputError: there is none of that name.
    """
    make = planners.get(planner)
    if planner not in planners.NAMES:
        return make
    assert isinstance(planner, str)
    limits = replace(DEFAULT, order=order)
    if planner == "joint":
        make = partial(make, limits=limits)  # type: ignore[call-arg]

    def plan(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        started = time.perf_counter()
        digest = _digest(planner, limits, graph, hardware, budget_bytes)
        if digest in _refused:
            raise copy(_refused[digest])  # with a traceback of its own
        found = _recall(digest, planner, graph, hardware, budget_bytes)
        if found is None:
            try:
                found = make(graph, hardware, budget_bytes)
            except BudgetError as error:
                if error.stopped_early:  # on a machine with less load, less may be enough
                    raise
                _refused[digest] = copy(error)
                if len(_refused) > _MAX_REFUSED:
                    del _refused[next(iter(_refused))]
                raise
            whole = (
                found.captured_graph.fingerprint == graph.fingerprint
                and found.exact_graph is None
                and not found.stopped_early
            )
            if whole and time.perf_counter() - started > _WORTH_SECONDS:
                _remember(digest, found)
        return found

    return plan


def _digest(planner: str, limits: Limits, graph: StepGraph, hardware: Hardware, budget_bytes: int) -> str:
    everything = (_FORMAT, _code(), version("highspy"), planner, limits, hardware, budget_bytes, graph)
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """A digest of the source of the planners and of what they compute with: another planner finds other plans."""
    found = hashlib.sha256()
    for package in (core, planners):
        for folder in package.__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(path.read_bytes())
    return found.hexdigest()


def _recall(digest: str, planner: str, graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan | None:
    started = time.perf_counter()
    try:
        path = cache_dir() / "plans" / f"{digest}.json"
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        value = read_object(read_json(path), "the file")
        if value.get("format") != _FORMAT or value.get("step") != graph.fingerprint:
            raise InputError(f"it is {brief(value.get('format'))} of step {brief(value.get('step'))}")
        residences = {
            name: residence_from_json(each, f"the residence of {brief(name)}")
            for name, each in read_object(value.get("residences"), "residences").items()
        }
        bound_seconds = read_value(float, value.get("lower_bound_seconds"), "lower_bound_seconds")
        if bound_seconds < 0 and not graph.has_launches:  # another order of ops may wait less for launches
            raise InputError(f"lower_bound_seconds is {bound_seconds}, expected 0 or more")
        order = read_value(tuple[str, ...], value.get("order"), "order")
        run = reordered(graph, order) if order else graph
        check_order(graph, run)
        check_plan(run, residences, budget_bytes)
        os.utime(path)
    except (OSError, InputError, PlanError) as error:
        log.debug("ignored the cached plan %s (%s); planning again", digest, error)
        return None
    seconds = time.perf_counter() - started
    log.debug("%s: found its plan in the cache, checked in %.2f s", graph.model or "model", seconds)
    return Plan(
        run,
        residences,
        planner,
        hardware.name,
        budget_bytes,
        bound_seconds,
        seconds,
        captured_order=op_names(graph) if order else (),
    )


def _remember(digest: str, plan: Plan) -> None:
    try:
        folder = cache_dir() / "plans"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            folder / f"{digest}.json",
            {
                "format": _FORMAT,
                "step": plan.captured_graph.fingerprint,
                "order": op_names(plan.graph) if plan.captured_order else (),
                "lower_bound_seconds": plan.lower_bound_seconds,
                "residences": {name: residence_to_json(r) for name, r in plan.residences.items()},
            },
        )
        drop_oldest(folder.glob("*.json"))
    except (OSError, InputError) as error:
        log.debug("cannot cache a plan: %s", error)


def drop_oldest(paths: Iterable[Path]) -> None:
    """Remove the files that were not used for longest, until the others are within the limit of a cache."""
    found = sorted(((path.stat(), path) for path in paths), key=lambda each: -each[0].st_mtime_ns)
    kept_bytes = 0
    for status, path in found:
        kept_bytes += status.st_size
        if kept_bytes > _MAX_BYTES:
            path.unlink(missing_ok=True)
