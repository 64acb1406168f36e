"""Meters the parts of a model that is several graphs, from its call to the end of its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.core.joined_step import Interval
from shoal.engine.calls import Call
from shoal.engine.metering import Metered, Metering, Run, Window
from shoal.engine.part_record import MeteredPart, Record
from shoal.lowlevel.torch_state import call_at_end_of_backward
from shoal.memory.step_meter import StepMeter, WeakStorage
from shoal.memory.storage_bytes import distinct_bytes


class PartMetering(Metering):
    """`Metering` of a model that is several graphs: one window from the model's call on.

    Args:
        static, learn, ran_out, ran_out_after: as for `Metering`.

    Attributes:
        arguments: what the model was called with, while it is.
        in_call: whether it is.
    """

    def __init__(
        self,
        static: Any,
        learn: Callable[[Window], None],
        ran_out: Callable[[Window, int, bool], None] | None = None,
        ran_out_after: Callable[[Window], None] | None = None,
    ) -> None:
        super().__init__(static, learn, ran_out, ran_out_after)
        self.arguments: list[torch.Tensor] = []
        self.in_call = False
        self._from_call = False
        self._is_of_record = False  # the pass that runs
        self.record = Record()
        self._recorded: Window | None = None

    def begin_call(self, device: torch.device) -> None:
        """Meter the call that begins, also what eager code uses before its first graph, where that can be counted."""
        if self._window is not None:
            return
        self._open(device, [], self.arguments)
        if self._window is None or self._meter is None:
            return
        if not self._meter.counts_between:
            self._give_up()
            return
        self._begin_record(self._window, from_call=True)

    def _begin_record(self, window: Window, *, from_call: bool) -> None:
        there_bytes = sum(held.nbytes for held in self._old_gradients if held.is_alive)
        there_bytes += distinct_bytes(self._static.lasting_tensors())
        self.record, self._recorded, self._from_call = Record(there_bytes), window, from_call

    def forward(self, step: MeteredPart, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        if self._window is None and not step.steps_to_meter:
            return super().forward(step, run, arguments)
        fresh = [self._is_fresh(argument) for argument in arguments]
        held = [WeakStorage(a) if isinstance(a, torch.Tensor) else None for a in arguments]
        outputs = super().forward(step, run, arguments)
        if self._window is None:
            return outputs
        if self._window is not self._recorded:
            self._begin_record(self._window, from_call=False)
            fresh = [False] * len(fresh)
        self.record.arguments = [WeakStorage(a) for a in self.arguments if a.device.type == step.device.type]
        lasting = {tensor.untyped_storage()._cdata for tensor in self._static.lasting_tensors()}
        self.record.went_forward(step, self.calls.number, held, fresh, outputs, lasting)
        return outputs

    def backward(self, step: MeteredPart, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        if self._window is None or self._window is not self._recorded:
            return super().backward(step, run, arguments)
        number = self.record.goes_back(step, arguments)
        if number is None:
            return super().backward(step, run, arguments)

        def noted(given: list[Any]) -> Any:
            gradients = run(given)
            self.record.went_back(number, gradients)
            return gradients

        self._is_of_record = True
        try:
            return super().backward(step, noted, arguments)
        finally:
            self._is_of_record = False

    def intervals(self) -> list[Interval]:
        """Of the window that has just ended: what was in use before it, then of each stretch and each pass in turn."""
        found = list(self._meter.intervals) if self._meter is not None else []
        return found if self._from_call else [*found[:1], *found]

    def settle(self) -> None:
        """Before a call: end a window whose parts will not go back any more, and drop one of which none did."""
        window, meter = self._window, self._meter
        if window is None or meter is None or self.calls.under_way():
            return
        if any(phase == "backward" for _, phase in self.record.passes):
            self._close(window, meter.end(paused=True))
        else:
            self._give_up()

    def _end(self, window: Window, meter: StepMeter) -> None:
        meter.pause()

        def engine_is_done() -> None:  # eager code before the first graph has gone back too
            if self._window is window and not self._goes_on():
                measured = meter.end(paused=True, counts_since=True)
                with self._static.with_gradients_of({held.key for held in self._old_gradients if held.is_alive}):
                    self._close(window, measured)

        call_at_end_of_backward(engine_is_done)

    def abandon(self) -> None:
        """Stop metering: the backward pass of what has run is not expected any more."""
        self._give_up()

    def _goes_back(self, step: Metered, arguments: Sequence[Any]) -> Call | None:
        call = super()._goes_back(step, arguments)
        # A part that saves its inputs by itself is known by its place among the passes.
        return Call(None, True, {}, (), self.calls.number) if call is None and self._is_of_record else call

    def _goes_on(self) -> bool:
        if self.in_call:  # something is sent back before the forward pass is over
            return True
        # A part that saves nothing of its own leaves no trace by which it is seen to be under way.
        return super()._goes_on() or any(
            (run, "backward") not in self.record.passes for run in range(len(self.record.runs))
        )

    def in_use_bytes(self) -> int:
        """Device bytes in use now, as far as they are known."""
        if self._window is not None and self._meter is not None and self._meter.intervals:
            return self._meter.in_use_bytes()
        return distinct_bytes([*self._static.tensors(), *self.arguments])

    def _is_fresh(self, argument: Any) -> bool:
        if self._window is None or self._meter is None or not isinstance(argument, torch.Tensor):
            return False
        return self._meter.is_fresh(argument)

    def _in_use(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        return [*super()._in_use(arguments), *self.arguments]
