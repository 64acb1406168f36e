"""A model that is several graphs: captured part by part, run once, then planned as one step.

Where Dynamo cannot capture a model's call as one graph, the call is a sequence of parts with eager code between them.
The first step runs each part with everything kept while there is ample room, then with as little kept as can be, and is
metered: what parts hand to each other, and what eager code uses. Then one plan is made for the whole sequence
(`shoal.core.joined_step`), and every part gets its share of it. A part that runs several times in a step has a share
for each of its runs.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch.utils._pytree import tree_leaves

from shoal.capture.capture_step import InputPlaces
from shoal.capture.captured import Captured
from shoal.capture.graph_breaks import break_after, capturing_parts
from shoal.capture.pieces import choose_pieces, in_pieces
from shoal.capture.varying_sizes import make_static
from shoal.core.joined_step import label
from shoal.core.plan import Plan
from shoal.core.progress import doing, preparing
from shoal.core.residence import Residence
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Pieces
from shoal.cost.profile import profile_step
from shoal.engine.backend import STEPS_TO_METER, PlannedStep
from shoal.engine.graph_runner import compiler
from shoal.engine.metering import Window
from shoal.engine.once_differentiable import once_differentiable
from shoal.engine.part_metering import PartMetering, Ports
from shoal.engine.part_planning import KnownStep, MeasuredParts, PartedStep, first_share, fits_easily, no_graph
from shoal.engine.session import Session
from shoal.engine.step_planning import WHOLE_FORM
from shoal.errors import BudgetError
from shoal.memory.limit import no_memory_limit

log = logging.getLogger("shoal")


@dataclass(eq=False)
class _Part:
    """A graph of Dynamo's, to be compiled for each of its runs in a step."""

    graph: fx.GraphModule
    inputs: Sequence[Any]
    places: InputPlaces
    context: TracingContext | None
    broken: str


@dataclass(eq=False)
class _Node:
    """A part at one place of the sequence.

    Attributes:
        part: None for where every sequence begins.
        before, after: the nodes around it. What follows a part may differ from step to step.
        share: its residences in the plan of the step; None before there is one.
        pieces: its convolutions that are computed in pieces; None before it is compiled.
        step, run: the part as it is compiled for this place; None before.
    """

    part: _Part | None = None
    before: _Node | None = None
    after: dict[_Part, _Node] = field(default_factory=dict)
    share: Mapping[str, Residence] | None = None
    pieces: tuple[Pieces, ...] | None = None
    step: PartStep | None = None
    run: Callable[..., Any] | None = None

    def followed_by(self, part: _Part) -> _Node:
        """The node of a part that comes next."""
        if part not in self.after:
            self.after[part] = _Node(part, self)
        return self.after[part]

    def path(self) -> list[_Node]:
        """The nodes from the first part to this one."""
        path: list[_Node] = []
        node: _Node | None = self
        while node is not None and node.part is not None:
            path.append(node)
            node = node.before
        return path[::-1]


class PartStep(PlannedStep):
    """One part at one place, as AOTAutograd compiles it.

    Attributes:
        trains: whether it has a backward pass; the rest is there only then.
        graph: its own step, with costs.
        ports: what its graphs are given and return.
        share: the residences under which it runs.
    """

    graph: StepGraph
    ports: Ports

    def __init__(self, steps: PartedSteps, node: _Node, places: InputPlaces) -> None:
        super().__init__(steps.session, steps.run_graphs, places, WHOLE_FORM, aten_only=steps.aten_only)
        self.steps = steps
        self.node = node
        self.trains = False
        self.share: Mapping[str, Residence] = {}

    def make_plan(self, captured: Captured) -> Captured:
        """Take the part's share of the plan, or for a first run what leaves most room."""
        in_use_bytes = self.steps.metering.in_use_bytes()
        with no_memory_limit():
            if self.node.pieces is None:
                self.node.pieces = self.steps.pieces_of(captured, in_use_bytes)
            captured = in_pieces(captured, self.node.pieces)
            self.graph = profile_step(captured, captured.device)
        self.ports, self.trains = Ports.of(captured), True
        share = self.node.share
        self.share = self.steps.first_share(self.graph, captured.device, in_use_bytes) if share is None else share
        self.plan = Plan(self.graph, self.share, "parts")
        return captured


class PartedSteps:
    """The steps of one model that is several graphs.

    Args:
        session: of the model.
        kernels: as of `shoal.compile`.
        broken: where Dynamo could not go on when the model was to be one graph, and why.
    """

    def __init__(self, session: Session, kernels: str, broken: str) -> None:
        self.session = session
        self.run_graphs, self.aten_only = compiler(kernels), kernels == "inductor"
        self.metering = PartMetering(session.static, self.learn)
        self._broken = broken
        self._begin: dict[Any, _Node] = {}
        self._times_forgotten = 0
        self._node = _Node()
        self._measured: dict[tuple[_Node, ...], KnownStep] = {}
        self._planned: dict[tuple[_Node, ...], PartedStep] = {}
        self._refused: BudgetError | None = None
        self._keeps_little = False
        self._branches = False
        self._learnt_bytes = self._held_bytes = self._state_bytes = 0
        session.metering = self.metering
        self.metering.calls.begins()

    def call(
        self,
        model: nn.Module,
        captured: dict[Any, Callable[..., Any]],
        kind: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call the model for a training step.

        Args:
            model: the network. It is not kept: Dynamo keeps this object for good.
            captured: the model's calls as Dynamo knows them, filled in here and kept by who keeps the model.
            kind: what decides, beside shapes, over how the step is captured.
            args, kwargs: the call's.

        Raises:
            BudgetError: no plan fits; or, in the first step, a part of the model does not.
            CaptureError: no part of the model can be captured.
        """
        self.metering.settle()
        if self._refused is not None:
            raise self._refused.with_traceback(None)  # of this call, not of those before
        self._count_what_changed()
        this = kind, self._times_forgotten
        if this not in captured:
            captured[this] = capturing_parts(model, self._compile_graph)
        run, self._node = captured[this], self._begin.setdefault(kind, _Node())
        before = _Snapshot(model) if not self._planned and not self._keeps_little else None
        self.metering.arguments = [a for a in tree_leaves((args, dict(kwargs))) if isinstance(a, torch.Tensor)]
        self.metering.in_call = True
        try:
            status = self.session.status
            why = "its graphs are compiled anew" if status.preparations else ""
            with preparing(self.session.name, why=why, record=status.prepared):
                outputs = run(*args, **kwargs)
            if self._node.part is None and self.session.status.budget_bytes is not None:
                if before is not None:
                    before.restore()
                raise no_graph(self.session, self._broken)
            return outputs
        except BudgetError:
            self.metering.abandon()
            if before is None:
                raise
        except BaseException:
            self.metering.abandon()
            raise
        finally:
            self.metering.in_call, self.metering.arguments = False, []
        gc.collect()  # frames of the traceback hold what the forward pass has saved
        before.restore()
        self._keeps_little = True
        self.forget()
        return self.call(model, captured, kind, args, kwargs)

    def forget(self) -> None:
        """Capture and plan anew from the next step on."""
        self._begin.clear()
        self._times_forgotten += 1
        self._measured.clear()
        self._planned.clear()
        self._refused = None

    def pieces_of(self, captured: Captured, in_use_bytes: int) -> tuple[Pieces, ...]:
        """Which convolutions of a part to compute in pieces: none where everything can be kept."""
        budget_bytes = self.session.status.budget_bytes
        if budget_bytes is None or "pieces" not in self.session.options.form_means:
            return ()
        graph = profile_step(captured, captured.device)
        if fits_easily(graph, in_use_bytes, budget_bytes):
            return ()
        return choose_pieces(captured, graph)

    def first_share(self, graph: StepGraph, device: torch.device, in_use_bytes: int) -> Mapping[str, Residence]:
        """Under which residences a part runs before the step is planned.

        Raises:
            BudgetError: there is no room for the part beside what is in use.
        """
        budget_bytes = self.session.status.budget_bytes
        if budget_bytes is None:
            return {}
        return first_share(graph, device, in_use_bytes, budget_bytes, keeps_little=self._keeps_little)

    def _compile_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        make_static(gm)
        self.session.status.captures += 1
        # Dynamo hands over the batch itself; the part is compiled again later, and must not keep that.
        inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        part = _Part(gm, inputs, InputPlaces.of(gm), TracingContext.try_get(), break_after(gm))
        self._compile(self._node.followed_by(part))  # what is captured runs next, and its guards are still open

        def run(*arguments: Any) -> Any:
            node = self._node = self._node.followed_by(part)
            if node.run is None:
                self._compile(node)
            if node.share is None:
                for earlier in node.path():
                    if earlier.step is not None:  # let the next step like this one be metered from its first part on
                        earlier.step.steps_to_meter = max(1, earlier.step.steps_to_meter)
            assert node.run is not None
            return node.run(*arguments)

        return run

    def _compile(self, node: _Node) -> None:
        part = node.part
        assert part is not None
        node.step = PartStep(self, node, part.places)
        with preparing(self.session.name), tracing(part.context):
            node.run = once_differentiable(node.step.compile(part.graph, part.inputs))
        if not node.step.trains:
            node.share = {}  # it does not train: nothing is decided

    def learn(self, window: Window) -> None:
        """Plan the step that was metered, or hold it against its plan."""
        measured = window.measured
        assert measured is not None
        session, status = self.session, self.session.status
        record = self.metering.record
        steps = [record.runs[number].step for number in record.of_last_call()]
        if any(step.departures for step in steps):
            return  # it took copies that are not planned yet
        nodes = tuple(step.node for step in steps if isinstance(step, PartStep))
        status.measured_peak_bytes = max(status.measured_peak_bytes or 0, measured.peak_bytes)
        planned, budget_bytes = self._planned.get(nodes), status.budget_bytes
        if planned is None:
            if budget_bytes is not None and measured.peak_bytes > budget_bytes:
                log.warning(
                    "%s: the measured peak of %s is over the budget of %s: the step was not planned yet, because only "
                    "its first run shows what eager code uses; the next one is",
                    session.name or "model",
                    format_bytes(measured.peak_bytes),
                    format_bytes(budget_bytes),
                )
            self._plan(nodes, measured.peak_bytes)
            return
        if budget_bytes is None or measured.peak_bytes <= budget_bytes:
            return
        over_bytes = max(0, measured.peak_bytes - planned.plan.predicted_peak_bytes)
        log.warning(
            "%s: the measured peak of %s is over the budget of %s (predicted: %s); planning again with %s set aside",
            session.name or "model",
            format_bytes(measured.peak_bytes),
            format_bytes(budget_bytes),
            format_bytes(planned.plan.predicted_peak_bytes),
            format_bytes(over_bytes),
        )
        self._learnt_bytes += over_bytes
        status.repairs += 1
        status.measured_peak_bytes = None
        self._plan_again()

    def _plan(self, nodes: tuple[_Node, ...], peak_bytes: int) -> None:
        """Plan the step that was metered. What is refused is raised by the next call: this one is over."""
        session, intervals = self.session, self.metering.intervals()
        measured = MeasuredParts.of_last_call(self.metering.record, intervals)
        if measured is None:
            self._keep_as_it_ran(nodes, peak_bytes)
            return
        if not intervals and not self._measured:
            log.warning(
                "%s: without a C++ compiler, what eager code between its graphs uses is not counted in the budget",
                session.name or "model",
            )
        held = [held for held in self.metering.calls.held_of_the_last() if held.is_alive]
        self._held_bytes = max(self._held_bytes, sum(one.nbytes for one in held))
        branches = any(node.share is not None for node in nodes)  # other steps begin with the same parts
        pieces = tuple(
            replace(cut, op=label(number) + cut.op) for number, node in enumerate(nodes) for cut in node.pieces or ()
        )
        variant = replace(WHOLE, pieces=pieces)
        self._measured[nodes] = KnownStep(measured, variant, self._breaks(nodes), fixed=branches or self._branches)
        self._plan_again()

    def _keep_as_it_ran(self, nodes: tuple[_Node, ...], peak_bytes: int) -> None:
        """A step whose parts cannot be planned together: what it took is refused or stays."""
        budget_bytes = self.session.status.budget_bytes
        reason = (
            f"the graphs of {self.session.name or 'the model'} do not all run forward before they run backward, so "
            f"they cannot be planned as one step; this one took {format_bytes(peak_bytes)} ({peak_bytes} bytes)"
        )
        if budget_bytes is not None and peak_bytes > budget_bytes:
            self._refused = BudgetError(
                f"{reason} where the budget is {format_bytes(budget_bytes)}; give that much, or call backward() after "
                "the forward pass",
                budget_bytes=budget_bytes,
            )
            return
        log.warning("%s; its graphs keep what they kept in it", reason)
        for node in nodes:
            node.share = node.step.share if node.step is not None else {}

    def _plan_again(self) -> None:
        """Plan every step that is known, with all that is known. What is refused is raised by the next call."""
        session = self.session
        session.state_bytes = self._state_bytes = session.static.state_bytes()
        for nodes, known in self._measured.items():
            try:
                with preparing(session.name, why="its graphs have been measured", record=session.status.prepared):
                    doing("plan")
                    planned = self._planned[nodes] = known.plan(session, self._learnt_bytes, self._held_bytes)
            except BudgetError as error:
                if known.fixed and not self._branches:
                    log.info("%s: what follows its parts differs between steps; planning for all", session.name)
                    self._branches = self._keeps_little = True
                    self.forget()
                else:
                    self._refused = error
                break
            for node, share in zip(nodes, planned.shares, strict=True):
                node.share = share
                if node.step is not None and node.step.share != share:
                    node.run = None  # it is compiled anew when it runs next
                elif node.step is not None:
                    node.step.steps_to_meter = STEPS_TO_METER
        session.status.plans = tuple(planned.plan for planned in self._planned.values())
        session.status.planning_seconds += sum(plan.planning_seconds for plan in session.status.plans)

    def _count_what_changed(self) -> None:
        """Before a step: what the loop and the optimizers hold by now."""
        loop = self.session.loop
        held_bytes = max(self._held_bytes, loop.held_gradient_bytes + (loop.held_result_bytes or 0))
        if held_bytes == self._held_bytes and self.session.state_bytes == self._state_bytes:
            return
        self._held_bytes = held_bytes
        if self._measured:
            self._plan_again()

    def _breaks(self, nodes: Sequence[_Node]) -> tuple[str, ...]:
        """Where the model breaks, as Dynamo words it."""
        found = [node.part.broken for node in nodes if node.part is not None and node.part.broken]
        return tuple(dict.fromkeys([self._broken, *found]))


class _Snapshot:
    """What a forward pass changes in a model, to begin it anew: buffers, and the generators' states."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
        self._states: list[tuple[torch.device | None, torch.Tensor]] = [(None, torch.get_rng_state())]
        self._states += [(device, torch.cuda.get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        for device, state in self._states:
            if device is None:
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
