"""Follows the calls of several models as one: what ran in a turn, what it left, and what was in use meanwhile.

A turn begins with a call of a model and ends before the next call at which no backward pass is outstanding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.core.joined_step import Interval
from shoal.engine.metering import Metering, Run, Window
from shoal.engine.part_record import MeteredPart, Record
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.memory import reads
from shoal.memory.limit import refusals
from shoal.memory.running_meter import RunningMeter
from shoal.memory.static_memory import StaticMemory
from shoal.memory.step_meter import WeakStorage

_MOST_RUNS = 256  # of a turn: a result that is never sent back would make it endless


@dataclass(eq=False)
class Turn:
    """Calls of models, and their backward passes.

    Attributes:
        begin_bytes: in use when it began.
        arguments: of its first call.
        late_bytes: of arguments of later calls, and of what code between the passes reads, such as targets, that were
            there before the meter ran.
        old_gradients: those that were there when it began, by the model's name.
        record: which parts ran and what they handed to each other; None if not needed.
        intervals: of the stretch before each pass, and of the pass.
        peak_bytes: most that was in use from the first pass to the last.
        results: of its calls.
        called: names of the models that were called for training.
        runs: of parts, so far.
        went_back: whether there was a backward pass.
        again: whether something was sent back a second time.
        stayed: names of models whose old gradients were still there when the first backward pass began.
        failed: whether an exception ended it.
        state_bytes: of the optimizers, when it began. came: what was added to it before which interval ended.
        closely: whether it is metered; if not, on CUDA the allocator's peak is left to the user.
        refused: allocations of the device that had been refused when it began.
    """

    begin_bytes: int
    old_gradients: Mapping[str, Sequence[WeakStorage]]
    arguments: Sequence[WeakStorage] = ()
    late_bytes: int = 0
    record: Record | None = field(default_factory=Record)
    intervals: list[Interval] = field(default_factory=list)
    peak_bytes: int = 0
    results: list[WeakStorage] = field(default_factory=list)
    called: list[str] = field(default_factory=list)
    runs: int = 0
    went_back: bool = False
    again: bool = False
    stayed: set[str] = field(default_factory=set)
    failed: bool = False
    state_bytes: int = 0
    came: list[tuple[int, int]] = field(default_factory=list)
    closely: bool = True
    refused: Refusals = field(default_factory=lambda: Refusals(0))

    def state_is_now(self, state_bytes: int) -> None:
        """An optimizer has stepped; its state will be there all turn from now on."""
        if state_bytes > self.state_bytes:
            self.came.append((len(self.intervals), state_bytes - self.state_bytes))
            self.state_bytes = state_bytes

    def as_later(self) -> tuple[int, list[Interval]]:
        """`begin_bytes` and `intervals` of such a turn with the optimizers' state there from its beginning."""
        begin_bytes, intervals = self.begin_bytes, list(self.intervals)
        for until, nbytes in self.came:
            begin_bytes += nbytes
            for place, one in enumerate(intervals[: until + 1]):
                end_bytes = one.end_bytes + (nbytes if place < until else 0)
                intervals[place] = Interval(one.peak_bytes + nbytes, end_bytes)
        return begin_bytes, intervals


class TurnMetering(Metering):
    """Runs the graphs of several models' steps.

    Args:
        static: the models' static memory.
        device: where they run.
        note_back: called with a step that has gone back, and the peak of the turn so far.
        ran_out: called with a turn in which memory ran out, in a graph or between its passes (the loss), or after it;
            with the bytes that it would have taken to go on, and whether it was not in a graph.

    Attributes:
        turn: the one that goes on; None between two.
    """

    def __init__(
        self,
        static: StaticMemory,
        device: torch.device,
        note_back: Callable[[MeteredPart, int], None],
        ran_out: Callable[[Turn, int, bool], None],
    ) -> None:
        super().__init__(static, lambda window: None)
        self.turn: Turn | None = None
        self._running = RunningMeter(device)
        self._note_back = note_back
        self._turn_ran_out = ran_out

    def open(self) -> None:
        """Count what is allocated from here on, where no other model's calls are being metered.

        Raises:
            InputError: on the CPU, where there is no C++ compiler.
        """
        if self._has_the_counter():
            self._static.keep_library_memory()
            self._running.start()
            self._window = Window()  # other models are not metered while these are under way
            self._takes_the_counter()

    def begin(self, models: Mapping[str, nn.Module], arguments: Iterable[torch.Tensor], *, closely: bool) -> Interval:
        """A turn begins; what was in use since the one before.

        Args:
            models: by name.
            arguments: of its first call.
            closely: whether the turn is to be metered.
        """
        reads.stop()
        meter, between = self._running, Interval(0, 0)
        if not meter.is_running and self._has_the_counter():
            self._static.keep_library_memory()
            meter.start()
            self._window = Window()  # other models are not metered while these are under way
            self._takes_the_counter()
        elif closely or meter.device.type != "cuda":
            between = meter.mark()
        if not closely:
            self.turn = Turn(between.end_bytes, {}, record=None, closely=False)
            return between
        arguments = list(arguments)
        meter.restart_from([*self._static.tensors(), *arguments])
        gradients = {
            name: [WeakStorage(p.grad) for p in model.parameters() if p.grad is not None]
            for name, model in models.items()
        }
        self.turn = Turn(
            meter.mark().end_bytes,
            gradients,
            [WeakStorage(argument) for argument in arguments],
            state_bytes=self._static.state_there_bytes(),
            refused=refusals(meter.device),
        )
        return between

    def goes_on_with(self, arguments: Iterable[torch.Tensor]) -> None:
        """Another call of the turn begins."""
        if self.turn is not None:
            self.turn.late_bytes += self._running.count(arguments)

    def is_over(self) -> bool:
        """Whether nothing of the turn is outstanding."""
        turn = self.turn
        if turn is None or turn.failed or turn.runs > _MOST_RUNS:
            return True
        turn.results = [result for result in turn.results if result.is_alive]
        return not self.calls.under_way() and (turn.went_back or not turn.results)

    def in_use_bytes(self) -> int:
        """Device bytes in use now."""
        return self._running.in_use_bytes()

    def forward(self, step: MeteredPart, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        turn = self.turn
        given = self.calls.keys_needed(step, arguments)
        if turn is None:
            outputs = run(arguments)
            self.calls.started(given, outputs, step.n_outputs, step.results, step)
            return outputs
        fresh: list[bool] = []
        held: list[WeakStorage | None] = []
        if turn.record is not None:
            there = {one.key for one in turn.arguments if one.is_alive}
            held = [WeakStorage(a) if isinstance(a, torch.Tensor) else None for a in arguments]
            fresh = [
                one is not None and one.key not in there and self._running.is_fresh(a)
                for a, one in zip(arguments, held, strict=True)
            ]
        self._mark_before(turn)
        outputs = self._ran(turn, run, arguments)
        turn.runs += 1
        self.calls.started(given, outputs, step.n_outputs, step.results, step)
        self._mark_after(turn)
        if turn.record is not None:
            turn.record.went_forward(step, self.calls.number, held, fresh, outputs)
        return outputs

    def backward(self, step: MeteredPart, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        call = self.calls.goes_back(arguments, step)
        turn = self.turn
        if turn is None:
            return run(arguments)
        if not turn.went_back:
            turn.went_back = True
            turn.stayed = {name for name, old in turn.old_gradients.items() if any(one.is_alive for one in old)}
        number = turn.record.goes_back(step, arguments) if turn.record is not None else None
        turn.again |= call is None or (number is None and turn.record is not None)
        self._mark_before(turn)
        gradients = self._ran(turn, run, arguments)
        if number is not None and turn.record is not None:
            turn.record.went_back(number, gradients)
        self._mark_after(turn)
        self._note_back(step, turn.peak_bytes)
        return gradients

    def close(self) -> None:
        """Meter nothing any more."""
        self._give_up()

    def learn_refusals(self, *, between: bool = True) -> None:
        """Learn whether memory ran out since a metered turn began; whoever has caught it does not report it.

        Args:
            between: whether no graph of the turn runs.
        """
        turn = self.turn
        if turn is None or not turn.closely or not self._running.is_running:
            return
        now = refusals(self._running.device)
        if now.count > turn.refused.count:
            turn.refused = now
            self._turn_ran_out(turn, self._running.refused(now), between)

    def _ran(self, turn: Turn, run: Run, arguments: list[Any]) -> Any:
        try:
            return run(arguments)
        except BaseException as error:
            turn.failed = True
            if isinstance(error, torch.OutOfMemoryError):
                self.learn_refusals(between=False)
            raise

    def _mark_before(self, turn: Turn) -> None:
        if turn.closely:
            turn.late_bytes += self._running.count_reads()
        self._mark(turn)

    def _mark_after(self, turn: Turn) -> None:
        self._mark(turn)
        if turn.closely:
            reads.start()

    def _mark(self, turn: Turn) -> None:
        if not turn.closely and self._running.device.type == "cuda":
            return
        measured = self._running.mark()
        turn.intervals.append(measured)
        if len(turn.intervals) > 1:
            turn.peak_bytes = max(turn.peak_bytes, measured.peak_bytes)

    def _give_up(self) -> None:
        self._window = None
        reads.stop()
        self._running.close()
