"""The calls of a model whose backward passes are yet to come, and what the caller still holds of the last one.

Nothing is kept alive here: a call is under way as long as the autograd node that is to run its backward pass exists.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import TensorWeakRef

from shoal.lowlevel.torch_state import autograd_node
from shoal.memory.storage_bytes import WeakStorage

_MOST_NODES = 256  # of eager code between two calls that are looked through


@dataclass(eq=False)
class Call:
    """One forward pass.

    Attributes:
        witness: a storage that autograd holds until the backward pass is over; the largest one it saved, or an output
            where it saved nothing of this call's own.
        of_output: whether that is an output, which the caller may hold for longer.
        outputs: what was handed to the caller, by place among the forward graph's outputs.
        tensors: the same as tensors, with the place of each: the storage of one that the backward pass reads is alive
            whoever holds it.
        number: of the model's call that it is a part of.
        step: which step it is of, as a number.
        node: what runs its backward pass; None before it is known.
    """

    witness: WeakStorage | None
    of_output: bool
    outputs: Mapping[int, WeakStorage]
    tensors: Sequence[tuple[int, TensorWeakRef]]
    number: int
    step: int = 0
    node: weakref.ref[Any] | None = None

    @property
    def may_go_back(self) -> bool:
        """Whether its backward pass can still come, as far as is known."""
        if self.node is not None:
            return self.node() is not None
        return self.witness is not None and self.witness.is_alive

    def held_by_caller(self) -> set[int]:
        """Places of the results that the caller holds, as one of the loop's names does, or a view of them."""
        return {place for place, tensor in self.tensors if tensor() is not None}


class _Own(NamedTuple):
    """What a step's forward graph returns that is none of its arguments' storages.

    Attributes:
        results: places of the results that are watched.
        saved: place of the largest storage that is saved; None where nothing is.
    """

    results: tuple[int, ...]
    saved: int | None


class Calls:
    """Every call of one model that is not over. A call of a model that is several graphs has several forward passes.

    Attributes:
        number: of the model's call that is made.
        went_back: whether there was a moment, after a backward pass, at which none was to come.
        overlapped: most calls that had begun by the time the first of them went back, the last one included.
        again: whether a backward pass has run a second time, as with `retain_graph=True`.
    """

    def __init__(self) -> None:
        self.number = 0
        self.went_back = False
        self.overlapped = 1
        self.again = False
        self._announced = False
        self._under_way: list[Call] = []
        self._last: Call | None = None
        # A graph returns the same of its arguments in every call: looked up in the first, among hundreds of tensors.
        self._own: WeakKeyDictionary[object, _Own] = WeakKeyDictionary()
        self._found_at: dict[int, int] = {}  # where the witness was last among the backward pass's arguments

    def begins(self) -> None:
        """The model is called. By default, every forward pass is taken for a call."""
        self.number += 1
        self._announced = True

    def keys_needed(self, step: object, arguments: Iterable[object]) -> Set[int]:
        """The storages of the tensors among a forward pass's arguments, for `started`; none where it knows the step."""
        return set() if step in self._own else keys_of(arguments)

    def started(
        self, arguments: Set[int], outputs: Sequence[object], n_outputs: int, watched: Iterable[int], step: object
    ) -> None:
        """A forward pass has ended.

        Args:
            arguments: what `keys_needed` returned before it.
            outputs: what its graph returned: results first, then what is saved for the backward pass.
            n_outputs: how many of them are results.
            watched: places of the results whose fate is of interest.
            step: which step it is of: what one saved may be an argument of another one's backward pass.
        """
        if not self._announced:
            self.number += 1
        own = self._own.get(step)
        if own is None:
            own = self._own[step] = _own(arguments, outputs, n_outputs, watched)
        results = {place: _held(outputs[place]) for place in own.results}
        saved = None if own.saved is None else _held(outputs[own.saved])
        witness = saved or max(results.values(), key=lambda one: one.nbytes, default=None)
        given = ((place, outputs[place]) for place in own.results)
        tensors = [(place, TensorWeakRef(value)) for place, value in given if isinstance(value, torch.Tensor)]
        self._last = Call(witness, saved is None, results, tensors, self.number, id(step))
        self._under_way.append(self._last)

    def returned(self, results: Iterable[object]) -> None:
        """The caller gets these results of the last forward pass: AOTAutograd makes new tensors of those that are views
        of what the graph returns."""
        if self._last is None:
            return
        places = {held.key: place for place, held in self._last.outputs.items()}
        tensors = [result for result in results if isinstance(result, torch.Tensor) and _key(result) in places]
        self._last.tensors = [(places[key], TensorWeakRef(tensor)) for tensor in tensors if (key := _key(tensor))]

    def goes_back_by(self, node: Any) -> None:
        """The last forward pass is known by the autograd node that runs its backward pass."""
        if self._last is not None:
            self._last.node = weakref.ref(node)

    def goes_back(self, arguments: Sequence[object], step: object) -> Call | None:
        """The call of a step whose backward pass begins, found by the autograd node that runs, else by the storages
        that it is given; it is under way no longer. None where it is not known."""
        own, node = [call for call in self._under_way if call.step == id(step)], autograd_node()
        known = [call for call in own if call.node is not None and call.node() is node]
        if not known:
            if node is not None and node.name().startswith("CompiledFunction"):
                own = [call for call in own if call.node is None]  # it goes back a second time; else a gate runs it
                self.again |= not own
            known = [call for call in own if call.witness is not None and self._is_among(call.witness, arguments, step)]
        known = known or [call for call in own if call.of_output or call.witness is None]
        if not known:
            return None
        this = known[-1]
        self._under_way.remove(this)
        self.went_back |= not any(call.may_go_back for call in self._under_way)
        self.overlapped = max(self.overlapped, self.number - this.number + 1)
        return this

    def _is_among(self, held: WeakStorage, arguments: Sequence[object], step: object) -> bool:
        place = self._found_at.get(id(step), 0)
        if place < len(arguments) and _key(arguments[place]) == held.key:
            return True
        found = next((place for place, one in enumerate(arguments) if _key(one) == held.key), None)
        if found is not None:
            self._found_at[id(step)] = found
        return found is not None

    def under_way(self, *, after: int = 0) -> int:
        """How many calls are, of those with a higher number."""
        self._under_way = [call for call in self._under_way if call.may_go_back]
        return len({call.number for call in self._under_way if call.number > after})

    @property
    def last(self) -> Call | None:
        """The one that has begun last."""
        return self._last

    @property
    def any_started(self) -> bool:
        """Whether there was a call at all."""
        return self._last is not None

    def lead_to(self, arguments: Iterable[object]) -> bool:
        """Whether a tensor among arguments is a result of a call that is under way, or was computed from one."""
        if not self.under_way():
            return False
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        results = {held.key for call in self._under_way for held in call.outputs.values() if held.is_alive}
        nodes = {node for call in self._under_way if call.node is not None and (node := call.node()) is not None}
        return any(_key(tensor) in results or _comes_from(nodes, tensor) for tensor in tensors)

    def held_of_the_last(self) -> list[WeakStorage]:
        """What the caller still holds of the last call's results: a loop's names, until they get new values. Views of
        one storage count once.

        Nothing while that call is under way: then its results wait with what it saved.
        """
        self.under_way()
        if self._last is None or self._last in self._under_way:
            return []
        return list({held.key: held for held in self._last.outputs.values() if held.is_alive}.values())


def keys_of(arguments: Iterable[object]) -> set[int]:
    """The storages of the tensors among arguments."""
    return {a.untyped_storage()._cdata for a in arguments if isinstance(a, torch.Tensor)}


def _comes_from(nodes: Set[Any], tensor: torch.Tensor) -> bool:
    """Whether autograd's graph of a tensor has one of these nodes, at the end of eager code."""
    seen: set[Any] = set()
    left = [tensor.grad_fn]
    while left and len(seen) < _MOST_NODES:
        node = left.pop()
        if node in nodes:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            left += [after for after, _ in node.next_functions]
    return False


def _key(value: object) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _held(value: object) -> WeakStorage:
    assert isinstance(value, torch.Tensor)
    return WeakStorage(value)


def _own(given: Set[int], outputs: Sequence[object], n_outputs: int, watched: Iterable[int]) -> _Own:
    """One storage is enough to see whether a call is over: the largest, not hundreds."""

    def own_bytes(place: int) -> int:
        value = outputs[place]
        if not isinstance(value, torch.Tensor) or _key(value) in given:
            return 0
        return value.untyped_storage().nbytes()

    saved = max(range(n_outputs, len(outputs)), key=own_bytes, default=None)
    results = tuple(place for place in watched if own_bytes(place))
    return _Own(results, saved if saved is not None and own_bytes(saved) else None)
