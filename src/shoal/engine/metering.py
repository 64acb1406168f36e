"""Follows the calls of one or several models: what ran in an iteration, what it left, and what was in use meanwhile.

An iteration is all forward and backward passes between two moments at which no backward pass is pending. It begins with
a call of a model, or, where only the graphs of one model are known, with a forward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.core.joined_step import Interval
from shoal.engine.calls import Call, Calls
from shoal.engine.iteration.metered import Iteration, Phase
from shoal.engine.iteration.record import Metered, MeteredGraph
from shoal.errors import InputError
from shoal.lowlevel.cuda_calls import keeps_graph
from shoal.lowlevel.torch_state import call_at_end_of_backward
from shoal.memory import reads
from shoal.memory.limit import refusals
from shoal.memory.running_meter import RunningMeter
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import WeakStorage

Run = Callable[[list[Any]], Any]
_MOST_RUNS = 256  # of an iteration: a result whose backward pass never comes would make it endless


class Metering:
    """Runs the graphs of models.

    Args:
        static: the models' static memory.
        ended: called with an iteration whose last backward pass is over.
        ran_out: called with an iteration in which memory ran out, or after it; with the bytes that it would have taken
            to go on (0 if they are not known), and whether no graph ran, as in the loss.
        backward_ended: called with a graph whose backward pass has run, and the peak of the iteration so far.
        backward_begins: called with an iteration, and a call of it, when the last backward pass that is pending begins;
            what it raises ends the iteration before any gradient is made. None: nothing is.
        by_call: whether an iteration begins with a call of a model, which is announced by `begin`, and ends with the
            `backward()` after which none is pending. If not, it begins with a forward pass of a step that is to be
            metered, and ends with a backward pass: those of a model of one graph.
        counts_all: whether everything that is allocated from `open` on counts, as for models that share a budget; if
            not, what an iteration allocates, and what its models have.
        device: where they run.

    Attributes:
        calls: those that are not over.
        gradients_are_used: whether the optimizer has stepped since the last backward pass; whoever knows sets it.
        iteration: the one that goes on, or that has ended last; None between two.
        is_within_another: whether nothing is counted because another model's steps are. waits_for_the_counter: that is
            of one graph, and only its first steps are.
    """

    def __init__(
        self,
        static: StaticMemory,
        ended: Callable[[Iteration], None],
        ran_out: Callable[[Iteration, int, bool], None],
        backward_ended: Callable[[Metered, int], None] | None = None,
        backward_begins: Callable[[Iteration, Call], None] | None = None,
        *,
        by_call: bool = False,
        counts_all: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.calls = Calls()
        self.gradients_are_used = False
        self.iteration: Iteration | None = None
        self.is_within_another = self.waits_for_the_counter = False
        self.by_call = by_call
        self._static = static
        self._ended = ended
        self._ran_out = ran_out
        self._backward_ended = backward_ended
        self._backward_begins = backward_begins
        self._counts_all = counts_all
        self._running = RunningMeter(device or torch.device("cpu"))
        self._is_open = False  # other models are not metered meanwhile
        self._will_end = False  # the end of the `backward()` that runs is awaited
        self._in_pass = False  # a metered one: then its call is not under way, or not any more

    def open(self) -> None:
        """Count what is allocated from here on, unless another model's calls are being metered.

        Raises:
            InputError: on the CPU, without a C++ compiler.
        """
        other = self._in_the_way()
        self.is_within_another = other is not None
        self.waits_for_the_counter = other is not None and not other.by_call
        if other is None:
            self._static.keep_library_memory()
            self._running.start(this_thread=not self._counts_all)
            self._takes_the_counter()

    @property
    def measures(self) -> bool:
        """Whether what is in use is measured: not without a C++ compiler on the CPU."""
        return self._running.is_running

    def measures_it(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor counts in what is measured because it was allocated meanwhile."""
        return self._running.is_fresh(tensor)

    def begin(self, models: Mapping[str, nn.Module], arguments: Iterable[torch.Tensor], *, closely: bool) -> Interval:
        """An iteration begins with a call; what was in use since the one before.

        Args:
            models: by name.
            arguments: of its first call.
            closely: whether the iteration is to be metered.
        """
        reads.stop()
        self._will_end = False
        meter, between = self._running, Interval(0, 0)
        if not self._counts_all:
            self._give_up()  # what is allocated between two iterations does not count
        if not meter.is_running and (self._counts_all or closely):
            self._open_if_it_can_be()
        elif closely or meter.device.type != "cuda":
            between = meter.mark()
        if not closely:
            self.iteration = Iteration(between.end_bytes, {}, record=None, closely=False)
            return between
        arguments = list(arguments)
        old = {
            name: [WeakStorage(p.grad) for p in model.parameters() if p.grad is not None]
            for name, model in models.items()
        }
        if self._counts_all:
            meter.restart_from([*self._static.tensors(), *arguments])
        else:
            self._restart_from(arguments)
        self.iteration = Iteration(
            meter.mark().end_bytes,
            old,
            [WeakStorage(argument) for argument in arguments],
            state_bytes=self._static.state_there_bytes(),
            refused=refusals(meter.device),
        )
        return between

    def _open_if_it_can_be(self) -> None:
        try:
            self.open()
        except InputError:
            if self._counts_all:
                raise

    def _restart_from(self, arguments: Iterable[torch.Tensor]) -> None:
        passing = [*map(WeakStorage, self._static.gradients()), *self.calls.held_of_the_last()]
        self._running.restart_from(self._in_use(arguments), passing)

    def goes_on_with(self, arguments: Iterable[torch.Tensor]) -> None:
        """Another call of the iteration begins."""
        iteration = self.iteration
        if iteration is not None:
            arguments = list(arguments)
            iteration.late_bytes += self._running.count(arguments)
            iteration.arguments += [WeakStorage(argument) for argument in arguments]

    def begins_to_train(self) -> Interval:
        """The first training call of the iteration begins: what ran before it in the iteration."""
        iteration = self.iteration
        if iteration is None or iteration.intervals or not (iteration.closely or self._running.device.type != "cuda"):
            return Interval(0, 0)
        return self._running.mark(passed=True)

    def is_over(self) -> bool:
        """Whether nothing of the iteration is pending."""
        iteration = self.iteration
        if iteration is None or iteration.failed or iteration.runs > _MOST_RUNS:
            return True
        iteration.results = [result for result in iteration.results if result.is_alive]
        return not self.calls.under_way(after=iteration.after) and (bool(iteration.went_back) or not iteration.results)

    def in_use_bytes(self) -> int:
        """Device bytes in use now, as far as they are known."""
        if self._running.is_running:
            return self._running.in_use_bytes()
        return sum({one.key: one.nbytes for one in map(WeakStorage, self._static.tensors())}.values())

    def forward(self, step: Metered, run: Run, arguments: list[Any]) -> Any:
        """Run the forward graph of a step."""
        given = self.calls.keys_needed(step, [*arguments, *self._static.input_copies])
        if not self.by_call:
            self._begin_here(step, arguments)
        iteration = self.iteration
        if iteration is None:
            outputs = run(arguments)
            self.calls.started(given, outputs, step.n_outputs, step.results, step)
            return outputs
        record = iteration.record
        held, fresh = ([], []) if record is None else self._who_made(iteration, arguments)
        self._mark_before(iteration, "forward", step, arguments)
        outputs = self._ran(iteration, run, arguments)
        iteration.runs += 1
        self.calls.started(given, outputs, step.n_outputs, step.results, step)
        self._in_pass = False
        self._mark_after(iteration)
        if record is not None:
            lasting = None
            if self._static.is_sharded:
                lasting = {tensor.untyped_storage()._cdata for tensor in self._static.lasting_tensors()}
            record.arguments = [one for one in iteration.arguments if one.is_alive]
            record.went_forward(cast(MeteredGraph, step), self.calls.last, held, fresh, outputs, lasting)
        return outputs

    def _who_made(self, iteration: Iteration, arguments: Sequence[Any]) -> tuple[list[WeakStorage | None], list[bool]]:
        """The memory of the arguments of a graph, and whether eager code of the iteration made it."""
        there = {one.key for one in iteration.arguments if one.is_alive}
        held = [WeakStorage(a) if isinstance(a, torch.Tensor) else None for a in arguments]
        fresh = [
            one is not None and one.key not in there and self._running.is_fresh(a)
            for a, one in zip(arguments, held, strict=True)
        ]
        return held, fresh

    def _begin_here(self, step: Metered, arguments: Sequence[Any]) -> None:
        """A forward pass of a model of one graph: one more of the iteration that goes on, or the first of the next."""
        iteration = self.iteration
        if iteration is not None and not iteration.has_ended and self.calls.under_way():
            return
        self.close()
        if not step.steps_to_meter:
            return
        with _opening:
            if self.calls.under_way() or self._in_the_way() is not None:
                return
            if self._running.device != step.device:
                self._running = RunningMeter(step.device)
            try:
                self._running.start(this_thread=True, or_records=True)
            except InputError:
                return  # another profiler runs
            try:
                old = {"": [WeakStorage(gradient) for gradient in self._static.gradients()]}
                self._restart_from(arguments)
                begin_bytes = self._running.mark().end_bytes
            except BaseException:
                self._running.close()  # else it would count for other models
                raise
            self.iteration = Iteration(begin_bytes, old, record=None, refused=refusals(step.device))
            self._in_pass = True  # for other threads, which look before this one runs
            self._takes_the_counter()

    def returned(self, results: Any, node: Any) -> None:
        """The caller gets these results of a forward pass, whose backward pass an autograd node runs."""
        self.calls.goes_back_by(node)
        if self._is_open:
            self.calls.returned(tree_leaves(results))

    def backward(self, step: Metered, run: Run, arguments: list[Any]) -> Any:
        """Run the backward graph of a step."""
        begun = self._begin_backward(step, arguments)
        with reads.paused():
            if begun is None:
                return run(arguments)
            gradients = self._ran(begun.iteration, run, arguments)
        self._end_backward(begun, gradients)
        return gradients

    def backward_in_parts(
        self, step: Metered, run: Callable[[list[Any]], Generator[list[Any], None, Any]], arguments: list[Any]
    ) -> Generator[list[Any], None, Any]:
        """Run the backward graph of a step that hands gradients over: what hooks allocate with them counts."""
        begun = self._begin_backward(step, arguments)
        if begun is None:
            return (yield from run(arguments))
        self._in_pass = True
        try:
            gradients = yield from run(arguments)
        except BaseException as error:
            self._failed(begun.iteration, error)
            raise
        self._end_backward(begun, gradients)
        return gradients

    def _begin_backward(self, step: Metered, arguments: Sequence[Any]) -> _BackwardRun | None:
        """The backward pass that begins; None if it is of no iteration."""
        self.gradients_are_used = False
        iteration = self.iteration
        is_metered = iteration is not None and not iteration.has_ended
        self._in_pass = is_metered  # before the call is under way no longer: other threads look at both
        call = self.calls.goes_back(arguments, step)
        if iteration is None or not is_metered or (call is None and not self.by_call):
            self._in_pass = False
            return None  # no call is known of one that is sent back a second time
        old = [one for gradients in iteration.old_gradients.values() for one in gradients]
        if not iteration.went_back:
            iteration.stayed = {n for n, held in iteration.old_gradients.items() if any(one.is_alive for one in held)}
        iteration.went_back += 1
        iteration.is_mixed |= call is not None and call.number <= iteration.after
        record, number = iteration.record, None
        if record is not None:
            number = record.goes_back(cast(MeteredGraph, step), call, arguments)
        iteration.again |= number is None if record is not None else call is None
        given = arguments[len(arguments) - step.n_tangents :]
        # That of a loss is the 1 that `backward()` itself makes and holds, which takes no room.
        tangents = [WeakStorage(one) for one in given if isinstance(one, torch.Tensor) and one.numel() > 1]
        if call is not None and keeps_graph():
            self.calls.again = iteration.again = True
        if call is not None and iteration.closely:
            iteration.fates.begins_backward(call, tangents, old)
        self._await_end(iteration, step)
        self._mark_before(iteration, "backward", step, arguments)
        if self._backward_begins is not None and call is not None and not self.calls.under_way():
            try:
                self._backward_begins(iteration, call)
            except BaseException:
                self.close()
                raise
        return _BackwardRun(iteration, step, call, tangents, number)

    def _end_backward(self, begun: _BackwardRun, gradients: Any) -> None:
        iteration, record = begun.iteration, begun.iteration.record
        if begun.number is not None and record is not None:
            record.went_back(begun.number, gradients)
        self._mark_after(iteration)
        self._in_pass = False
        if iteration is not self.iteration and not self.by_call:
            return  # given up by another model's call
        if begun.call is not None and iteration.closely:
            iteration.fates.ends_backward(begun.call, begun.tangents)
        if self._backward_ended is not None:
            self._backward_ended(begun.step, iteration.peak_bytes)
        if not self.by_call and not self.calls.under_way():
            self._give_up()
            iteration.has_ended, self.iteration = True, iteration
            self._ended(iteration)

    def _await_end(self, iteration: Iteration, step: Metered) -> None:
        """Measure eager code that runs backward after the last graph, such as an embedding's."""
        if self._will_end or not iteration.closely or not self.by_call:
            return

        def backward_has_ended() -> None:
            self._will_end = False
            if iteration is not self.iteration or iteration.failed:
                return
            iteration.last_interval = _together(iteration.last_interval, self._running.mark(passed=True))
            iteration.peak_bytes = max(iteration.peak_bytes, iteration.last_interval.peak_bytes)
            if self._backward_ended is not None:
                self._backward_ended(step, iteration.peak_bytes)
            if self.is_over():
                self._ended(iteration)

        call_at_end_of_backward(backward_has_ended)
        self._will_end = True

    def close(self) -> None:
        """Meter nothing any more."""
        self.iteration = None
        self._give_up()

    def learn_refusals(self, *, between: bool = True) -> None:
        """Learn whether memory ran out since a metered iteration began; whoever has caught it does not report it.

        Args:
            between: whether no graph of the iteration runs.
        """
        iteration, running = self.iteration, self._running
        if iteration is None or not iteration.closely:
            return
        if not (running.is_running or iteration.has_ended):
            return
        now = refusals(running.device)
        if now.count > iteration.refused.count:
            iteration.refused = now
            used_bytes = running.refused(now)
            if not self.by_call:
                self.close()
            self._ran_out(iteration, used_bytes, between)

    def _ran(self, iteration: Iteration, run: Run, arguments: list[Any]) -> Any:
        """Run a pass; it is over for other threads once its call is under way, or not any more."""
        self._in_pass = True
        try:
            return run(arguments)
        except BaseException as error:
            self._failed(iteration, error)
            raise

    def _failed(self, iteration: Iteration, error: BaseException) -> None:
        iteration.failed = True
        self._will_end = self._in_pass = False
        if isinstance(error, torch.OutOfMemoryError):
            self.learn_refusals(between=False)
        if not self.by_call:
            self.close()

    def _mark_before(self, iteration: Iteration, phase: Phase, step: Metered, arguments: Sequence[Any]) -> None:
        iteration.went(phase, step)
        self._running.count_this_thread()
        if iteration.closely and (given_bytes := self._running.count_reads()):
            iteration.was_given(given_bytes)
        self._mark(iteration, passed=True)
        more_bytes = 0 if self.by_call else self._running.go_on(self._in_use(arguments))
        if more_bytes and iteration.intervals:
            before = iteration.intervals[-1]  # a gradient that the caller has kept is in use when the pass begins
            iteration.intervals[-1] = replace(before, end_bytes=before.end_bytes + more_bytes)

    def _mark_after(self, iteration: Iteration) -> None:
        self._mark(iteration, passed=False)
        if iteration.closely and self._running.is_running:
            reads.start()

    def _mark(self, iteration: Iteration, *, passed: bool) -> None:
        running = self._running
        if not self._is_open or (not iteration.closely and running.device.type == "cuda"):
            return
        measured = running.mark(passed=passed)
        iteration.reserved_bytes = running.reserved_bytes
        if passed:
            measured = _together(iteration.last_interval, measured)
            iteration.last_interval = None
        iteration.intervals.append(measured)
        iteration.peak_bytes = max(iteration.peak_bytes, measured.peak_bytes)

    def _in_use(self, arguments: Iterable[Any]) -> list[torch.Tensor]:
        return [*self._static.lasting_tensors(), *(a for a in arguments if isinstance(a, torch.Tensor))]

    def _in_the_way(self) -> Metering | None:
        """Whose calls are being metered, of another model: there is one counter, and what it counts here is theirs."""
        other = next((reference() for reference in _metering_now), None)
        if other is None or other is self or not other._is_open:
            return None
        if other.calls.under_way() or other._in_pass:
            return other
        other._give_up()
        return None

    def _takes_the_counter(self) -> None:
        _metering_now[:] = [weakref.ref(self)]
        self._is_open = True

    def _give_up(self) -> None:
        if self._is_open:  # else the reads are noted for another model
            reads.stop()
        self._is_open = self._in_pass = False
        self._running.close()
        if not self.by_call:
            self.iteration = None


@dataclass
class _BackwardRun:
    """A backward pass that runs.

    Attributes:
        iteration: of which it is.
        step, call: whose it is; no call is known of a second backward pass.
        tangents: the gradients that it was given.
        number: of its run in the record.
    """

    iteration: Iteration
    step: Metered
    call: Call | None
    tangents: Sequence[WeakStorage]
    number: int | None


def _together(before: Interval | None, after: Interval) -> Interval:
    """Two intervals without a pass between them as one."""
    return after if before is None else Interval(max(before.peak_bytes, after.peak_bytes), after.end_bytes)


_metering_now: list[weakref.ref[Metering]] = []
_opening = threading.Lock()  # there is one counter, and threads may come for it at once


def abandon() -> None:
    """Stop metering, whichever model's calls are being metered: their backward pass is not expected any more."""
    for reference in _metering_now:
        metering = reference()
        if metering is not None:
            metering._give_up()
