"""Follows the calls of one model: which are under way, and what they really use while their plans are new."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from shoal.capture.traced_strides import Departure
from shoal.core.plan import Plan
from shoal.engine.calls import Call, Calls
from shoal.engine.loop_memory import Basis
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.memory import reads
from shoal.memory.limit import refusals
from shoal.memory.static_memory import StaticMemory
from shoal.memory.step_meter import Measured, StepMeter
from shoal.memory.storage_bytes import WeakStorage

Run = Callable[[list[Any]], Any]
_MOST_WAITS = 20  # windows that are metered until the optimizer has stepped


class Metered(Protocol):
    """A step whose two graphs run here.

    Attributes:
        steps_to_meter: how many of its next runs are metered.
        device: where it runs.
        plan, basis: its plan, and what that was made for.
        departures: tensors that were not laid out as traced, and were put right by copies that the plan does not count.
        n_outputs: how many results its forward graph returns. n_tangents: how many gradients of results its backward
            graph is given, as the last of its arguments.
        results: the places, among them, of those that the caller gets.
        handed_stayed: whether a gradient that was handed over to a hook was still there afterwards; None: none was.
    """

    steps_to_meter: int
    device: torch.device
    plan: Plan | None
    basis: Basis | None
    departures: dict[str, Departure]
    n_outputs: int
    n_tangents: int
    results: tuple[int, ...]
    handed_stayed: bool | None

    def basis_in_call(self) -> Basis | None:
        """What the plan was made for, with the sizes of the last call that was metered."""


@dataclass(eq=False)
class Window:
    """What is metered as one: from a forward pass to the backward pass after which no call is under way.

    Attributes:
        steps: those that ran.
        kept: places of results that were still there when a backward pass began. released: of those that were not.
        outlived: places of results that were still there when it ended. let_go: of those that were not.
        measured: what it used; None until it is over.
        gradients_stayed: whether gradients of an earlier step were there when a backward pass began.
        tangents_stayed: whether a gradient of a result, of more than one number, was still held by somebody when its
            backward pass ended.
        gradients_given: whether results of more than one number had gradients at all.
    """

    steps: list[Metered] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    outlived: set[int] = field(default_factory=set)
    let_go: set[int] = field(default_factory=set)
    measured: Measured | None = None
    gradients_stayed: bool = False
    tangents_stayed: bool = False
    gradients_given: bool = False


class Metering:
    """Runs the graphs of one model's steps.

    Args:
        static: static memory outside the steps.
        learn: called with each window that was metered.
        ran_out: called with a window in which memory ran out, in a graph or in what lies between its passes (the loss);
            with the bytes that it would have taken to go on, and whether it was not in a graph.
        ran_out_after: called with one after which memory ran out before the next call, as in the optimizer's step.
        foresee: called when the last backward pass of a window begins, with what the window has shown by then and what
            it used; what it raises ends the step before any gradient is made.

    Attributes:
        calls: those that are not over.
        gradients_are_used: whether the optimizer has stepped since the last backward pass; whoever knows sets it.
        follows_iterations: whether several calls may be one iteration, with a plan for all of them.
    """

    follows_iterations = False

    def __init__(
        self,
        static: StaticMemory,
        learn: Callable[[Window], None],
        ran_out: Callable[[Window, int, bool], None] | None = None,
        ran_out_after: Callable[[Window], None] | None = None,
        foresee: Callable[[Window, int], None] | None = None,
    ) -> None:
        self.calls = Calls()
        self.gradients_are_used = False
        self._static = static
        self._learn = learn
        self._ran_out = ran_out
        self._foresee = foresee
        self._ran_out_after = ran_out_after
        self._last: tuple[Window, torch.device, Refusals] | None = None  # opened last, and refusals before
        self._meter: StepMeter | None = None
        self._window: Window | None = None
        self._old_gradients: list[WeakStorage] = []
        self._waits = 0
        self._thread = 0  # whose calls are metered
        self._in_pass = False  # a metered one: then its call is not under way, or not any more

    def forward(self, step: Metered, run: Run, arguments: list[Any]) -> Any:
        """Run the forward graph of a step."""
        given = self.calls.keys_needed(step, [*arguments, *self._static.input_copies])
        self._begin_forward(step, arguments)
        try:
            outputs = run(arguments)
        except BaseException as error:
            self._failed(error)
            raise
        self.calls.started(given, outputs, step.n_outputs, step.results, step)
        self._in_pass = False
        if self._window is not None and self._meter is not None:
            self._meter.pause()
        return outputs

    def returned(self, results: Any, node: Any) -> None:
        """The caller gets these results of a forward pass, whose backward pass an autograd node runs."""
        self.calls.goes_back_by(node)
        if self._window is not None:
            self.calls.returned(tree_leaves(results))

    def backward(self, step: Metered, run: Run, arguments: list[Any]) -> Any:
        """Run the backward graph of a step."""
        begun = self._begin_backward(step, arguments)
        if begun is None:
            with reads.paused():
                return run(arguments)
        try:
            with reads.paused():
                gradients = run(arguments)
        except BaseException as error:
            self._failed(error)
            raise
        self._end_backward(*begun)
        return gradients

    def backward_in_parts(
        self, step: Metered, run: Callable[[list[Any]], Generator[list[Any], None, Any]], arguments: list[Any]
    ) -> Generator[list[Any], None, Any]:
        """Run the backward graph of a step that hands gradients over: what hooks allocate with them counts."""
        begun = self._begin_backward(step, arguments)
        if begun is None:
            return (yield from run(arguments))
        try:
            gradients = yield from run(arguments)
        except BaseException as error:
            self._failed(error)
            raise
        self._end_backward(*begun)
        return gradients

    def _begin_backward(self, step: Metered, arguments: Sequence[Any]) -> tuple[Call, list[WeakStorage]] | None:
        """The metered call that goes back, and the gradients of its results; None for any other call."""
        self.gradients_are_used = False
        call = self._goes_back(step, arguments)
        window, meter = self._window, self._meter
        if window is None or meter is None or call is None:  # None for a call that is sent back a second time
            return None
        self._in_pass = True
        _note_results(call, window.kept, window.released)
        window.gradients_stayed |= any(held.is_alive for held in self._old_gradients)
        given = arguments[len(arguments) - step.n_tangents :]
        # That of a loss is the 1 that `backward()` itself makes and holds, which takes no room.
        tangents = [WeakStorage(one) for one in given if isinstance(one, torch.Tensor) and one.numel() > 1]
        window.gradients_given |= bool(tangents)
        meter.resume(self._in_use(arguments))
        if self._foresee is not None and not self._goes_on():
            self._look_ahead(self._foresee, window, meter, call)
        return call, tangents

    def _look_ahead(self, foresee: Callable[[Window, int], None], window: Window, meter: StepMeter, call: Call) -> None:
        """What is known once the loss has been computed: it has run, and whoever still holds a result has a name."""
        held = call.held_by_caller()
        held_bytes = sum({call.outputs[place].key: call.outputs[place].nbytes for place in held}.values())
        known = replace(window, outlived=held, let_go=set(call.outputs) - held, measured=meter.so_far())
        try:
            foresee(known, held_bytes)
        except BaseException:
            self._give_up()
            raise

    def _end_backward(self, call: Call, tangents: Sequence[WeakStorage]) -> None:
        self._in_pass = False
        window, meter = self._window, self._meter
        if window is None or meter is None:  # given up by another model's call
            return
        _note_results(call, window.outlived, window.let_go)
        window.tangents_stayed |= any(tangent.is_alive for tangent in tangents)
        if self._goes_on():
            meter.pause()
        else:
            self._end(window, meter)

    def _goes_back(self, step: Metered, arguments: Sequence[Any]) -> Call | None:
        return self.calls.goes_back(arguments, step)

    def _end(self, window: Window, meter: StepMeter) -> None:
        """The last backward pass of a window is over."""
        self._close(window, meter.end())

    def _goes_on(self) -> bool:
        """Whether the window has more passes to come."""
        return bool(self.calls.under_way())

    def _close(self, window: Window, measured: Measured | None) -> None:
        window.measured = measured
        self._window = None
        if measured is not None:
            waits = self._waits_for_state()
            for metered in window.steps:
                metered.steps_to_meter -= metered.steps_to_meter > waits
            self._learn(window)

    def _waits_for_state(self) -> bool:
        """Whether the last step to be metered is still to come: with the optimizer's state, which a GradScaler that
        leaves out steps, or a loop that accumulates, has it allocate later."""
        waits = self._static.awaits_optimizer and self._waits < _MOST_WAITS
        self._waits += waits
        return waits

    def _begin_forward(self, step: Metered, arguments: Sequence[Any]) -> None:
        window, meter = self._window, self._meter
        if window is not None and meter is not None and self._goes_on():
            if step not in window.steps:
                window.steps.append(step)
            self._in_pass = True
            meter.go_on(self._in_use(arguments))
            return
        self._give_up()
        if step.steps_to_meter:
            self._open(step.device, [step], arguments)

    def _open(self, device: torch.device, steps: list[Metered], arguments: Sequence[Any]) -> None:
        """Begin a window, where nothing is under way."""
        with _opening:
            self._open_if_free(device, steps, arguments)

    def _open_if_free(self, device: torch.device, steps: list[Metered], arguments: Sequence[Any]) -> None:
        if self.calls.under_way() or self._in_the_way() is not None:
            return
        meter = self._meter
        if meter is None or meter.device != device:
            meter = self._meter = StepMeter(device)
        self._old_gradients = [WeakStorage(gradient) for gradient in self._static.gradients()]
        passing = [*self._old_gradients, *self.calls.held_of_the_last()]
        if meter.begin(self._in_use(arguments), passing):
            self._window, self._in_pass = Window(steps), True
            self._last = self._window, device, refusals(device)
            self._takes_the_counter()

    def _in_the_way(self) -> Metering | None:
        """Whose calls are being metered, of another model: there is one counter, and what it counts here is theirs."""
        other = next((reference() for reference in _metering_now), None)
        if other is None or other is self or other._window is None:
            return None
        if other.calls.under_way() or other._in_pass:
            return other
        other._give_up()
        return None

    def _takes_the_counter(self) -> None:
        _metering_now[:] = [weakref.ref(self)]
        self._thread = threading.get_ident()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self.learn_refusals()
        self._give_up()

    def learn_refusals(self) -> None:
        """Learn whether memory ran out since the last metered window began: who caught it does not report it."""
        last, self._last = self._last, None
        if last is None:
            return
        window, device, before = last
        now = refusals(device)
        if now.count == before.count:
            if window is self._window:
                self._last = last  # it goes on
            return
        if window.measured is not None:
            if self._ran_out_after is not None:
                self._ran_out_after(window)
            return
        if window is not self._window or self._meter is None:
            return
        part, used_bytes = self._meter.refused(now)
        self._give_up()
        if self._ran_out is not None and window.steps:
            self._ran_out(window, used_bytes, part == "loss")

    def close(self) -> None:
        """Meter nothing any more."""
        self._give_up()

    def _give_up(self) -> None:
        if self._window is not None and self._meter is not None:
            self._meter.abandon()
        self._window, self._in_pass = None, False

    def _in_use(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        return [*self._static.lasting_tensors(), *(a for a in arguments if isinstance(a, torch.Tensor))]


def _note_results(call: Call, there: set[int], gone: set[int]) -> None:
    alive = {place for place, held in call.outputs.items() if held.is_alive}
    there |= alive
    gone |= set(call.outputs) - alive


_metering_now: list[weakref.ref[Metering]] = []
_opening = threading.Lock()  # there is one counter, and threads may come for it at once


def abandon_in_other_threads() -> None:
    """Stop metering calls of other threads, until later: what this one has allocated was counted for them."""
    for reference in _metering_now:
        metering = reference()
        if metering is not None and not metering.follows_iterations and metering._thread != threading.get_ident():
            metering._give_up()


def abandon() -> None:
    """Stop metering, whichever model's calls are being metered: their backward pass is not expected any more."""
    for reference in _metering_now:
        metering = reference()
        if metering is not None:
            metering._give_up()
