"""A step with some storages encoded, put together from the step with none and the step with all of them encoded.

To trace the step with another set takes as long as to capture it again. But what encoding one storage changes does not
depend on which others are: ops that encode and decode it come in, masks made of it go, and ops of the backward pass
that read it read its payload, or what that decodes to. So each op is as in one of the two steps, by whether the storage
that it belongs to is encoded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.capture.encode_activations import DECODE, ENCODE
from shoal.core.step import Op, StepGraph, Storage


@dataclass(frozen=True)
class PartlyEncoded:
    """The steps between one with nothing encoded and one with all of it; made by `of`.

    Attributes:
        exact, everything: the two steps.
        ops, storages: names in either step, in their order → the storage that they belong to; "" for none.
    """

    exact: _Side
    everything: _Side
    ops: Mapping[str, str]
    storages: Mapping[str, str]

    @staticmethod
    def of(exact: StepGraph, everything: StepGraph) -> PartlyEncoded | None:
        """What makes the steps between two: a step with nothing encoded, and the same, at the same costs, with all.

        Returns:
            None where an op or a storage differs for another reason than that one storage is encoded.
        """
        one, other = _Side(exact), _Side(everything)
        belongs = _belongings(one, other)
        encodings = [op for op in everything.ops if op.target == ENCODE]
        order = _merged(one.names, other.names, {other.names[op.writes[0]] for op in encodings})
        storages = {name: belongs.get(name, "") for name in order}
        places = {name: place for place, name in enumerate(order)}
        if any(one.storage(name, 0) != other.storage(name, 0) for name in order if one.has(name) and other.has(name)):
            return None
        ops: dict[str, str] = {}
        for name in _merged(list(exact.op_called), list(everything.op_called), {op.name for op in encodings}):
            changed = one.touched(name) ^ other.touched(name)
            owners = {storages[storage] for storage in changed} or {""}
            if len(owners) > 1:
                return None
            ops[name] = owners.pop()
            if not ops[name] and one.op(name, 0, places) != other.op(name, 0, places):
                return None
        return PartlyEncoded(one, other, ops, storages)

    def step(self, chosen: Collection[str]) -> StepGraph:
        """The step with these storages encoded, of those that `everything` encodes."""

        def side(owner: str) -> _Side:
            return self.everything if owner in chosen else self.exact

        names = [name for name, owner in self.storages.items() if side(owner).has(name)]
        places = {name: place for place, name in enumerate(names)}
        storages = (side(self.storages[name]).storage(name, place) for name, place in places.items())
        there = ((name, side(owner)) for name, owner in self.ops.items())
        ops = (its.op(name, place, places) for place, (name, its) in enumerate((n, s) for n, s in there if s.runs(n)))
        return replace(self.exact.graph, ops=tuple(ops), storages=tuple(storages))


@dataclass(frozen=True)
class _Side:
    """One of two steps, by names, which they share where places differ."""

    graph: StepGraph

    @cached_property
    def names(self) -> list[str]:
        """Of the storages, by their places."""
        return [storage.name for storage in self.graph.storages]

    def has(self, storage: str) -> bool:
        return storage in self.graph.storage_called

    def storage(self, name: str, place: int) -> Storage:
        return replace(self.graph.storage_called[name], id=place)

    def runs(self, op: str) -> bool:
        return op in self.graph.op_called

    def touched(self, op: str) -> set[str]:
        """What an op reads and writes; nothing where it is not there."""
        return {self.names[s] for s in (*it.reads, *it.writes)} if (it := self.graph.op_called.get(op)) else set()

    def op(self, name: str, place: int, places: Mapping[str, int]) -> Op:
        """An op where storages have these places."""
        it = self.graph.op_called[name]

        def at(storages: Sequence[int]) -> tuple[int, ...]:
            return tuple(places[self.names[s]] for s in storages)

        def over(storage: int) -> int:
            return storage if storage < 0 else places[self.names[storage]]

        again = it.again and replace(it.again, reads=at(it.again.reads), overwrites=over(it.again.overwrites))
        moved = {"reads": at(it.reads), "writes": at(it.writes), "overwrites": over(it.overwrites)}
        return replace(it, id=place, again=again, **moved)  # type: ignore[arg-type]


def _belongings(exact: _Side, everything: _Side) -> dict[str, str]:
    """What is encoded, its payload, what that decodes to, and the masks made of it → what is encoded."""
    found: dict[str, str] = {}
    for op in everything.graph.ops:
        if op.target == ENCODE:
            storage = everything.names[op.reads[0]]
            found |= dict.fromkeys((storage, everything.names[op.writes[0]]), storage)
    for op in everything.graph.ops:
        if op.target == DECODE:
            found[everything.names[op.writes[0]]] = found[everything.names[op.reads[0]]]
    for op in exact.graph.ops:
        if not everything.runs(op.name):
            found |= {exact.names[s]: exact.names[op.reads[0]] for s in op.writes}
    return found


def _merged(exact: Sequence[str], everything: Sequence[str], encodings: Collection[str]) -> list[str]:
    """The names of both in one order: what decodes stands right before what reads it, what encodes comes first."""
    shared = set(exact) & set(everything)
    found: list[str] = []
    decodings: list[str] = []
    left = iter(exact)
    for name in everything:
        if name in encodings:
            found.append(name)
        elif name not in shared:
            decodings.append(name)
        else:
            for one in left:
                if one == name:
                    break
                found.append(one)
            found += [*decodings, name]
            decodings = []
    return [*found, *left, *decodings]
