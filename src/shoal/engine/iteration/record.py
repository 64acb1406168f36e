"""How the graphs of an iteration ran while it was metered: in what order, and what they handed to each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.traced_strides import Departure
from shoal.core.joined_step import Part, Pass, Place
from shoal.core.plan import Plan
from shoal.core.shares import Share
from shoal.core.step import StepGraph
from shoal.engine.calls import Call
from shoal.engine.loop_memory import Basis
from shoal.memory.storage_bytes import WeakStorage


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
        share: under which it runs.
    """

    graph: StepGraph
    ports: Ports
    share: Share

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
