"""Checks a plan, its step and its order of ops before a training step runs it, whoever made it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from shoal.core.hardware import MAX_SECONDS
from shoal.core.lossy import CODECS
from shoal.core.residence import Encode, Residence, residence_from_json, residence_to_json
from shoal.core.schedule import schedule
from shoal.core.simulate import simulate
from shoal.core.step import RESIDENT, Again, Op, StepGraph
from shoal.core.validate import check_runs
from shoal.errors import InputError, PlanError, brief

SWITCH = "SHOAL_CHECK_PLANS"  # of the environment: "1" has the plans of Shoal's own planners checked too
_ORDER = {"forward": 0, "loss": 1, "backward": 2}


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


def check_step(graph: StepGraph) -> None:
    """Hold a step against what every captured one is.

    Raises:
        PlanError: it has no op; ops or storages are not in their places or share a name; a size, a time or a number of
            bytes is negative or beyond all bounds; the passes are mixed up; an op reads or writes a storage that is
            not there, reads one before it is written, or writes one that is written already or stays all step.
    """
    if not isinstance(graph, StepGraph):
        raise PlanError(f"the step is {brief(graph)}; expected a StepGraph")
    if not graph.ops:
        raise PlanError("the step has no ops")
    _places_and_names("op", [(op.id, op.name) for op in graph.ops])
    _places_and_names("storage", [(storage.id, storage.name) for storage in graph.storages])
    sizes = [graph.static_bytes, *(storage.nbytes for storage in graph.storages)]
    if min(sizes) < 0 or sum(sizes) >= 2**62:
        raise PlanError(f"the step has a storage of {min(sizes)} bytes and {sum(sizes)} in all; expected 0 to 2**62")
    if any(size < 0 for storage in graph.storages for size in storage.shape):
        raise PlanError("the step has a storage with a negative size in its shape")
    order = [_ORDER[op.phase] for op in graph.ops]
    if order != sorted(order) or order.count(_ORDER["loss"]) > 1:
        raise PlanError("the step's ops are not a forward pass, at most one loss, and a backward pass")
    written: set[int] = set()
    to_come = {storage for op in graph.ops for storage in op.writes if 0 <= storage < len(graph.storages)}
    for op in graph.ops:
        _storages_are_there(graph, op.name, op.writes)
        for run, there in ((op, written), (op.again, written.union(op.writes) if op.again else written)):
            if run is not None:
                _costs(op.name, run)
                if run.overwrites != -1 and not op.writes:
                    raise PlanError(f"op {op.name!r} overwrites storage {run.overwrites}, but writes nothing")
                _storages_are_there(graph, op.name, run.reads)
                if early := to_come.intersection(run.reads) - there:
                    raise PlanError(f"op {op.name!r} reads {graph.storages[min(early)].name!r} before it is written")
        resident = {storage for storage in op.writes if graph.storages[storage].kind in RESIDENT}
        if twice := written.intersection(op.writes) | resident:
            raise PlanError(f"op {op.name!r} writes {graph.storages[min(twice)].name!r}, which already exists")
        written.update(op.writes)


def _places_and_names(what: str, numbered: list[tuple[int, str]]) -> None:
    if [place for place, _ in numbered] != list(range(len(numbered))):
        raise PlanError(f"the ids of the step's {what}s are not 0, 1, 2, and so on")
    names = [name for _, name in numbered]
    if len(set(names)) != len(names):
        raise PlanError(f"two {what}s of the step are called {brief(max(names, key=names.count))}")


def _costs(name: str, run: Op | Again) -> None:
    counts = (run.workspace_bytes, run.flops, run.moved_bytes)
    if min(counts) < 0 or run.workspace_bytes >= 2**62:
        raise PlanError(f"op {name!r} has workspace_bytes, flops and moved_bytes of {counts}; expected 0 or more")
    if not 0 <= run.seconds <= MAX_SECONDS:
        raise PlanError(f"op {name!r} takes {run.seconds} s; expected 0 to {MAX_SECONDS:g}")
    if not 0 <= run.launch_seconds <= MAX_SECONDS:
        raise PlanError(f"op {name!r} takes {run.launch_seconds} s to launch; expected 0 to {MAX_SECONDS:g}")
    if run.overwrites != -1 and run.overwrites not in run.reads:
        raise PlanError(f"op {name!r} overwrites storage {run.overwrites}, which it does not read")


def _storages_are_there(graph: StepGraph, name: str, storages: Iterable[int]) -> None:
    found = tuple(storages)
    if any(not 0 <= storage < len(graph.storages) for storage in found) or len(set(found)) != len(found):
        raise PlanError(f"op {name!r} names storages {brief(found)} of {len(graph.storages)}; expected each once")


def check_order(captured: StepGraph, ordered: StepGraph) -> None:
    """Hold the order of a step's ops against the step as it was captured.

    It shares no code with what chooses an order.

    Args:
        captured: the step as it was captured.
        ordered: the same step in the order in which its ops are to run.

    Raises:
        PlanError: the ops or storages are others; a pass begins before the one before it has ended; an op runs before
            one whose result it reads; two ops that draw random numbers, communicate or write nothing have changed
            places; an op runs before another op that stands for what happens outside the graphs, such as eager code
            between them, and ran after it, or the other way round; the last op of the forward pass has moved.
    """
    before = {op.name: op for op in captured.ops}
    for place, op in enumerate(ordered.ops):
        if op.id != place or op.name not in before or replace(op, id=before[op.name].id) != before[op.name]:
            raise PlanError(f"the order of ops names {op.name!r}, which is not as it was captured; plan it again")
    if len({op.name for op in ordered.ops}) != len(captured.ops) or len(ordered.ops) != len(captured.ops):
        raise PlanError(f"the order has {len(ordered.ops)} ops for {len(captured.ops)}; expected each of them once")
    if ordered.storages != captured.storages:
        raise PlanError("the step in its new order has other storages than as it was captured; plan this step again")
    if [op.phase for op in ordered.ops] != [op.phase for op in captured.ops]:
        raise PlanError("the order mixes ops of the forward pass, the loss and the backward pass; expected one by one")

    there = {s.id for s in captured.storages} - {s for op in captured.ops for s in op.writes}
    for op in ordered.ops:
        for storage in op.reads:
            if storage not in there:
                name = captured.storages[storage].name
                raise PlanError(f"the order runs {op.name!r} before the op that writes {name!r}, which it reads")
        there.update(op.writes)

    for one, other in zip(filter(_acts, captured.ops), filter(_acts, ordered.ops), strict=True):
        if one.name != other.name:
            raise PlanError(
                f"the order runs {other.name!r} before {one.name!r}; both draw random numbers, communicate or write "
                "nothing, and must run as they were captured"
            )
    stretch_of, stretches = _stretches(captured), _stretches(ordered)
    for op in ordered.ops:
        last = op.phase == "forward" and op.id + 1 == captured.n_forward
        if stretches[op.name] != stretch_of[op.name] or (last and op.name != captured.ops[op.id].name):
            raise PlanError(
                f"the order has {op.name!r} in the place of {captured.ops[op.id].name!r}; no op may cross eager code "
                "or what a loop holds, and the last forward op stays"
            )


def _stretches(graph: StepGraph) -> dict[str, int]:
    """Op name → which stretch it belongs to, of those that ops that stand for what happens outside begin."""
    return dict(zip((op.name for op in graph.ops), accumulate(op.is_outside for op in graph.ops), strict=True))


def _acts(op: Op) -> bool:
    """Whether an op does more than write its results."""
    return op.random or not op.writes or "c10d" in op.target
