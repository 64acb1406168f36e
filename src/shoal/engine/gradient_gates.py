"""Autograd nodes after a planned backward pass, by which gradients reach their parameters where they are final.

AOTAutograd's node returns all gradients at once. Here it returns none: it leaves the backward graph, as a generator, to
a chain of nodes, each of which runs the graph up to the next gradients and returns these. Between two nodes autograd
accumulates them and runs their hooks, as it does in plain PyTorch: `DistributedDataParallel` starts to send a bucket,
an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from shoal.engine.once_differentiable import backward_of
from shoal.lowlevel.torch_state import autograd_node, without_autocast

Gradients = Generator[list[Any], None, Any]  # yields each group that leaves early, returns what is left
Places = Sequence[Sequence[int]]
_ATTRIBUTE = "shoal_call_through_gates"


class _GradientGatesCall:
    """One call's backward pass.

    Args:
        groups: places of the gradients that leave early, group by group.
        note: called with whether a gradient was still there when the graph went on.

    Attributes:
        gradients: those that are still to come; None before the backward pass, and after it.
        holders: the inputs whose gradients left last.
    """

    def __init__(self, groups: Places, note: Callable[[bool], None]) -> None:
        self.gradients: Gradients | None = None
        self.holders: Sequence[torch.Tensor] = ()
        self._groups = groups
        self._note = note
        self._n_left = 0
        self._there: dict[int, Any] = {}

    def begin(self, gradients: Gradients) -> None:
        self.gradients, self._n_left = gradients, 0
        self._there.clear()

    def take(self, places: Sequence[int]) -> list[Any]:
        """The gradients at these places; the graph is run until they are there."""
        while self.gradients is not None and not self._there.keys() >= set(places):
            if self.holders:
                self._note(any(holder.grad is not None for holder in self.holders))
            self.holders = ()
            with without_autocast():
                self._go_on(self.gradients)
        return [self._there.pop(place) for place in places]

    def _go_on(self, gradients: Gradients) -> None:
        if self._n_left == len(self._groups):
            self.gradients = None
            self._there |= enumerate(_returned(gradients))
            return
        leaving = next(gradients)
        for place in self._groups[self._n_left]:
            self._there[place] = leaving.pop(0)
        self._n_left += 1


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _GradientGatesCall, places: Sequence[int], before: Any, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places, ctx.inputs = call, places, inputs
        return tuple(one.detach() for one in inputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
        call: _GradientGatesCall = ctx.call
        if any(one is not None for one in given):  # the backward pass has run without gates
            return None, None, None, *given
        taken = call.take(ctx.places)
        call.holders = ctx.inputs
        return None, None, None, *(taken.pop(0) for _ in ctx.places)


def through_gates(
    compiled: Callable[..., Any], groups: Places, order: Sequence[int], note: Callable[[bool], None]
) -> Callable[..., Any]:
    """What AOTAutograd compiled, with gates before it for the gradients that leave early.

    The first call has a gate for each gradient, so that they arrive in eager PyTorch's order: in that order DDP lays
    out its buckets for good. Later calls have one for each group.

    Args:
        compiled: with a backward pass made by `gates_or_all`.
        groups: places of the gradients that leave, group by group, in order.
        order: places of all gradients, in the order in which eager PyTorch would have them.
        note: called with whether a gradient was still there when the backward pass went on.
    """
    early = {place for places in groups for place in places}
    others = [place for place in order if place not in early]
    in_groups = [list(places) for places in (*groups, others) if places]
    one_by_one = [[place] for place in order]
    is_first = True

    def run(*arguments: Any) -> Any:
        nonlocal is_first
        inputs = list(arguments)
        arguments = ()
        call = _GradientGatesCall(groups, note)
        if torch.is_grad_enabled():
            before = None
            for places in reversed(one_by_one if is_first else in_groups):
                passed = _Gate.apply(call, places, before, *(inputs[place] for place in places))
                before = passed[0]
                for place, one in zip(places, passed, strict=True):
                    inputs[place] = one
            is_first = False
        outputs = compiled(*inputs)
        node = backward_of(outputs)
        if node is not None:
            setattr(node, _ATTRIBUTE, call)
        return outputs

    return run


def gates_or_all(gradients: Gradients, groups: Places, n_gradients: int) -> list[Any]:
    """What a backward pass returns whose gradients are these: none where gates wait for them, else all."""
    call = getattr(autograd_node(), _ATTRIBUTE, None)
    if call is not None:
        call.begin(gradients)
        return [None] * n_gradients
    early = {place: gradient for places in groups for place, gradient in zip(places, next(gradients), strict=True)}
    rest = _returned(gradients)
    return [early.get(place, gradient) for place, gradient in enumerate(rest)]


def _returned(gradients: Gradients) -> list[Any]:
    try:
        next(gradients)
    except StopIteration as end:
        return list(end.value)
    raise AssertionError("a backward graph hands over what its gates wait for")
