"""Follows the calls of one or several models: what ran in an iteration, what it left, and what was in use meanwhile.

An iteration begins with a call of a model and ends before the next call at which no backward pass is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.core.joined_step import Interval
from shoal.engine.iteration.record import MeteredGraph, Record
from shoal.engine.metering import Metering, Run, Window
from shoal.errors import InputError
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.lowlevel.torch_state import call_at_end_of_backward
from shoal.memory import reads
from shoal.memory.limit import refusals
from shoal.memory.running_meter import RunningMeter
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import WeakStorage

_MOST_RUNS = 256  # of an iteration: a result whose backward pass never comes would make it endless


@dataclass(eq=False)
class Iteration:
    """Calls of models, and their backward passes.

    Attributes:
        begin_bytes: in use when it began.
        arguments: of its calls.
        late_bytes: of arguments of later calls, and of what code between the passes reads, such as targets, that were
            there before the meter ran.
        old_gradients: those that were there when it began, by the model's name.
        record: which graphs ran and what they handed to each other; None if not needed.
        intervals: of the eager interval before each pass, and of the pass.
        last_interval: of eager code after the last pass, up to the end of `backward()`.
        peak_bytes: most that was in use from the first call on.
        results: of its calls.
        called: names of the models that were called for training.
        runs: of graphs, so far. went_back: of these, those whose backward pass has begun.
        again: whether a backward pass ran a second time.
        stayed: names of models whose old gradients were still there when the first backward pass began.
        failed: whether an exception ended it.
        state_bytes: of the optimizers, when it began. came: what was added to it before which interval ended.
        closely: whether it is metered; if not, on CUDA the allocator's peak is left to the user.
        refused: allocations of the device that had been refused when it began.
        after: the number of the last call before it.
        is_beside: whether calls before it wait for backward passes that may never come.
        is_mixed: whether one of them has come.
    """

    begin_bytes: int
    old_gradients: Mapping[str, Sequence[WeakStorage]]
    arguments: list[WeakStorage] = field(default_factory=list)
    late_bytes: int = 0
    record: Record | None = field(default_factory=Record)
    intervals: list[Interval] = field(default_factory=list)
    last_interval: Interval | None = None
    peak_bytes: int = 0
    results: list[WeakStorage] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    runs: int = 0
    went_back: int = 0
    again: bool = False
    stayed: set[str] = field(default_factory=set)
    failed: bool = False
    state_bytes: int = 0
    came: list[tuple[int, int]] = field(default_factory=list)
    closely: bool = True
    refused: Refusals = field(default_factory=lambda: Refusals(0))
    after: int = 0
    is_beside: bool = False
    is_mixed: bool = False

    def state_is_now(self, state_bytes: int) -> None:
        """An optimizer has stepped; its state will be there from the beginning of the next iteration on."""
        if state_bytes > self.state_bytes:
            self.came.append((len(self.intervals), state_bytes - self.state_bytes))
            self.state_bytes = state_bytes

    def as_later(self) -> tuple[int, list[Interval]]:
        """`begin_bytes` and all intervals of such an iteration with the optimizers' state there from its beginning."""
        begin_bytes = self.begin_bytes
        intervals = [*self.intervals, *([self.last_interval] if self.last_interval is not None else [])]
        for until, nbytes in self.came:
            begin_bytes += nbytes
            for place, one in enumerate(intervals[: until + 1]):
                end_bytes = one.end_bytes + (nbytes if place < until else 0)
                intervals[place] = Interval(one.peak_bytes + nbytes, end_bytes)
        return begin_bytes, intervals


class IterationMetering(Metering):
    """Runs the graphs of models.

    Args:
        static: the models' static memory.
        device: where they run.
        note_back: called with a graph whose backward pass has run, and the peak of the iteration so far.
        ran_out: called with an iteration in which memory ran out, in a graph or between its passes (the loss), or after
            it; with the bytes that it would have taken to go on, and whether it was not in a graph.
        ended: called with an iteration when a `backward()` has ended after which none is pending.
        counts_all: whether everything that is allocated from `open` on counts, as for models that share a budget; if
            not, what an iteration allocates, and what its models have.

    Attributes:
        iteration: the one that goes on; None between two.
        is_within_another: whether nothing is counted because another model's steps are. waits_for_the_counter: that is
            of one graph, and only its first steps are.
    """

    follows_iterations = True

    def __init__(
        self,
        static: StaticMemory,
        device: torch.device,
        note_back: Callable[[MeteredGraph, int], None],
        ran_out: Callable[[Iteration, int, bool], None],
        ended: Callable[[Iteration], None],
        *,
        counts_all: bool,
    ) -> None:
        super().__init__(static, lambda window: None)
        self.iteration: Iteration | None = None
        self.is_within_another = self.waits_for_the_counter = False
        self._running = RunningMeter(device)
        self._note_back = note_back
        self._iteration_ran_out = ran_out
        self._ended = ended
        self._counts_all = counts_all
        self._will_end = False  # the end of the `backward()` that runs is awaited

    def open(self) -> None:
        """Count what is allocated from here on, unless another model's calls are being metered.

        Raises:
            InputError: on the CPU, without a C++ compiler.
        """
        other = self._in_the_way()
        self.is_within_another = other is not None
        self.waits_for_the_counter = other is not None and not other.follows_iterations
        if other is None:
            self._static.keep_library_memory()
            self._running.start()
            self._window = Window()  # other models are not metered while these are under way
            self._takes_the_counter()

    @property
    def measures(self) -> bool:
        """Whether what is in use is measured: not without a C++ compiler on the CPU."""
        return self._running.is_running

    def measures_it(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor counts in what is measured because it was allocated meanwhile."""
        return self._running.is_fresh(tensor)

    def begin(self, models: Mapping[str, nn.Module], arguments: Iterable[torch.Tensor], *, closely: bool) -> Interval:
        """An iteration begins; what was in use since the one before.

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
        if not self._counts_all:
            meter.count_this_thread()
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
            passing = [*map(WeakStorage, self._static.gradients()), *self.calls.held_of_the_last()]
            meter.restart_from([*self._static.lasting_tensors(), *arguments], passing)
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

    def forward(self, step: MeteredGraph, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        iteration = self.iteration
        given = self.calls.keys_needed(step, arguments)
        if iteration is None:
            outputs = run(arguments)
            self.calls.started(given, outputs, step.n_outputs, step.results, step)
            return outputs
        fresh: list[bool] = []
        held: list[WeakStorage | None] = []
        record = iteration.record
        if record is not None:
            there = {one.key for one in iteration.arguments if one.is_alive}
            held = [WeakStorage(a) if isinstance(a, torch.Tensor) else None for a in arguments]
            fresh = [
                one is not None and one.key not in there and self._running.is_fresh(a)
                for a, one in zip(arguments, held, strict=True)
            ]
        self._mark_before(iteration)
        outputs = self._ran(iteration, run, arguments)
        iteration.runs += 1
        self.calls.started(given, outputs, step.n_outputs, step.results, step)
        self._mark_after(iteration)
        if record is not None:
            lasting = None
            if self._static.is_sharded:
                lasting = {tensor.untyped_storage()._cdata for tensor in self._static.lasting_tensors()}
            record.arguments = [one for one in iteration.arguments if one.is_alive]
            record.went_forward(step, self.calls.last, held, fresh, outputs, lasting)
        return outputs

    def backward(self, step: MeteredGraph, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        self.gradients_are_used = False
        call = self.calls.goes_back(arguments, step)
        iteration = self.iteration
        if iteration is None:
            return run(arguments)
        if not iteration.went_back:
            iteration.stayed = {
                name for name, old in iteration.old_gradients.items() if any(one.is_alive for one in old)
            }
        iteration.went_back += 1
        iteration.is_mixed |= call is not None and call.number <= iteration.after
        record = iteration.record
        number = record.goes_back(step, call, arguments) if record is not None else None
        iteration.again |= number is None if record is not None else call is None
        self._await_end(iteration, step)
        self._mark_before(iteration)
        gradients = self._ran(iteration, run, arguments)
        if number is not None and record is not None:
            record.went_back(number, gradients)
        self._mark_after(iteration)
        self._note_back(step, iteration.peak_bytes)
        return gradients

    def _await_end(self, iteration: Iteration, step: MeteredGraph) -> None:
        """Measure eager code that runs backward after the last graph, such as an embedding's."""
        if self._will_end or not iteration.closely:
            return

        def backward_has_ended() -> None:
            self._will_end = False
            if iteration is not self.iteration or iteration.failed:
                return
            iteration.last_interval = _together(iteration.last_interval, self._running.mark(passed=True))
            iteration.peak_bytes = max(iteration.peak_bytes, iteration.last_interval.peak_bytes)
            self._note_back(step, iteration.peak_bytes)
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
        iteration = self.iteration
        if iteration is None or not iteration.closely or not self._running.is_running:
            return
        now = refusals(self._running.device)
        if now.count > iteration.refused.count:
            iteration.refused = now
            self._iteration_ran_out(iteration, self._running.refused(now), between)

    def _ran(self, iteration: Iteration, run: Run, arguments: list[Any]) -> Any:
        self._in_pass = True
        try:
            return run(arguments)
        except BaseException as error:
            iteration.failed = True
            self._will_end = False
            if isinstance(error, torch.OutOfMemoryError):
                self.learn_refusals(between=False)
            raise
        finally:
            self._in_pass = False

    def _mark_before(self, iteration: Iteration) -> None:
        if iteration.closely:
            iteration.late_bytes += self._running.count_reads()
        self._mark(iteration, passed=True)

    def _mark_after(self, iteration: Iteration) -> None:
        self._mark(iteration, passed=False)
        if iteration.closely:
            reads.start()

    def _mark(self, iteration: Iteration, *, passed: bool) -> None:
        if not self._running.is_running or (not iteration.closely and self._running.device.type == "cuda"):
            return
        measured = self._running.mark(passed=passed)
        if passed:
            measured = _together(iteration.last_interval, measured)
            iteration.last_interval = None
        iteration.intervals.append(measured)
        iteration.peak_bytes = max(iteration.peak_bytes, measured.peak_bytes)

    def _give_up(self) -> None:
        self._window = None
        if self._running.is_running:  # else the reads are noted for another model
            reads.stop()
        self._running.close()


def _together(before: Interval | None, after: Interval) -> Interval:
    """Two intervals without a pass between them as one."""
    return after if before is None else Interval(max(before.peak_bytes, after.peak_bytes), after.end_bytes)
