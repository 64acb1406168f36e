"""Checks a plan before a training step runs it, whoever made it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shoal.core.lossy import CODECS
from shoal.core.residence import Encode, Residence, residence_from_json, residence_to_json
from shoal.core.schedule import schedule
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.core.validate_order import check_order
from shoal.core.validate_step import check_step
from shoal.errors import InputError, PlanError, brief

SWITCH = "SHOAL_CHECK_PLANS"  # of the environment: "1" has the plans of Shoal's own planners checked too


def check_own_plan(
    captured: StepGraph, graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int = 0
) -> None:
    """`check_plan` of what a planner of Shoal's made of a captured step, where the environment asks for that.

    It is off unless asked for: it takes about as long as twenty trials of a planner.
    """
    if os.environ.get(SWITCH, "0") != "0":
        check_order(captured, graph)
        check_plan(graph, residences, budget_bytes)


def check_plan(graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int = 0) -> None:
    """Hold residences against the step, by the schedule they stand for and by the independent `shoal.core.validate`.

    Args:
        graph: the step.
        residences: by storage name; an absent storage is kept.
        budget_bytes: the most bytes in use at any position; 0 for no limit.

    Raises:
        PlanError: a residence is none, or names a storage or op that is not there; it gives up what cannot be given up
            or is not there when it is read; the bytes in use pass the budget.
    """
    check_step(graph)
    if not isinstance(residences, Mapping):
        raise PlanError(f"the plan's residences are {brief(residences)}; expected a mapping from names to residences")
    for name, residence in residences.items():
        if not isinstance(name, str) or name not in graph.storage_called:
            raise PlanError(f"the plan names a storage {brief(name)} that this step does not have; plan it again")
        _check_residence(name, residence)
        if isinstance(residence, Encode):
            _check_encoding(graph, name, residence)
    check_runs(graph, residences, schedule(graph, residences), budget_bytes)
    simulate(graph, residences)  # its transfers need a link


def _check_residence(name: str, residence: Any) -> None:
    if not isinstance(residence, Residence):
        raise PlanError(f"the residence of {name!r} is {brief(residence)}; expected Keep, Recompute, Offload or Encode")
    try:
        residence_from_json(residence_to_json(residence), f"the residence of {name!r}")
    except (InputError, TypeError) as error:
        raise PlanError(f"the residence of {name!r} is {brief(residence)}: {error}") from None


def _check_encoding(graph: StepGraph, name: str, how: Encode) -> None:
    payload = graph.storage_called.get(how.payload)
    if payload is None or payload.id not in graph.producer:
        raise PlanError(f"the plan encodes {name!r} in {how.payload!r}, but this step does not; plan this step again")
    producer = graph.ops[graph.producer[payload.id]]
    encodes = producer.target.endswith(".encoded_activation.encode")
    if not encodes or graph.storage_called[name].id not in producer.reads:
        raise PlanError(f"the plan encodes {name!r} in {how.payload!r}, which holds something else; plan it again")
    if how.codec not in CODECS or how.block_elems < 0 or (how.seed is not None and how.seed < 0):
        raise PlanError(
            f"the plan encodes {name!r} by {brief(how.codec)} in blocks of {how.block_elems} with seed {how.seed}; "
            f"expected one of {', '.join(CODECS)}, and numbers of at least 0"
        )
