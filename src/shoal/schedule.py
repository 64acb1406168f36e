"""From residences to the exact sequence of op executions, with the moment each storage is given up.

Forward ops run once, in order. Before each backward op run the recomputations that name it, in forward order. Every
read takes the storage's most recent instance, and an instance is freed right after its last reader. `simulate` adds
up the bytes of this sequence and `lower` turns the same sequence into graphs, so that both speak of one thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.residence import Keep, Recompute, Residence
from shoal.step import RESIDENT, Op, StepGraph

STAYS = RESIDENT | {"output", "tangent", "gradient"}  # kinds that nothing in the step frees


@dataclass(frozen=True)
class Run:
    """One execution of an op.

    Attributes:
        op: the op's id.
        again: a forward op run once more during the backward pass.
        writes: storages that come to life; what a recomputation writes besides is dropped at once.
        frees: storages whose current instance dies after this run.
        takes_over: the dying storage whose block the first written storage takes (in-place execution), or -1.
    """

    op: int
    again: bool
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    takes_over: int = -1

    def of(self, graph: StepGraph) -> Op:
        """The op as it runs here."""
        return graph.ops[self.op].second if self.again else graph.ops[self.op]


def schedule(graph: StepGraph, residences: Mapping[str, Residence]) -> tuple[Run, ...]:
    """The sequence of runs that `residences` (by storage name, absent means Keep) stand for.

    Raises:
        PlanError: a residence names an unknown storage or op, a storage that must not be recomputed, or leaves a
            reader without the storage it reads.
    """
    sequence = _executions(graph, residences)
    recomputed = {s.id for s in graph.storages if isinstance(residences.get(s.name), Recompute)}
    _reject_missing_reads(graph, sequence, recomputed)
    return _with_frees(graph, sequence)


def _executions(graph: StepGraph, residences: Mapping[str, Residence]) -> list[tuple[int, bool, tuple[int, ...]]]:
    """(op, again, written storages) in the order they run."""
    again: dict[int, dict[int, list[int]]] = {}
    by_name = {s.name: s for s in graph.storages}
    backward = {op.name: op.id for op in graph.ops if op.phase != "forward"}
    for name, residence in residences.items():
        if isinstance(residence, Keep):
            continue
        storage = by_name.get(name)
        if storage is None:
            raise PlanError(f"the plan names a storage {name!r} that this step does not have; plan this step anew")
        producer = graph.producer.get(storage.id, -1)
        if producer < 0 or graph.ops[producer].phase != "forward" or storage.kind != "activation":
            raise PlanError(f"{name!r} ({storage.kind}) cannot be recomputed: only activations of the forward pass can")
        if storage.id in graph.held_for_second_runs:
            raise PlanError(f"{name!r} cannot be given up: recomputing {graph.ops[producer].name!r} reads it")
        if residence.before and not graph.ops[producer].recomputable:
            target = graph.ops[producer].target
            raise PlanError(f"{name!r} cannot be recomputed: running {target} twice changes the training")
        for op_name in residence.before:
            if op_name not in backward:
                raise PlanError(f"{name!r} is to be recomputed before {op_name!r}, no backward op of this step")
            again.setdefault(backward[op_name], {}).setdefault(producer, []).append(storage.id)
    sequence: list[tuple[int, bool, tuple[int, ...]]] = []
    for op in graph.ops:
        for rerun, storages in sorted(again.get(op.id, {}).items()):
            sequence.append((rerun, True, tuple(storages)))
        sequence.append((op.id, False, op.writes))
    return sequence


def _reject_missing_reads(
    graph: StepGraph, sequence: list[tuple[int, bool, tuple[int, ...]]], recomputed: set[int]
) -> None:
    """A storage that is not kept must be there again when the backward pass reads it."""
    back: set[int] = set()
    for op_id, again, writes in sequence:
        op = graph.ops[op_id].second if again else graph.ops[op_id]
        if again or op.phase != "forward":
            for storage in op.reads:
                if storage in recomputed and storage not in back:
                    name = graph.storages[storage].name
                    raise PlanError(f"{op.name!r} reads {name!r}, which was given up and is not recomputed before it")
        if again:
            back.update(writes)


def _with_frees(graph: StepGraph, sequence: list[tuple[int, bool, tuple[int, ...]]]) -> tuple[Run, ...]:
    ops, storages = graph.ops, graph.storages
    stays = [s.kind in STAYS for s in storages]
    runs: list[Run] = []
    read_later: set[int] = set()  # storages whose instance at this point is read further on
    crossing = _crossing(graph, sequence)
    for place, (op_id, again, writes) in reversed(list(enumerate(sequence))):
        op = ops[op_id].second if again else ops[op_id]
        frees = [s for s in writes if s not in read_later and not stays[s]]
        read_later.difference_update(writes)
        takes_over = -1
        for storage in op.reads:
            if storage not in read_later and not stays[storage]:
                frees.append(storage)
                if storage == op.overwrites and op.writes[0] in writes and storage not in crossing[place]:
                    takes_over = storage
        read_later.update(op.reads)
        runs.append(Run(op_id, again, writes, tuple(dict.fromkeys(frees)), takes_over))
    runs.reverse()
    return tuple(runs)


def _crossing(graph: StepGraph, sequence: list[tuple[int, bool, tuple[int, ...]]]) -> list[set[int]]:
    """For each run of the backward pass, the storages still held from the forward pass.

    They are autograd's saved tensors, which must not be overwritten: the backward pass may be asked for twice.
    """
    held = {storage for op in graph.ops[: graph.n_forward] for storage in op.writes}
    nothing: set[int] = set()
    crossing = []
    for op_id, again, writes in sequence:
        if again:
            held = held.difference(writes)
        crossing.append(nothing if graph.ops[op_id].phase == "forward" and not again else held)
    return crossing
