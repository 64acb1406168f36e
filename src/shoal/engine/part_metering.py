"""Follows the parts of a model that is several graphs: which ran in what order, and what they handed to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.core.joined_step import Interval, Part, Pass, Place
from shoal.core.residence import Residence
from shoal.core.step import StepGraph
from shoal.engine.calls import Call
from shoal.engine.metering import Metered, Metering, Run, Window
from shoal.lowlevel.torch_state import call_at_end_of_backward
from shoal.memory.static_memory import distinct_bytes
from shoal.memory.step_meter import StepMeter, WeakStorage


@dataclass(frozen=True)
class Ports:
    """Which storages of a part's step its graphs are given and return, by place; -1 for what is none.

    Attributes:
        inputs, outputs: of the forward graph; `results` are those outputs that the caller gets.
        tangents: the last inputs of the backward graph.
        gradients: its outputs, which belong to `inputs`.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]

    @staticmethod
    def of(captured: Captured) -> Ports:
        placeholders = captured.joint.graph.find_nodes(op="placeholder")

        def storages(nodes: Iterable[Any]) -> tuple[int, ...]:
            return tuple(captured.storage_of.get(node, -1) if isinstance(node, fx.Node) else -1 for node in nodes)

        outputs = storages(captured.forward_outputs)
        return Ports(
            storages(n for n in placeholders if not n.name.startswith("tangents")),
            outputs,
            tuple(outputs[place] for place in captured.results),
            storages(n for n in placeholders if n.name.startswith("tangents")),
            storages(captured.backward_outputs),
        )


class MeteredPart(Metered, Protocol):
    """A part as it runs here.

    Attributes:
        graph: its step, with costs.
        ports: what its graphs are given and return.
        share: the residences under which it runs.
    """

    graph: StepGraph
    ports: Ports
    share: Mapping[str, Residence]


@dataclass(eq=False)
class PartRun:
    """One run of a part within a step.

    Attributes:
        step: the part.
        call: number of the model's call that it belongs to.
        same, fresh: as of `Part`.
        added: gradients of parameters that another run has made a gradient of before.
        gathered: as of `Part`.
    """

    step: MeteredPart
    call: int
    same: dict[int, Place] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    added: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)

    def part(self) -> Part:
        """The same as data."""
        graph, ports = self.step.graph, self.step.ports
        kinds = {s.id: s.kind for s in graph.storages}
        passed = {
            gradient
            for given, gradient in zip(ports.inputs, ports.gradients, strict=False)
            if gradient >= 0
            and (
                given in self.gathered or (kinds.get(given) == "input" and (given in self.same or given in self.fresh))
            )
        }
        results = {s for s in ports.results if s >= 0}
        return Part(graph, results, self.same, self.fresh, passed | self.added, self.gathered)


@dataclass(eq=False)
class Record:
    """The parts of one step as they ran while it was metered.

    Attributes:
        runs: of parts, in the order of their forward passes.
        passes: what ran when.
        static_bytes: of parameters, buffers, optimizer state and gradients that were there when it began.
    """

    runs: list[PartRun] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    static_bytes: int = 0

    def of_last_call(self) -> list[int]:
        """Which runs belong to the last call of the model."""
        last = max((run.call for run in self.runs), default=0)
        return [number for number, run in enumerate(self.runs) if run.call == last]


class PartMetering(Metering):
    """`Metering` of a model that is several graphs: one window from its first part's forward pass on.

    Args:
        static, learn: as for `Metering`.

    Attributes:
        arguments: what the model was called with, while it is.
        in_call: whether it is.
    """

    def __init__(self, static: Any, learn: Callable[[Window], None]) -> None:
        super().__init__(static, learn)
        self.arguments: list[torch.Tensor] = []
        self.in_call = False
        self.record = Record()
        self._recorded: Window | None = None
        self._made: dict[int, tuple[WeakStorage, Place]] = {}
        self._has_gradient: set[Place] = set()
        self._is_of_record = False  # the pass that runs

    def forward(self, step: MeteredPart, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        if self._window is None and not step.steps_to_meter:
            return super().forward(step, run, arguments)
        fresh = [self._is_fresh(argument) for argument in arguments]
        held = [WeakStorage(a) if isinstance(a, torch.Tensor) else None for a in arguments]
        outputs = super().forward(step, run, arguments)
        if self._window is None:
            return outputs
        if self._window is not self._recorded:
            there_bytes = sum(held.nbytes for held in self._old_gradients if held.is_alive)
            there_bytes += distinct_bytes(self._static.lasting_tensors())
            self.record, self._recorded = Record(static_bytes=there_bytes), self._window
            self._made, self._has_gradient = {}, set()
            fresh = [False] * len(fresh)
        number = len(self.record.runs)
        this = PartRun(step, self.calls.number)
        self.record.runs.append(this)
        self.record.passes.append((number, "forward"))
        own = {tensor.untyped_storage()._cdata for tensor in self._static.lasting_tensors()}
        parameters = {s.id for s in step.graph.storages if s.kind == "parameter"}
        for storage, one, is_new in zip(step.ports.inputs, held, fresh, strict=True):
            if one is None or storage < 0 or storage in this.same:
                continue
            if storage in parameters and one.key not in own:
                this.gathered.add(storage)
                is_new = False
            if not self._recall(this, storage, one):
                self._made[one.key] = one, (number, storage)
                if is_new:
                    this.fresh.add(storage)
        self._note(number, step.ports.outputs, outputs)
        return outputs

    def backward(self, step: MeteredPart, run: Run, arguments: list[Any]) -> Any:  # type: ignore[override]
        number = self._number_of(step) if self._window is not None else None
        if number is None or self._window is not self._recorded:
            return super().backward(step, run, arguments)
        this = self.record.runs[number]
        self.record.passes.append((number, "backward"))
        for storage, tangent in zip(step.ports.tangents, arguments[-step.n_tangents :], strict=False):
            if isinstance(tangent, torch.Tensor) and storage >= 0:
                self._recall(this, storage, WeakStorage(tangent))
        kinds = {s.id: s.kind for s in step.graph.storages}
        for given, gradient in zip(step.ports.inputs, step.ports.gradients, strict=False):
            if gradient >= 0 and kinds.get(given) == "parameter":
                origin = this.same.get(given, (number, given))
                if origin in self._has_gradient:
                    this.added.add(gradient)
                self._has_gradient.add(origin)
        self._is_of_record = True
        try:
            gradients = super().backward(step, run, arguments)
        finally:
            self._is_of_record = False
        if self._window is self._recorded:
            self._note(number, step.ports.gradients, gradients)
        return gradients

    def intervals(self) -> list[Interval]:
        """Of the window that has just ended."""
        return list(self._meter.intervals) if self._meter is not None else []

    def settle(self) -> None:
        """Before a call: end a window whose parts will not go back any more, and drop one of which none did."""
        window, meter = self._window, self._meter
        if window is None or meter is None or self.calls.under_way():
            return
        if any(phase == "backward" for _, phase in self.record.passes):
            self._close(window, meter.end(paused=True))
        else:
            self._give_up()

    def abandon(self) -> None:
        """Stop metering: the backward pass of what has run is not expected any more."""
        self._give_up()

    def _goes_back(self, arguments: Sequence[Any]) -> Call | None:
        call = super()._goes_back(arguments)
        # A part that saves nothing of its own is known by its place among the passes.
        return Call(None, True, {}, self.calls.number) if call is None and self._is_of_record else call

    def _end_backward(self, tangents: Sequence[WeakStorage]) -> None:
        """Where parameters are gathered, the window ends with the whole backward pass, when gradients are sent."""
        window, meter = self._window, self._meter
        if window is None or meter is None or not any(run.gathered for run in self.record.runs):
            super()._end_backward(tangents)
            return
        meter.pause()
        if not self._goes_on():
            call_at_end_of_backward(lambda: self._close_with_tail(window, meter))

    def _close_with_tail(self, window: Window, meter: StepMeter) -> None:
        if self._window is not window:
            return
        meter.pause()
        static, passed = self._static, self._static.gradients_pass
        # Gradients that are there by now are this step's, and metered, unless they are added to what was there before.
        static.gradients_pass = passed or not any(held.is_alive for held in self._old_gradients)
        try:
            self._close(window, meter.end(paused=True))
        finally:
            static.gradients_pass = passed

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

    def _recall(self, this: PartRun, storage: int, held: WeakStorage) -> bool:
        """Whether the memory has been seen in this step; then it is noted whose it is."""
        known = self._made.get(held.key)
        if known is None or not known[0].is_alive:
            return False
        this.same[storage] = known[1]
        return True

    def _note(self, number: int, storages: Sequence[int], tensors: Sequence[Any]) -> None:
        own = self.record.runs[number].same
        for storage, tensor in zip(storages, tensors, strict=False):
            if isinstance(tensor, torch.Tensor) and storage >= 0 and storage not in own:
                held = WeakStorage(tensor)
                known = self._made.get(held.key)
                if known is None or not known[0].is_alive:
                    self._made[held.key] = held, (number, storage)

    def _number_of(self, step: MeteredPart) -> int | None:
        """The run whose backward pass begins: the latest of this part that has not gone back."""
        gone = {number for number, phase in self.record.passes if phase == "backward"}
        runs = enumerate(self.record.runs)
        return max((number for number, run in runs if run.step is step and number not in gone), default=None)

    def _in_use(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        return [*super()._in_use(arguments), *self.arguments]
