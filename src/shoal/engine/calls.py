"""The calls of a model whose backward passes are yet to come, and what the caller still holds of the last one.

Nothing is kept alive here: a call is under way as long as autograd holds what its forward pass saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from shoal.memory.step_meter import WeakStorage


@dataclass(eq=False)
class Call:
    """One forward pass.

    Attributes:
        witness: a storage that autograd holds until the backward pass is over; the largest one it saved, or an output
            where it saved nothing of this call's own.
        of_output: whether that is an output, which the caller may hold for longer.
        outputs: what was handed to the caller, by place among the forward graph's outputs.
        number: of the model's call that it is a part of.
        step: which step it is of, as a number.
    """

    witness: WeakStorage | None
    of_output: bool
    outputs: Mapping[int, WeakStorage]
    number: int
    step: int = 0


class Calls:
    """Every call of one model that is not over. A call of a model that is several graphs has several forward passes.

    Attributes:
        number: of the model's call that is made.
    """

    def __init__(self) -> None:
        self.number = 0
        self._announced = False
        self._under_way: list[Call] = []
        self._last: Call | None = None

    def begins(self) -> None:
        """The model is called. Where nobody says so, every forward pass is taken for a call."""
        self.number += 1
        self._announced = True

    def started(
        self,
        arguments: Iterable[int],
        outputs: Sequence[object],
        n_outputs: int,
        watched: Iterable[int],
        step: object = None,
    ) -> None:
        """A forward pass has ended.

        Args:
            arguments: keys of the storages that it was given.
            outputs: what its graph returned: results first, then what is saved for the backward pass.
            n_outputs: how many of them are results.
            watched: places of the results whose fate is of interest.
            step: which step it is of: what one saved may be an argument of another one's backward pass.
        """
        given = set(arguments)
        if not self._announced:
            self.number += 1

        held = {place: WeakStorage(t) for place in watched if isinstance(t := outputs[place], torch.Tensor)}
        results = {place: one for place, one in held.items() if one.nbytes and one.key not in given}
        saved = _largest(outputs[n_outputs:], given)
        witness = saved or max(results.values(), key=lambda one: one.nbytes, default=None)
        self._last = Call(witness, saved is None, results, self.number, id(step))
        self._under_way.append(self._last)

    def goes_back(self, arguments: Iterable[int], step: object = None) -> Call | None:
        """The call of a step whose backward pass begins, found by the keys of the storages that it is given; it is
        under way no longer. None where it is not known."""
        given = set(arguments)
        own = [call for call in self._under_way if call.step == id(step)]
        known = [call for call in own if call.witness is not None and call.witness.key in given]
        known = known or [call for call in own if call.of_output or call.witness is None]
        if not known:
            return None
        self._under_way.remove(known[-1])
        return known[-1]

    def under_way(self) -> int:
        """How many calls are."""
        self._under_way = [c for c in self._under_way if c.witness is not None and c.witness.is_alive]
        return len({call.number for call in self._under_way})

    @property
    def any_started(self) -> bool:
        """Whether there was a call at all."""
        return self._last is not None

    def held_of_the_last(self) -> list[WeakStorage]:
        """What the caller still holds of the last call's results: a loop's names, until they get new values.

        Nothing while that call is under way: then its results wait with what it saved.
        """
        self.under_way()
        if self._last is None or self._last in self._under_way:
            return []
        return [held for held in self._last.outputs.values() if held.is_alive]


def _largest(values: Iterable[object], given: Set[int]) -> WeakStorage | None:
    """The largest storage of the tensors among values that is not given: one weak reference, not hundreds."""
    largest, most_bytes = None, 0
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.nbytes() > most_bytes and storage._cdata not in given:
                largest, most_bytes = value, storage.nbytes()
    return None if largest is None else WeakStorage(largest)
