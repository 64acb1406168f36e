"""One step out of the steps of several parts: a model that breaks into graphs, with eager code between them.

Parts run their forward passes one after another, and their backward passes likewise. Joined, they are one `StepGraph`:
an op or storage of a part is called "part0.name", what one part hands to another is one storage, and every stretch of
eager code is an op, with what was measured to be in use in addition to the parts' own storages. What crosses a stretch
is kept: the stretch cannot be run again, and the part after it may save what it was given.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from math import ceil
from typing import Literal

from shoal.core.order import reordered
from shoal.core.plan import Plan
from shoal.core.residence import Encode, Offload, Recompute, Residence, exact_residence
from shoal.core.shares import Share, in_share, split_name
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.step import RESIDENT, RETURNS, STRETCH, Op, Phase, StepGraph, Storage, StorageKind

HELD = "held_until_the_loss"
ARGUMENTS = "arguments"
_OWN: frozenset[str] = frozenset({"activation", "activation_gradient"})
Place = tuple[int, int]  # a part, and a storage of its graph
Pass = tuple[int, Literal["forward", "backward"]]


@dataclass(frozen=True)
class Part:
    """One run of one captured part.

    Attributes:
        graph: its own step, with costs.
        results: what the caller of the part gets, among its outputs; the others are new values of buffers, and of
            inputs that it changes in place.
        same: storage → a storage of another part that is the same memory: a parameter that both read, a result of an
            earlier part that this one is given, a gradient that a later part has made.
        fresh: inputs that eager code made during the step.
        handed_on: gradients that no optimizer gets: of inputs that are no leaves, and of parameters of which another
            part has made a gradient that this one is added to.
        held_tangents: those gradients of its results that stay until its backward pass returns.
        held_results: those results that somebody holds for longer than the parts need them.
        gathered: parameters that are there only while a pass runs, as of FSDP2: eager code gathers and frees them, and
            their bytes are among those that it is measured to use.
    """

    graph: StepGraph
    results: Collection[int]
    same: Mapping[int, Place] = field(default_factory=dict)
    fresh: Collection[int] = ()
    handed_on: Collection[int] = ()
    held_tangents: Collection[int] = ()
    held_results: Collection[int] = ()
    gathered: Collection[int] = ()


@dataclass(frozen=True)
class Interval:
    """What was measured while a pass of a part or a stretch of eager code ran.

    Attributes:
        peak_bytes: most device bytes in use meanwhile.
        end_bytes: in use when it ended.
    """

    peak_bytes: int
    end_bytes: int


@dataclass(frozen=True)
class EagerUse:
    """What a stretch of eager code uses in addition to the parts' own storages.

    Attributes:
        held_bytes: from its beginning up to the next stretch, such as what eager ops save.
        workspace_bytes: more than that, at most, while it runs.
    """

    held_bytes: int
    workspace_bytes: int


def label(part: int) -> str:
    """What the names of a part's ops and storages begin with."""
    return f"part{part}."


def is_joined(graph: StepGraph) -> bool:
    """Whether it is a step of several parts, as of `joined_step`."""
    return any(op.name.startswith(label(0)) for op in graph.ops)


def op_names_of(part: int, graph: StepGraph) -> list[str]:
    """The names of the ops of one part of a joined step, as in the part itself."""
    prefix = label(part)
    ops = (op for op in graph.ops if op.name.startswith(prefix) and op.target != RETURNS)
    return [op.name.removeprefix(prefix) for op in ops]


def joined_step(model: str, parts: Sequence[Part], passes: Sequence[Pass]) -> StepGraph:
    """The step of all parts, with stretches of eager code that take nothing yet.

    Args:
        model: its name.
        parts: in the order of their forward passes.
        passes: in the order in which they ran: all forward passes first, none twice. A part may have no backward pass.
    """
    return _Joining(parts, passes).step(model)


def eager_use(
    graph: StepGraph, residences: Mapping[str, Residence], intervals: Sequence[Interval]
) -> tuple[EagerUse, ...]:
    """What the stretches of eager code use, where the step was run under `residences` and took what was measured.

    What is in use in addition to the parts' own storages, such as what eager ops save, does not depend on the
    residences, nor on how the parts compute their results.

    Args:
        graph: of `joined_step`.
        residences: under which it was measured.
        intervals: of the stretch before each pass, and of the pass, in order; one more of a stretch after the last.
    """
    graph = _with_stretches(graph, len(intervals[::2]))
    in_use = {
        moment.op: moment.total_bytes - moment.workspace_bytes
        for moment in simulate(graph, residences).moments
        if moment.phase != "recompute"
    }
    found = []
    for stretch, measured in zip(filter(_is_stretch, graph.ops), intervals[::2], strict=True):
        held_bytes = max(0, measured.end_bytes - in_use[stretch.name])
        found.append(EagerUse(held_bytes, max(0, measured.peak_bytes - in_use[stretch.name] - held_bytes)))
    return tuple(found)


def with_eager_use(graph: StepGraph, used: Sequence[EagerUse]) -> StepGraph:
    """A step of `joined_step` with what its stretches of eager code use."""
    graph = _with_stretches(graph, len(used))
    storages, ops = list(graph.storages), list(graph.ops)
    stretches = [op for op in ops if _is_stretch(op)]
    ends = [*(op.id - 1 for op in stretches[1:]), len(ops) - 1]
    for stretch, end, one in zip(stretches, ends, used, strict=True):
        kind: StorageKind = "activation" if stretch.phase == "forward" else "activation_gradient"
        ops[stretch.id] = replace(ops[stretch.id], workspace_bytes=one.workspace_bytes)
        if one.held_bytes:
            _hold(ops, storages, f"{stretch.name}_holds", one.held_bytes, kind, stretch.id, end)
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


def _with_stretches(graph: StepGraph, count: int) -> StepGraph:
    """The step with one more stretch of eager code after its last pass, if it is to have as many."""
    n_stretches = sum(map(_is_stretch, graph.ops))
    if count <= n_stretches:
        return graph
    behind = Op(len(graph.ops), f"{STRETCH}{n_stretches}", STRETCH, "backward", "", (), (), recomputable=False)
    return replace(graph, ops=(*graph.ops, behind))


def grown(measured: StepGraph, largest: StepGraph) -> StepGraph:
    """A step that was measured in a small call, as it may be in the largest one that it is planned for.

    What eager code uses is taken to grow as what it is given and hands on does. Where it grows faster, as attention
    does, that shows when a larger call is metered.

    Args:
        measured: of `with_eager_use`, with the sizes of the small call.
        largest: of `joined_step`, with the largest sizes.
    """
    before, after = {s.name: s.nbytes for s in measured.storages}, {s.name: s.nbytes for s in largest.storages}
    handed = [s.name for s in largest.storages if s.kind == "crossing" and before[s.name]]
    growth = max((Fraction(after[name], before[name]) for name in handed), default=Fraction(1))
    storages = (replace(s, nbytes=after.get(s.name, ceil(growth * s.nbytes))) for s in measured.storages)
    ops = (
        replace(op, workspace_bytes=ceil(growth * op.workspace_bytes)) if _is_stretch(op) else op for op in measured.ops
    )
    return replace(measured, storages=tuple(storages), ops=tuple(ops))


def with_arguments(graph: StepGraph, nbytes: int) -> StepGraph:
    """The step with what the model is called with and no part is given: it is alive throughout the step."""
    if not nbytes:
        return graph
    own = Storage(len(graph.storages), ARGUMENTS, nbytes, "input", "", (nbytes,), "uint8", (ARGUMENTS,))
    return replace(graph, storages=(*graph.storages, own))


def with_held(graph: StepGraph, held_bytes: int) -> StepGraph:
    """The step with what the training loop holds of the one before, until the loss is known."""
    if not held_bytes:
        return graph
    storages, ops = list(graph.storages), list(graph.ops)
    loss = next(op.id for op in ops if op.phase == "loss")
    _hold(ops, storages, HELD, held_bytes, "activation", 0, loss)
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


def crossing(graph: StepGraph) -> tuple[Storage, ...]:
    """The storages that parts and eager code hand to one another in the forward pass."""
    return tuple(s for s in graph.storages if s.kind == "crossing")


def residences_of(
    part: int, graph: StepGraph, residences: Mapping[str, Residence], *, apart: bool = False
) -> dict[str, Residence]:
    """The share of one part: residences by its own names, and those for which it starts or ends transfers of others.

    What is recomputed before an op of another part that runs earlier, the part itself recomputes before its own first
    backward op. Transfers begin and end in the pass of the part that their residence names, or at the end or beginning
    of one instead of in a stretch of eager code.

    Args:
        part: its number.
        graph: the joined step.
        residences: of the joined step.
        apart: whether the part starts and ends all transfers of its storages itself: from its own first backward op on,
            and by its own last forward op.
    """
    prefix = label(part)
    ops = [op for op in graph.ops if op.name.startswith(prefix) and op.target != RETURNS]
    forward = [op.name for op in ops if op.phase == "forward"]
    own = [op.name for op in ops if op.phase == "backward"]
    first = own[0] if own else ""

    def moved(free_after: str, fetch_before: str) -> Offload:
        if (apart or free_after.startswith(prefix)) and free_after not in forward:
            free_after = forward[-1]
        if (apart or fetch_before.startswith(prefix)) and fetch_before not in own:
            fetch_before = first
        return Offload(_named(part, free_after), _named(part, fetch_before))

    def of_the_part(residence: Residence) -> Residence:
        if isinstance(residence, Recompute):
            before = tuple(dict.fromkeys(op if op in own else first for op in residence.before))
            return Recompute(tuple(op.removeprefix(prefix) for op in before if op))
        if isinstance(residence, Offload):
            return moved(*_in_passes(graph, residence))
        if isinstance(residence, Encode):
            exact = exact_residence(of_the_part(residence.exact))
            return replace(residence, payload=residence.payload.removeprefix(prefix), exact=exact)
        return residence

    share = {n.removeprefix(prefix): of_the_part(one) for n, one in residences.items() if n.startswith(prefix)}
    exact = {name: exact_residence(one) for name, one in residences.items() if not (apart or name.startswith(prefix))}
    others = {name: _in_passes(graph, one) for name, one in exact.items() if isinstance(one, Offload)}
    for name in sorted(others, key=partial(_first_backward_reader, graph)):
        if any(place.startswith(prefix) for place in others[name]):
            share[_named(part, name)] = Offload(*(_named(part, place) for place in others[name]))
    return share


_PART = re.compile(r"part(\d+)\.")


def _named(part: int, name: str) -> str:
    """What an op or storage of any part is called in the share of one."""
    found = _PART.match(name)
    assert found is not None
    return in_share(int(found[1]) - part, name[found.end() :])


def _in_passes(graph: StepGraph, offload: Offload) -> tuple[str, str]:
    """The ops at which a storage leaves and returns, none of them eager: it leaves no later than asked, and returns no
    earlier, so that no more memory is in use."""
    leaves, returns = graph.op_called[offload.free_after], graph.op_called[offload.fetch_before]
    while _is_stretch(leaves):
        leaves = graph.ops[leaves.id - 1]
    while _is_stretch(returns):
        returns = graph.ops[returns.id + 1]
    return leaves.name, returns.name


def _first_backward_reader(graph: StepGraph, name: str) -> int:
    readers = graph.readers[graph.storage_called[name].id]
    return next((reader for reader in readers if graph.ops[reader].phase == "backward"), len(graph.ops))


def joined_residences(shares: Iterable[Mapping[str, Residence]]) -> dict[str, Residence]:
    """The inverse: the shares of every part, in order, as residences of the joined step."""

    def joined(part: int, residence: Residence) -> Residence:
        def named(op: str) -> str:
            distance, own = split_name(op)
            return label(part + distance) + own

        if isinstance(residence, Recompute):
            return Recompute(tuple(map(named, residence.before)))
        if isinstance(residence, Offload):
            return Offload(named(residence.free_after), named(residence.fetch_before))
        if isinstance(residence, Encode):
            exact = exact_residence(joined(part, residence.exact))
            return replace(residence, payload=named(residence.payload), exact=exact)
        return residence

    own = ((part, name, one) for part, share in enumerate(shares) for name, one in share.items())
    return {label(part) + name: joined(part, one) for part, name, one in own if not split_name(name)[0]}


def share_of(part: int, plan: Plan, *, apart: bool = False) -> Share:
    """The share of one part in a plan of the joined step; `apart` as of `residences_of`."""
    order = op_names_of(part, plan.graph)
    is_moved = bool(plan.captured_order) and order != op_names_of(part, plan.captured_graph)
    residences = residences_of(part, plan.graph, plan.residences, apart=apart)
    return Share(residences, tuple(order) if is_moved else ())


def in_order_of_shares(graph: StepGraph, shares: Iterable[Share]) -> StepGraph:
    """The joined step with the ops of each part in the order of its share."""
    place = {label(part) + name: n for part, share in enumerate(shares) for n, name in enumerate(share.order)}
    if not place:
        return graph
    passes = groupby(graph.ops, key=lambda op: op.is_outside)  # and what runs outside between two of them
    return reordered(graph, [op.name for _, ops in passes for op in sorted(ops, key=lambda op: place.get(op.name, 0))])


def _is_stretch(op: Op) -> bool:
    return op.target == STRETCH or op.phase == "loss"


def _hold(
    ops: list[Op], storages: list[Storage], name: str, nbytes: int, kind: StorageKind, first: int, last: int
) -> None:
    """Let the op `first` write a storage that `last` is the last to read."""
    held = Storage(len(storages), name, nbytes, kind, "", (nbytes,), "uint8", (name,))
    storages.append(held)
    ops[first] = replace(ops[first], writes=(*ops[first].writes, held.id))
    ops[last] = replace(ops[last], reads=(*ops[last].reads, held.id)) if last != first else ops[last]


class _Joining:
    def __init__(self, parts: Sequence[Part], passes: Sequence[Pass]) -> None:
        self._parts = parts
        self._passes = passes
        self._storages: list[Storage] = []
        self._of: dict[Place, int] = {}  # in the joined step
        self._ops: list[Op] = []
        self._written: set[int] = set()

    def step(self, model: str) -> StepGraph:
        for number, part in enumerate(self._parts):
            for storage in part.graph.storages:
                if storage.id not in part.same:
                    self._add(number, storage)
        for number, part in enumerate(self._parts):
            for storage in part.graph.storages:
                self._of[number, storage.id] = self._of[self._origin((number, storage.id))]
        first_backward = next((i for i, (_, phase) in enumerate(self._passes) if phase == "backward"), None)
        for place, (number, phase) in enumerate(self._passes):
            self._stretch(place, "loss" if place == first_backward else phase, number)
            self._run(number, phase)
        if first_backward is None:
            self._add_op("loss", "loss", "loss", (), ())
        link = next((part.graph.link for part in self._parts), None)
        return StepGraph(model, tuple(self._ops), tuple(self._storages), link=link)

    def _origin(self, place: Place) -> Place:
        seen = {place}
        while (nearer := self._parts[place[0]].same.get(place[1])) is not None and nearer not in seen:
            seen.add(nearer)
            place = nearer
        return place

    def _given(self, part: Part) -> list[int]:
        """What a part is given by others."""
        inputs = (s.id for s in part.graph.storages if s.kind == "input")
        return [s for s in inputs if s in part.same or s in part.fresh]

    def _add(self, number: int, storage: Storage) -> None:
        part = self._parts[number]
        kind: StorageKind = storage.kind
        is_handed_on = kind == "output" and storage.id not in part.held_results
        if storage.id in (part.results if is_handed_on else part.fresh):
            kind = "crossing"
        elif is_handed_on:
            # What is written back to an input that the graph changes in place. Its graph has to return it, so a
            # backward pass that reads it finds it kept; of a buffer nothing does.
            kind = "crossing" if _is_saved(part.graph, storage.id) else "activation"
        elif kind == "tangent" or (kind == "gradient" and storage.id in part.handed_on):
            kind = "activation_gradient"
        place = self._of[number, storage.id] = len(self._storages)
        nbytes = 0 if storage.id in part.gathered else storage.nbytes
        name, tensors = label(number) + storage.name, tuple(label(number) + t for t in storage.tensors)
        self._storages.append(replace(storage, id=place, name=name, kind=kind, tensors=tensors, nbytes=nbytes))

    def _stretch(self, place: int, phase: Phase, number: int) -> None:
        """The eager code before a pass makes what the pass is given and nothing before has written."""
        given = "tangent" if phase != "forward" else "input"
        places = [self._of[number, s.id] for s in self._parts[number].graph.storages if s.kind == given]
        writes = [s for s in dict.fromkeys(places) if s not in self._written and self._storages[s].kind not in RESIDENT]
        name = "loss" if phase == "loss" else f"{STRETCH}{place}"
        self._add_op(name, "loss" if phase == "loss" else STRETCH, phase, (), writes)

    def _run(self, number: int, phase: Phase) -> None:
        part = self._parts[number]
        own = {s.id: s for s in part.graph.storages}
        of = {s: self._of[number, s] for s in own}
        for op in part.graph.ops:
            if op.phase != phase:
                continue
            reads, writes = _distinct(of[s] for s in op.reads), _distinct(of[s] for s in op.writes)
            self._written.update(writes)
            again = op.again and replace(
                op.again,
                reads=_distinct(of[s] for s in op.again.reads),
                overwrites=_taken_over(op.again.overwrites, own, of),
            )
            overwrites = _taken_over(op.overwrites, own, of)
            self._ops.append(
                replace(
                    op,
                    id=len(self._ops),
                    name=label(number) + op.name,
                    reads=reads,
                    writes=writes,
                    overwrites=overwrites,
                    again=again,
                )
            )
        self._add_op(f"{label(number)}{phase}.{RETURNS}", RETURNS, phase, self._held(number, phase), ())

    def _held(self, number: int, phase: Phase) -> list[int]:
        """What is alive until the pass returns: its arguments, and its results."""
        part = self._parts[number]
        storages = part.graph.storages
        if phase == "forward":
            held = [*(s.id for s in storages if s.kind == "output"), *part.results, *self._given(part)]
        else:
            read = {s for op in part.graph.ops if op.phase == "backward" for s in op.reads}
            held = [s for s in self._given(part) if s in read]
            held += part.held_tangents
            held += [s.id for s in storages if s.id in part.handed_on]
        places = dict.fromkeys(self._of[number, s] for s in held)
        return [s for s in places if s in self._written and self._storages[s].kind not in RESIDENT]

    def _add_op(self, name: str, target: str, phase: Phase, reads: Iterable[int], writes: Iterable[int]) -> None:
        op = Op(len(self._ops), name, target, phase, "", tuple(reads), tuple(writes), recomputable=False)
        self._written.update(op.writes)
        self._ops.append(op)


def _is_saved(graph: StepGraph, storage: int) -> bool:
    return any(storage in op.reads for op in graph.ops if op.phase == "backward")


def _distinct(storages: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(storages))


def _taken_over(storage: int, own: Mapping[int, Storage], of: Mapping[int, int]) -> int:
    """What a part has from others, or gives to them, is also held by them."""
    return of[storage] if storage in own and own[storage].kind in _OWN else -1


def describe_breaks(graph: StepGraph, breaks: Sequence[str]) -> list[str]:
    """Where a model breaks into several graphs and what that costs, in lines; none where it does not.

    Args:
        graph: the joined step.
        breaks: the places.
    """
    if not breaks:
        return []
    stretches = [op for op in graph.ops if op.target == STRETCH]
    graphs = sum(op.phase == "forward" for op in stretches)
    crossing_bytes = sum(s.nbytes for s in crossing(graph))
    used_bytes = max((op.workspace_bytes for op in stretches), default=0)
    return [
        f"graphs          {graphs}, with eager code between them; {format_bytes(crossing_bytes)} cross it and are "
        f"kept; it uses up to {format_bytes(used_bytes)}; broken at",
        *(f"  {place}" for place in breaks),
    ]
