"""The independent check of a plan: replay the step's runs one by one.

It shares no code with `schedule`, `simulate` or a planner, and is plain on purpose. It assumes nothing about
how the sequence was made: it holds it against the step and the residences only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from shoal.core.residence import Encode, Offload, Recompute, Residence
from shoal.core.schedule import Run
from shoal.core.step import StepGraph
from shoal.errors import PlanError

HELD_ALL_STEP = {"parameter", "buffer", "input", "constant"}
NEVER_FREED = HELD_ALL_STEP | {"output", "tangent", "gradient"}


def check_runs(
    graph: StepGraph, residences: Mapping[str, Residence], runs: Sequence[Run], budget_bytes: int = 0
) -> int:
    """Hold a sequence of runs against the step and the residences it claims to carry out.

    Args:
        graph: the step.
        residences: by storage name; an absent storage is kept.
        runs: what is about to be executed, in order.
        budget_bytes: the highest number of bytes allowed at any position; 0 for no limit.

    Returns:
        The most bytes in use at once.

    Raises:
        PlanError: an op is missing, comes twice or out of order; an op reads or frees a storage that is not there; a
            storage dies that is read later, or outlives its last reader; a block is taken over wrongly; a
            recomputation is missing or uncalled for; an offloaded storage leaves, is released, is fetched or is waited
            for at another place than its residence says, or is read while it is away; the bytes in use pass the budget.

    ```python
    check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences), plan.budget_bytes)
    # 34244
    ```
    """
    storages = graph.storages
    residences = {name: r.exact if isinstance(r, Encode) else r for name, r in residences.items()}
    _ops_come_in_order(graph, runs)
    _recomputations_are_those_asked_for(graph, residences, runs)

    uses = _CheckedUses(graph, runs)
    transfers = _CheckedTransfers(graph, residences, runs, uses)
    alive = {s.id for s in storages if s.kind in HELD_ALL_STEP}
    alive_bytes = highest = graph.static_bytes + _bytes_of(graph, alive)
    for position, run in enumerate(runs):
        op = graph.ops[run.op].second if run.again else graph.ops[run.op]
        where = f"run {position} ({op.name}{', again' if run.again else ''})"

        back = transfers.begin(position, where) - alive
        alive.update(back)
        alive_bytes += _bytes_of(graph, back)
        for storage in op.reads:
            if storage not in alive or storage in transfers.arriving:
                raise PlanError(f"{where} reads {storages[storage].name!r}, which is not there")
        for storage in run.writes:
            if storage not in op.writes:
                raise PlanError(f"{where} claims to write {storages[storage].name!r}, which the op does not write")
            if storage in alive:
                raise PlanError(f"{where} writes {storages[storage].name!r}, which is still there")
        alive.update(run.writes)
        alive_bytes += _bytes_of(graph, set(run.writes))

        if len(set(run.frees)) != len(run.frees):
            raise PlanError(f"{where} frees a storage twice")
        for storage in run.frees:
            if storage not in alive:
                raise PlanError(f"{where} frees {storages[storage].name!r}, which is not there")
            if storages[storage].kind in NEVER_FREED:
                raise PlanError(f"{where} frees {storages[storage].name!r}, a {storages[storage].kind}: it must stay")
            if uses.is_read_after(position, storage):
                raise PlanError(f"{where} frees {storages[storage].name!r}, which is read later")
            if storage in transfers.leaving or storage in run.offloads:
                raise PlanError(f"{where} frees {storages[storage].name!r}, which is still being copied to the host")

        taken = 0
        if run.takes_over >= 0:
            victim = storages[run.takes_over]
            if run.takes_over != op.overwrites or run.takes_over not in op.reads:
                raise PlanError(f"{where} takes over {victim.name!r}, which the op cannot overwrite")
            if run.takes_over not in run.frees:
                raise PlanError(f"{where} takes over {victim.name!r}, which does not die there")
            if op.writes[0] not in run.writes or storages[op.writes[0]].nbytes != victim.nbytes:
                raise PlanError(f"{where} takes over {victim.name!r} for a storage of another size")
            taken = victim.nbytes
        discarded = _bytes_of(graph, set(op.writes) - set(run.writes))
        in_use = alive_bytes - taken + discarded + op.workspace_bytes
        if budget_bytes and in_use > budget_bytes:
            raise PlanError(f"{where} has {in_use} bytes in use, over the budget of {budget_bytes}")
        highest = max(highest, in_use)

        gone = alive & {*run.frees, *transfers.end(position, where)}
        alive.difference_update(gone)
        alive_bytes -= _bytes_of(graph, gone)
        for storage in set(op.reads) | set(run.writes):  # the only ones whose last use can be this run
            there = storage in alive and storage not in transfers.leaving
            mortal = there and storages[storage].kind not in NEVER_FREED
            if mortal and not uses.is_read_after(position, storage):
                raise PlanError(f"{where} leaves {storages[storage].name!r} after, which is not read again")
    transfers.all_came_back()
    return highest


class _CheckedTransfers:
    """Where each offloaded storage is: on the device, leaving, on the host, or arriving."""

    def __init__(
        self, graph: StepGraph, residences: Mapping[str, Residence], runs: Sequence[Run], uses: _CheckedUses
    ) -> None:
        self._graph = graph
        self._runs = runs
        self._uses = uses
        self._asked = {s.id: r for s in graph.storages if isinstance(r := residences.get(s.name), Offload)}
        self.leaving: set[int] = set()
        self._on_host: set[int] = set()
        self.arriving: set[int] = set()
        self._back: set[int] = set()

    def begin(self, position: int, where: str) -> set[int]:
        """What the device has again before the run reads anything."""
        run = self._runs[position]
        if any(len(set(moved)) != len(moved) for moved in (run.fetches, run.awaits, run.offloads, run.releases)):
            raise PlanError(f"{where} moves a storage twice")
        comes_first = position == 0 or not self._runs[position - 1].again
        for storage in run.fetches:
            if storage not in self._on_host:
                raise PlanError(f"{where} fetches {self._name(storage)}, which is not only on the host")
            served = next(later.op for later in self._runs[position:] if not later.again)
            if not comes_first or self._asked[storage].fetch_before != self._graph.ops[served].name:
                raise PlanError(f"{where} fetches {self._name(storage)} at another place than its residence says")
        self._on_host.difference_update(run.fetches)
        self.arriving.update(run.fetches)
        op = self._graph.ops[run.op].second if run.again else self._graph.ops[run.op]
        for storage in run.awaits:
            if storage not in self.arriving or storage not in op.reads:
                raise PlanError(f"{where} waits for {self._name(storage)}, which does not arrive for it")
        self.arriving.difference_update(run.awaits)
        self._back.update(run.awaits)
        return set(run.fetches)

    def end(self, position: int, where: str) -> set[int]:
        """What the device no longer has after the run."""
        run = self._runs[position]
        for storage in run.offloads:
            if storage not in self._asked or storage not in run.writes or run.again:
                raise PlanError(f"{where} sends {self._name(storage)} to the host, which it should not")
        for storage in (s for s in run.writes if s in self._asked and not run.again):
            if storage not in run.offloads:
                raise PlanError(f"{where} does not send {self._name(storage)} to the host")
        self.leaving.update(run.offloads)
        for storage in run.releases:
            if storage not in self.leaving:
                raise PlanError(f"{where} releases {self._name(storage)}, which is not leaving")
            if self._graph.ops[run.op].name != self._asked[storage].free_after or run.again:
                raise PlanError(f"{where} releases {self._name(storage)} at another place than its residence says")
            if self._uses.is_read_after(position, storage):
                raise PlanError(f"{where} releases {self._name(storage)}, which is read before it is fetched")
        self.leaving.difference_update(run.releases)
        self._on_host.update(run.releases)
        return set(run.releases)

    def all_came_back(self) -> None:
        for storage in self._asked:
            if storage not in self._back:
                raise PlanError(f"{self._name(storage)} is to be offloaded, but is not waited for before it is read")

    def _name(self, storage: int) -> str:
        return repr(self._graph.storages[storage].name)


def _ops_come_in_order(graph: StepGraph, runs: Sequence[Run]) -> None:
    once = [run.op for run in runs if not run.again]
    if once != list(range(len(graph.ops))):
        wrong = next(
            (i for i, (a, b) in enumerate(zip(once, range(len(graph.ops)), strict=False)) if a != b), len(once)
        )
        raise PlanError(f"every op must run once and in order; the sequence of ops breaks at the {wrong}th")
    for run in runs:
        if not run.again and run.writes != graph.ops[run.op].writes:
            raise PlanError(f"the first run of {graph.ops[run.op].name} must write all that the op writes")


def _recomputations_are_those_asked_for(
    graph: StepGraph, residences: Mapping[str, Residence], runs: Sequence[Run]
) -> None:
    asked = {
        (before, name)
        for name, residence in residences.items()
        if isinstance(residence, Recompute)
        for before in residence.before
    }
    done: list[tuple[str, str]] = []
    waiting: list[str] = []
    for run in runs:
        op = graph.ops[run.op]
        if run.again:
            if op.phase != "forward" or not op.recomputable:
                raise PlanError(f"{op.name} ({op.phase}) must not run twice")
            waiting += [graph.storages[s].name for s in run.writes]
        else:
            done += [(op.name, name) for name in waiting]
            waiting = []
    if waiting or len(done) != len(set(done)) or set(done) != asked:
        odd = sorted(asked.symmetric_difference(done)) or sorted({d for d in done if done.count(d) > 1})
        raise PlanError(
            f"the recomputations are not those the residences ask for; they differ at {odd[:3] or waiting[:3]}"
        )


class _CheckedUses:
    """Where each storage is read, and where an instance of it begins."""

    def __init__(self, graph: StepGraph, runs: Sequence[Run]) -> None:
        self._positions: dict[int, list[int]] = {}
        self._reads: dict[int, list[bool]] = {}
        for position, run in enumerate(runs):
            op = graph.ops[run.op].second if run.again else graph.ops[run.op]
            for storages, reads in ((run.fetches, False), (op.reads, True), (run.writes, False)):
                for storage in storages:
                    self._positions.setdefault(storage, []).append(position)
                    self._reads.setdefault(storage, []).append(reads)

    def is_read_after(self, position: int, storage: int) -> bool:
        """Whether a later run reads this instance, that is, before it is written or fetched again."""
        place = bisect_right(self._positions.get(storage, []), position)
        return place < len(self._reads.get(storage, [])) and self._reads[storage][place]


def _bytes_of(graph: StepGraph, storages: set[int]) -> int:
    return sum(graph.storages[s].nbytes for s in storages)
