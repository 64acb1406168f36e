"""How the graphs of an iteration ran while it was metered: in what order, and what they handed to each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.traced_strides import Departure
from shoal.core.joined_step import Interval, Part, Pass, Place
from shoal.core.plan import Plan
from shoal.core.residence import Residence
from shoal.core.step import StepGraph
from shoal.engine.calls import Call
from shoal.engine.loop_memory import Basis
from shoal.lowlevel.cuda_allocator import Refusals
from shoal.memory.storage_bytes import WeakStorage

Phase = Literal["forward", "backward"]


class Ports(NamedTuple):
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


class MeteredGraph(Metered, Protocol):
    """A graph as it runs here.

    Attributes:
        graph: its step, with costs.
        ports: what its graphs are given and return.
        share: the residences under which it runs.
    """

    graph: StepGraph
    ports: Ports
    share: Mapping[str, Residence]

    def bytes_in_call(self) -> Mapping[str, int]:
        """What its storages took in the last call, by name, where its sizes vary; `graph` has what they may take."""


@dataclass(eq=False)
class GraphRun:
    """One run of a graph within an iteration.

    Attributes:
        step: the part.
        call: what tells its backward pass from those of other runs of the same graph.
        sizes: as of `MeteredGraph.bytes_in_call`.
        same, fresh: as of `Part`.
        added: gradients of parameters that another run has made a gradient of before.
        gathered: as of `Part`.
        tangents: those that its backward pass was given, with their storages.
        held_tangents, held_results: as of `Part`.
        results: what its forward pass has handed to its caller.
    """

    step: MeteredGraph
    call: Call | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    same: dict[int, Place] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    added: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    tangents: list[tuple[int, WeakStorage]] = field(default_factory=list)
    held_tangents: set[int] = field(default_factory=set)
    held_results: set[int] = field(default_factory=set)
    results: list[tuple[int, WeakStorage]] = field(default_factory=list)

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
        fresh = {s for s in self.fresh if kinds.get(s) == "input"}  # a model may be younger than the meter
        return Part(
            graph,
            results,
            self.same,
            fresh,
            passed | self.added,
            self.held_tangents,
            self.held_results,
            frozenset(self.gathered),
        )


class Record:
    """The graphs of one iteration as they ran while it was metered.

    Attributes:
        runs: of parts, in the order of their forward passes.
        passes: what ran when.
        arguments: of the models' calls.
    """

    def __init__(self) -> None:
        self.arguments: Sequence[WeakStorage] = ()
        self.runs: list[GraphRun] = []
        self.passes: list[Pass] = []
        self._made: dict[int, tuple[WeakStorage, Place]] = {}
        self._has_gradient: set[Place] = set()
        self._given: set[int] = set()

    @property
    def eager_argument_bytes(self) -> int:
        """Of arguments that no part was given: only eager code reads them, as a detector's transform its images."""
        return sum({held.key: held.nbytes for held in self.arguments if held.key not in self._given}.values())

    def went_forward(
        self,
        step: MeteredGraph,
        call: Call | None,
        arguments: Sequence[WeakStorage | None],
        fresh: Sequence[bool],
        outputs: Sequence[Any],
        lasting: Collection[int] | None = None,
    ) -> None:
        """A part's forward pass is over.

        Args:
            step: the part.
            call: as of `GraphRun`.
            arguments: what it was given; None for what is no tensor.
            fresh: which of them were made during the step.
            outputs: what its graph returned.
            lasting: keys of the parameters that are there all step; any other is gathered. None: all are.
        """
        number = len(self.runs)
        this = GraphRun(step, call, step.bytes_in_call())
        self.runs.append(this)
        self.passes.append((number, "forward"))
        parameters = {s.id for s in step.graph.storages if s.kind == "parameter"} if lasting is not None else set()
        for storage, one, is_new in zip(step.ports.inputs, arguments, fresh, strict=True):
            if one is not None:
                self._given.add(one.key)
            if one is None or storage < 0 or storage in this.same:
                continue
            if storage in parameters and one.key not in (lasting or ()):
                this.gathered.add(storage)
                is_new = False
            if not self._recall(this, storage, one):
                self._made[one.key] = one, (number, storage)
                if is_new:
                    this.fresh.add(storage)
        pairs = zip(step.ports.outputs, outputs, strict=False)
        own = [(s, WeakStorage(t)) for s, t in pairs if s in step.ports.results and isinstance(t, torch.Tensor)]
        this.results = [(storage, held) for storage, held in own if storage not in this.same]
        self._note(number, step.ports.outputs, outputs)

    def goes_back(self, step: MeteredGraph, call: Call | None, arguments: Sequence[Any]) -> int | None:
        """A part's backward pass begins; the number of its run, None where none is known that has not gone back.

        Args:
            step: the part.
            call: the one that goes back; None where that is not known.
            arguments: of its backward graph.
        """
        number = self._number_of(step, call)
        if number is None:
            return None
        this = self.runs[number]
        self.passes.append((number, "backward"))
        for storage, tangent in zip(step.ports.tangents, arguments[-step.n_tangents :], strict=False):
            if isinstance(tangent, torch.Tensor) and storage >= 0:
                held = WeakStorage(tangent)
                this.tangents.append((storage, held))
                self._recall(this, storage, held)
        kinds = {s.id: s.kind for s in step.graph.storages}
        for given, gradient in zip(step.ports.inputs, step.ports.gradients, strict=False):
            if gradient >= 0 and kinds.get(given) == "parameter":
                origin = this.same.get(given, (number, given))
                if origin in self._has_gradient:
                    this.added.add(gradient)
                self._has_gradient.add(origin)
        return number

    def went_back(self, number: int, gradients: Sequence[Any]) -> None:
        """The backward graph of a run has returned."""
        this = self.runs[number]
        this.held_tangents = {storage for storage, held in this.tangents if held.is_alive}
        this.held_results = {storage for storage, held in this.results if held.is_alive}
        self._note(number, self.runs[number].step.ports.gradients, gradients)

    def _recall(self, this: GraphRun, storage: int, held: WeakStorage) -> bool:
        """Whether the memory has been seen in this step; then it is noted whose it is."""
        known = self._made.get(held.key)
        if known is None or not known[0].is_alive:
            return False
        this.same[storage] = known[1]
        return True

    def _note(self, number: int, storages: Sequence[int], tensors: Sequence[Any]) -> None:
        own = self.runs[number].same
        for storage, tensor in zip(storages, tensors, strict=False):
            if isinstance(tensor, torch.Tensor) and storage >= 0 and storage not in own:
                held = WeakStorage(tensor)
                known = self._made.get(held.key)
                if known is None or not known[0].is_alive:
                    self._made[held.key] = held, (number, storage)

    def _number_of(self, step: MeteredGraph, call: Call | None) -> int | None:
        """The run whose backward pass begins; where the call is not known, the latest whose autograd node is not."""
        gone = {number for number, phase in self.passes if phase == "backward"}
        left = [(number, run) for number, run in enumerate(self.runs) if run.step is step and number not in gone]
        if call is not None:
            return next((number for number, run in left if run.call is call), None)
        return max((number for number, run in left if run.call is None or run.call.node is None), default=None)


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
    fates: Fates = field(default_factory=lambda: Fates())
    has_ended: bool = False
    reserved_bytes: int = 0
    _phases: list[Phase] = field(default_factory=list)
    _given: list[tuple[int, int]] = field(default_factory=list)

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
        self._phases.append(phase)
        if step not in self.steps:
            self.steps.append(step)

    def was_given(self, nbytes: int) -> None:
        """Code between the passes has read so much that was there before the iteration: it has been all along."""
        self.late_bytes += nbytes
        self._given.append((len(self.intervals), nbytes))

    def measured(self) -> Measured:
        """What it has used so far."""
        peaks: dict[str, list[int]] = {"forward": [0], "loss": [0], "backward": [0]}
        before_backward_bytes = 0
        for place, one in enumerate(self.intervals):
            phase, is_pass = self._phases[place // 2], bool(place % 2)
            later_bytes = sum(nbytes for until, nbytes in self._given if place < until)
            if place:  # before the first pass nothing has run yet
                peaks[phase if is_pass else "loss"].append(one.peak_bytes + later_bytes)
            if phase == "backward" and not is_pass and one.end_bytes:
                before_backward_bytes = max(before_backward_bytes, one.end_bytes + later_bytes)
        given_bytes = sum(nbytes for _, nbytes in self._given)
        forward_bytes, loss_bytes, backward_bytes = map(max, peaks.values())
        return Measured(
            forward_bytes, loss_bytes, backward_bytes, before_backward_bytes, self.reserved_bytes, given_bytes
        )


def _note_results(call: Call, there: set[int], gone: set[int]) -> None:
    alive = {place for place, held in call.outputs.items() if held.is_alive}
    there |= alive
    gone |= set(call.outputs) - alive
