"""From residences to the exact sequence of op executions, with the moment each storage comes, goes and is given up.

Forward ops run once, in order. Before each backward op run the recomputations that name it, in forward order. Every
read takes the storage's most recent instance, and an instance is freed right after its last reader. An offloaded
storage is copied to the host right after it is written, freed where its residence says, and has an instance again from
the op before which it is fetched. `simulate` adds up the bytes of this sequence and `lower` turns the same sequence
into graphs, so that both speak of one thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.residence import Encode, Offload, Recompute, Residence, exact_residence
from shoal.core.step import Op, StepGraph
from shoal.errors import PlanError


class Run(NamedTuple):
    """One execution of an op, and the transfers that begin and are waited for around it.

    In time: `fetches`, `awaits`, the op itself, `offloads`, `frees`, `releases`.

    Attributes:
        op: the op's id.
        again: a forward op run once more during the backward pass.
        writes: storages whose instance begins here; what a recomputation writes besides is dropped at once.
        frees: storages whose current instance dies after this run.
        takes_over: the dying storage whose block the first written storage takes (in-place execution), or -1.
        fetches: offloaded storages that get device bytes before this run; their copies back begin, in this order.
        awaits: fetched storages whose copies must have ended before this run.
        offloads: storages whose copies to the host begin when this run ends.
        releases: offloaded storages that the device frees after this run, as soon as their copies have ended.
    """

    op: int
    again: bool
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    takes_over: int = -1
    fetches: tuple[int, ...] = ()
    awaits: tuple[int, ...] = ()
    offloads: tuple[int, ...] = ()
    releases: tuple[int, ...] = ()

    def of(self, graph: StepGraph) -> Op:
        """The op as it runs here."""
        return graph.ops[self.op].second if self.again else graph.ops[self.op]


_Execution = tuple[int, bool, tuple[int, ...]]  # the `op`, `again` and `writes` of a run


def _op_of(graph: StepGraph, execution: _Execution) -> Op:
    op = graph.ops[execution[0]]
    return op.second if execution[1] else op


@dataclass
class _ScheduledTransfers:
    """Place in the sequence → the storages that begin or end a transfer there."""

    fetches: dict[int, list[int]] = field(default_factory=dict)
    awaits: dict[int, list[int]] = field(default_factory=dict)
    offloads: dict[int, list[int]] = field(default_factory=dict)
    releases: dict[int, list[int]] = field(default_factory=dict)


def schedule(graph: StepGraph, residences: Mapping[str, Residence]) -> tuple[Run, ...]:
    """The sequence of runs that `residences` (by storage name, absent means Keep) stand for.

    Raises:
        PlanError: a residence names an unknown storage or op, a storage that must not be recomputed or cannot be
            offloaded, or leaves a reader without the storage it reads.
    """
    recomputed, offloaded = _given_up(graph, residences)
    sequence = _executions(graph, recomputed)
    _reject_missing_reads(graph, sequence, recomputed)
    return _with_frees(graph, sequence, offloaded, _transfers(graph, sequence, offloaded))


def _given_up(graph: StepGraph, residences: Mapping[str, Residence]) -> tuple[dict[int, Recompute], dict[int, Offload]]:
    """Storage id → residence, for those that are recomputed and those that are offloaded."""
    recomputed: dict[int, Recompute] = {}
    offloaded: dict[int, Offload] = {}
    for name, whole in residences.items():
        if isinstance(whole, Encode) and not {name, whole.payload} <= graph.storage_called.keys():
            raise PlanError(
                f"the plan encodes {name!r} in {whole.payload!r}, but this step does not; plan this step again"
            )
        residence = exact_residence(whole)
        if not isinstance(residence, Recompute | Offload):
            continue
        storage = graph.storage_called.get(name)
        if storage is None:
            raise PlanError(f"the plan names a storage {name!r} that this step does not have; plan it again")
        what = "recomputed" if isinstance(residence, Recompute) else "offloaded"
        producer = graph.producer.get(storage.id, -1)
        if producer < 0 or graph.ops[producer].phase != "forward" or storage.kind != "activation":
            raise PlanError(f"{name!r} ({storage.kind}) cannot be {what}: only activations of the forward pass can")
        if storage.id in graph.never_given_up:
            reader = "the loss" if not graph.ops[producer].again else f"recomputing {graph.ops[producer].name!r}"
            raise PlanError(f"{name!r} cannot be given up: {reader} reads it")
        if isinstance(residence, Offload):
            offloaded[storage.id] = residence
            continue
        if residence.before and not graph.ops[producer].recomputable:
            target = graph.ops[producer].target
            raise PlanError(f"{name!r} cannot be recomputed: running {target} twice changes the training")
        recomputed[storage.id] = residence
    return recomputed, offloaded


def _executions(graph: StepGraph, recomputed: Mapping[int, Recompute]) -> list[_Execution]:
    """The runs in order, recomputations included."""
    again: dict[int, dict[int, list[int]]] = {}
    for storage, residence in recomputed.items():
        producer = graph.producer[storage]
        for op_name in residence.before:
            before = graph.op_called.get(op_name)
            if before is None or before.phase == "forward":
                name = graph.storages[storage].name
                raise PlanError(f"{name!r} is to be recomputed before {op_name!r}, no backward op of this step")
            again.setdefault(before.id, {}).setdefault(producer, []).append(storage)
    sequence: list[_Execution] = []
    done = 0
    for op_id in sorted(again):
        sequence += graph.first_runs[done:op_id]
        sequence += [(rerun, True, tuple(written)) for rerun, written in sorted(again[op_id].items())]
        done = op_id
    sequence += graph.first_runs[done:]
    return sequence


def _reject_missing_reads(
    graph: StepGraph, sequence: Sequence[_Execution], recomputed: Mapping[int, Recompute]
) -> None:
    """A recomputed storage must be there again when the backward pass reads it."""
    gone = set(recomputed)
    for run in sequence[graph.n_forward :]:
        op = _op_of(graph, run)
        if not gone.isdisjoint(op.reads):
            name = graph.storages[next(storage for storage in op.reads if storage in gone)].name
            raise PlanError(f"{op.name!r} reads {name!r}, which was given up and is not recomputed before it")
        _, again, writes = run
        if again:
            gone.difference_update(writes)


def _transfers(
    graph: StepGraph, sequence: Sequence[_Execution], offloaded: Mapping[int, Offload]
) -> _ScheduledTransfers:
    """Where each offloaded storage leaves, is released, comes back and is waited for."""
    found = _ScheduledTransfers()
    if not offloaded:
        return found
    first_reader: dict[int, int] = {}  # storage → place in the sequence of its first reader of the backward pass
    group: dict[int, int] = {}  # backward op → place of the first recomputation for it, or its own
    n_forward, begins = graph.n_forward, graph.n_forward
    for place in range(n_forward, len(sequence)):
        for storage in _op_of(graph, sequence[place]).reads:
            if storage in offloaded:
                first_reader.setdefault(storage, place)
        op_id, again, _ = sequence[place]
        if not again:
            group[op_id] = begins
            begins = place + 1
    for storage, residence in offloaded.items():
        name = graph.storages[storage].name
        leaves = graph.op_called.get(residence.free_after)
        returns = graph.op_called.get(residence.fetch_before)
        if leaves is None or leaves.phase != "forward":
            raise PlanError(f"{name!r} is to be freed after {residence.free_after!r}, no forward op of this step")
        if returns is None or returns.phase != "backward":
            raise PlanError(f"{name!r} is to be fetched before {residence.fetch_before!r}, no backward op of this step")
        last = max((r for r in graph.readers[storage] if r < n_forward), default=graph.producer[storage])
        if leaves.id < last:
            raise PlanError(
                f"{name!r} is to be freed after {leaves.name!r}, but {graph.ops[last].name!r} reads it later"
            )
        if storage not in first_reader:
            raise PlanError(f"{name!r} is offloaded although the backward pass does not read it; plan this step again")
        if first_reader[storage] < group[returns.id]:
            reader = _op_of(graph, sequence[first_reader[storage]]).name
            raise PlanError(f"{name!r} is to be fetched before {returns.name!r}, but {reader!r} reads it earlier")
        found.offloads.setdefault(graph.producer[storage], []).append(storage)
        found.releases.setdefault(leaves.id, []).append(storage)
        found.fetches.setdefault(group[returns.id], []).append(storage)
        found.awaits.setdefault(first_reader[storage], []).append(storage)
    for together in found.releases.values():
        together.sort(key=graph.producer.__getitem__)
    for together in found.fetches.values():
        together.sort(key=lambda storage: (first_reader[storage], storage))
    return found


def _with_frees(
    graph: StepGraph, sequence: Sequence[_Execution], offloaded: Mapping[int, Offload], transfers: _ScheduledTransfers
) -> tuple[Run, ...]:
    runs: list[Run] = []
    ops, n_forward, stays = graph.ops, graph.n_forward, graph.never_freed
    read_later: set[int] = set()  # storages whose instance at this point is read further on
    returns = _first_returns(sequence, n_forward)
    moved = (transfers.fetches, transfers.awaits, transfers.offloads, transfers.releases)
    # The residence frees what is offloaded, not its last reader.
    stays_forward = stays | offloaded.keys()
    new_run, add = tuple.__new__, runs.append  # planners call this often: no more calls than needed
    for place in range(len(sequence) - 1, -1, -1):
        op_id, again, writes = sequence[place]
        op = ops[op_id].second if again else ops[op_id]
        reads = op.reads
        stay = stays if place >= n_forward else stays_forward
        frees: list[int] = []
        for s in writes:
            if s not in read_later:
                if s not in stay:
                    frees.append(s)
            else:
                read_later.discard(s)
        takes_over = -1
        for storage in reads:
            if storage not in read_later and storage not in stay:
                frees.append(storage)
                if storage == op.overwrites and op.writes[0] in writes:
                    # Until it comes back it is autograd's saved tensor, and must not be overwritten: the backward pass
                    # may be asked for twice. What was offloaded or recomputed is a tensor only of this pass.
                    held = storage not in offloaded and graph.producer.get(storage, n_forward) < n_forward
                    if place < n_forward or not held or place >= returns.get(storage, len(sequence)):
                        takes_over = storage
        read_later.update(reads)
        dead = tuple(dict.fromkeys(frees)) if len(frees) > 1 else tuple(frees)
        if not offloaded:
            add(new_run(Run, (op_id, again, writes, dead, takes_over, (), (), (), ())))
            continue
        here = [tuple(kind.get(place, ())) for kind in moved]
        add(Run(op_id, again, writes, dead, takes_over, *here))
        read_later.difference_update(here[0])
    runs.reverse()
    return tuple(runs)


def _first_returns(sequence: Sequence[_Execution], n_forward: int) -> Mapping[int, int]:
    """Storage → place in the sequence at which it is first written again."""
    first: dict[int, int] = {}
    for place in range(n_forward, len(sequence)):
        _, again, writes = sequence[place]
        if again:
            for storage in writes:
                first.setdefault(storage, place)
    return first
