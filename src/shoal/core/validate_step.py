"""Whether a step read from elsewhere makes sense by itself, before anything is computed from it."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.hardware import MAX_SECONDS
from shoal.core.step import RESIDENT, Again, Op, StepGraph
from shoal.errors import PlanError, brief

_ORDER = {"forward": 0, "loss": 1, "backward": 2}


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
