"""An iteration as it is metered: what ran, what was in use meanwhile, and what became of its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.core.joined_step import Interval
from shoal.engine.calls import Call
from shoal.engine.iteration.record import Metered, Record
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.memory.storage_bytes import WeakStorage

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Measured:
    """Device bytes of one step.

    Attributes:
        forward_bytes, loss_bytes, backward_bytes: peak within each part; `loss` is everything between the forward and
            the backward graph, 0 if it could not be measured.
        before_backward_bytes: in use when a backward pass begins; 0 if it could not be measured.
        given_bytes: of what code between the passes reads and the passes do not, such as targets, that was there before
            the step: part of all of these.
        reserved_bytes: most that CUDA's allocator had reserved meanwhile, for all of the process; 0 on the CPU.
    """

    forward_bytes: int
    loss_bytes: int
    backward_bytes: int
    before_backward_bytes: int = 0
    reserved_bytes: int = 0
    given_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak between the start of the forward pass and the end of the backward pass."""
        return max(self.forward_bytes, self.loss_bytes, self.backward_bytes)


@dataclass
class Fates:
    """What became of the results of an iteration, and of gradients.

    Attributes:
        kept: places of results that were still there when a backward pass began. released: of those that were not.
        outlived: places of results that were still there when it ended. let_go: of those that were not.
        gradients_stayed: whether gradients of an earlier step were there when a backward pass began.
        tangents_stayed: whether a gradient of a result, of more than one number, was still held by somebody when its
            backward pass ended.
        gradients_given: whether results of more than one number had gradients at all.
    """

    kept: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    outlived: set[int] = field(default_factory=set)
    let_go: set[int] = field(default_factory=set)
    gradients_stayed: bool = False
    tangents_stayed: bool = False
    gradients_given: bool = False

    def begins_backward(
        self, call: Call, tangents: Sequence[WeakStorage], old_gradients: Iterable[WeakStorage]
    ) -> None:
        """The backward pass of a call begins.

        Args:
            call: the one.
            tangents: gradients of its results.
            old_gradients: those that were there before the iteration.
        """
        _note_results(call, self.kept, self.released)
        self.gradients_stayed |= any(held.is_alive for held in old_gradients)
        self.gradients_given |= bool(tangents)

    def ends_backward(self, call: Call, tangents: Sequence[WeakStorage]) -> None:
        """It is over."""
        _note_results(call, self.outlived, self.let_go)
        self.tangents_stayed |= any(tangent.is_alive for tangent in tangents)


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
        steps: whose graphs ran, each once.
        failed: whether an exception ended it.
        state_bytes: of the optimizers, when it began. came: what was added to it before which interval ended.
        closely: whether it is metered; if not, on CUDA the allocator's peak is left to the user.
        refused: allocations of the device that had been refused when it began.
        after: the number of the last call before it.
        is_beside: whether calls before it wait for backward passes that may never come.
        is_mixed: whether one of them has come.
        fates: what became of its results, and of gradients.
        has_ended: whether its last backward pass is over.
        reserved_bytes: as of `Measured`.
        phases: of its passes, in order.
        given: what `was_given`, and how many intervals were over then.
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
    steps: list[Metered] = field(default_factory=list)
    failed: bool = False
    state_bytes: int = 0
    came: list[tuple[int, int]] = field(default_factory=list)
    closely: bool = True
    refused: Refusals = field(default_factory=lambda: Refusals(0))
    after: int = 0
    is_beside: bool = False
    is_mixed: bool = False
    fates: Fates = field(default_factory=Fates)
    has_ended: bool = False
    reserved_bytes: int = 0
    phases: list[Phase] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)

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

    def went(self, phase: Phase, step: Metered) -> None:
        """A pass of a step begins."""
        self.phases.append(phase)
        if step not in self.steps:
            self.steps.append(step)

    def was_given(self, nbytes: int) -> None:
        """Code between the passes has read so much that was there before the iteration: it has been all along."""
        self.late_bytes += nbytes
        self.given.append((len(self.intervals), nbytes))

    def measured(self) -> Measured:
        """What it has used so far."""
        peaks: dict[str, list[int]] = {"forward": [0], "loss": [0], "backward": [0]}
        before_backward_bytes = 0
        for place, one in enumerate(self.intervals):
            phase, is_pass = self.phases[place // 2], bool(place % 2)
            later_bytes = sum(nbytes for until, nbytes in self.given if place < until)
            if place:  # before the first pass nothing has run yet
                peaks[phase if is_pass else "loss"].append(one.peak_bytes + later_bytes)
            if phase == "backward" and not is_pass and one.end_bytes:
                before_backward_bytes = max(before_backward_bytes, one.end_bytes + later_bytes)
        given_bytes = sum(nbytes for _, nbytes in self.given)
        forward_bytes, loss_bytes, backward_bytes = map(max, peaks.values())
        return Measured(
            forward_bytes, loss_bytes, backward_bytes, before_backward_bytes, self.reserved_bytes, given_bytes
        )


def _note_results(call: Call, there: set[int], gone: set[int]) -> None:
    alive = {place for place, held in call.outputs.items() if held.is_alive}
    there |= alive
    gone |= set(call.outputs) - alive
