"""The torch.compile backend "shoal": capture a step, plan it, lower the plan, meter the first steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.capture.assigned_data import copy_assigned_data
from shoal.capture.capture_step import InputPlaces, joint_step
from shoal.capture.captured import Captured
from shoal.capture.dynamo import GraphBreak, refusals
from shoal.capture.early_gradients import gradient_order, handed_over
from shoal.capture.failed_traces import line_of_failure
from shoal.capture.graph_breaks import break_after
from shoal.capture.lower import lower
from shoal.capture.sizes_of_values import break_at_unknown_sizes
from shoal.capture.step_reader import capture
from shoal.capture.traced_strides import Departure
from shoal.capture.varying_sizes import bytes_at, make_static
from shoal.core.plan import Plan
from shoal.core.progress import doing, preparing
from shoal.core.shares import NO_OTHERS
from shoal.engine.choose_variant import Choose, compile_chosen, in_variant, own_variant
from shoal.engine.compile_options import CompileOptions
from shoal.engine.cuda_graphs import GraphedStep, ReplayedSteps, refuse
from shoal.engine.first_run import checked, forward_only
from shoal.engine.gradient_gates import Gradients, gates_or_all, through_gates
from shoal.engine.graph_runner import run_in_traced_layouts
from shoal.engine.loop_memory import Basis
from shoal.engine.many_shapes import compile_for_shapes
from shoal.engine.once_differentiable import once_differentiable
from shoal.engine.placement import Placement
from shoal.engine.reserved_budget import grow_segments
from shoal.engine.session import Session
from shoal.engine.status import Status
from shoal.engine.step_planning import UNMODIFIED, CompiledVariant
from shoal.engine.undefined_gradients import allocate_late, leave_undefined
from shoal.errors import CaptureError
from shoal.graph.symbolic_sizes import Numbers, call_sizes, numbers_of
from shoal.kernels.encoded_activation import measured_errors
from shoal.lowlevel.mutated_inputs import are_plain, leave_in_place
from shoal.lowlevel.torch_internals import eager_kernels
from shoal.lowlevel.torch_state import active_ddp_module
from shoal.lowlevel.torch_versions import CAN_RECORD_ALLOCATIONS, warn_if_untested
from shoal.lowlevel.unknown_sizes import unknown_sizes
from shoal.memory.budget import budget_bytes
from shoal.memory.cpu_allocator import release_unused
from shoal.memory.limit import no_memory_limit
from shoal.memory.optimizer_state import reject_copy
from shoal.memory.static_memory import StaticMemory
from shoal.offload.transfers import RunningTransfers

STEPS_TO_METER = 2  # of each plan: the first, and one with everything warm


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="shoal", options={"budget": "2GiB"})`.

    Options: `budget`, `optimizer`, `allow` and `offload_to`, as of `shoal.compile`, and the names of `shoal.Options`
    except `plan` and `strict`. Values may be text, for hosts that copy their options: {"budget": "80%", "optimizer":
    "adamw", "cuda_graphs": "true"}. Without a budget SHOAL_BUDGET of the environment counts; if that is not set,
    everything is kept. The model has to be one graph. `shoal.compile` does the same and also reports in `model.shoal`.
    """
    with refusals():
        return _compile_as_asked(gm, example_inputs, options or {}, mode)


def _compile_as_asked(
    gm: fx.GraphModule, example_inputs: Sequence[Any], given: Mapping[str, Any], mode: str | None
) -> Callable[..., Any]:
    devices = {value.device.type: value.device for value in example_inputs if isinstance(value, torch.Tensor)}
    device = devices.get("cuda") or torch.device("cpu")
    options, optimizer = CompileOptions.of_backend({**given, "budget": budget_bytes(given.get("budget"), device)}, mode)
    options.check_device(device.type)
    parameters = [value for value in example_inputs if isinstance(value, torch.nn.Parameter)]
    reject_copy(optimizer, parameters)
    session = Session(
        Status(options.budget_bytes, budget_of=options.budget_of, expandable_segments=grow_segments(device, options)),
        options,
        StaticMemory(optimizer=optimizer, parameters=parameters),
        offloading=options.offloading(device.type),
    )
    return compile_step(session, gm, example_inputs)


def compile_step(session: Session, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Plan and lower the step of one Dynamo graph."""
    warn_if_untested()
    _reject_graph_break(gm)
    break_at_unknown_sizes(gm)
    copy_assigned_data(gm, example_inputs)
    session.status.captures += 1
    places = InputPlaces.of(gm)
    places = replace(places, early=session.early.fates(example_inputs, session.static.step_in_hook_bytes))

    def captured(graph: fx.GraphModule) -> Captured:
        return joint_step(graph, example_inputs, places, name=session.name, keeps_as_written=graph is gm)

    def compiled(graph: fx.GraphModule, compiled_as: CompiledVariant | Choose) -> Callable[..., Any]:
        return PlannedStep(session, places, compiled_as).compile(graph, example_inputs)

    def of_this_shape() -> Callable[..., Any]:
        return compile_chosen(session, gm, example_inputs, captured, compiled)

    with preparing(session.name, record=session.status.prepared):
        if (
            session.compiles(example_inputs) or session.ready_plan is not None or session.replayed is not None
        ):  # a region, a given plan and a CUDA graph have one shape
            make_static(gm)
            step = of_this_shape()
        else:
            step = compile_for_shapes(session, gm, lambda: compiled(gm, own_variant(session, gm)), of_this_shape)
        step = once_differentiable(step, lambda results, node: session.metering.returned(results, node))
        release_unused()  # what was tried out is of no step
        doing("first run")
        return step


class PlannedStep:
    """One step as AOTAutograd compiles it: partitioned by plan, lowered, metered while it is new.

    Args:
        session, places: of the model.
        compiled_as: in which variant it is compiled; or what chooses that once the step is captured as it is, and
            returns the step in that variant too.
    """

    def __init__(self, session: Session, places: InputPlaces, compiled_as: CompiledVariant | Choose) -> None:
        self.session = session
        self.places = places
        self.compiled_as = compiled_as if isinstance(compiled_as, CompiledVariant) else UNMODIFIED
        self._choose = None if isinstance(compiled_as, CompiledVariant) else compiled_as
        self.running: RunningTransfers | None = None  # of all graphs of an iteration, if it is one of several
        self.others = NO_OTHERS  # what it does for the storages of other graphs
        self.plan: Plan | None = None
        self.basis: Basis | None = None
        self.device = torch.device("cpu")
        self.of_plain_tensors = True
        self.n_outputs = self.n_tangents = 0
        self.results: tuple[int, ...] = ()
        self.undefined: frozenset[str] = frozenset()  # gradients that the backward graph may have to allocate itself
        self.steps_to_meter = STEPS_TO_METER
        self.errors_unknown = False
        self.fingerprint = ""  # of the step as captured
        self.departures: dict[str, Departure] = {}
        self.handed_stayed: bool | None = None
        self.leaving: tuple[tuple[int, ...], ...] = ()  # places of the gradients that leave early, group by group
        self.gradient_order: list[int] = []  # places of all gradients as eager PyTorch finds them
        self.placement: Placement | None = None
        self.graphed: GraphedStep | None = None
        self._captured: Captured | None = None  # as it was planned, where sizes vary
        self._sizes_seen: set[tuple[int, ...]] = set()
        self._numbers: Numbers = {}  # of the last call that was metered

    def compile(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph of Dynamo's: its training step as planned, or only its forward pass."""
        results = [node.meta.get("example_value") for node in graph.graph.output_node().all_input_nodes]
        self.of_plain_tensors = are_plain((*example_inputs, *graph.parameters(), *graph.buffers(), *results))
        with eager_kernels(), line_of_failure(), unknown_sizes(GraphBreak):
            doing("capture", str(self.compiled_as.variant))
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=self.compile_forward,
                bw_compiler=self.compile_backward,
                inference_compiler=forward_only,
                partition_fn=self.partition,
            )(graph, example_inputs)
        if self.undefined:
            compiled = leave_undefined(compiled)
        if not self.leaving:
            return compiled
        return through_gates(compiled, self.leaving, self.gradient_order, self._note_handed)

    def _note_handed(self, stayed: bool) -> None:
        self.handed_stayed = stayed or bool(self.handed_stayed)

    @property
    def is_of_several(self) -> bool:
        """Whether it is one of several graphs of an iteration. Then what is recorded between the passes has the
        undefined gradients, and combined steps do not carry the step as it was written."""
        return self.running is not None

    @property
    def keeps_as_written(self) -> bool:
        """Whether its plan says what plain PyTorch takes; of another variant the candidates say so."""
        return self.compiled_as.variant == UNMODIFIED.variant and not self.is_of_several

    def partition(
        self,
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Collection[int] | None = None,
        **unused: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Plan the joint graph and split it as planned."""
        with no_memory_limit():  # what is tried out on this machine is not part of a step
            captured = capture(
                joint,
                num_fwd_outputs,
                static_lifetime_input_indices or (),
                model=self.session.name,
                parameters=self.places.parameters,
                layers=self.places.layers,
                keeps_as_written=self.keeps_as_written,
                early=self.places.early,
            )
        if self._choose is not None:
            self.compiled_as, captured = self._choose(captured)
            self._choose = None  # it holds the graph
        else:
            captured = in_variant(self.session, captured, self.compiled_as.variant)
        self.fingerprint = captured.graph.fingerprint
        captured = self.session.in_traced_layouts(captured)
        undefined = captured.graph.undefined_gradients(captured.output_storages().values())
        # Counted here: a plan for a loop that holds less has gradients of results that end with their last reader.
        self.n_tangents = sum(storage.kind == "tangent" for storage in captured.graph.storages)
        with unset_fake_temporarily():
            captured = self.make_plan(captured)
        assert self.plan is not None
        self._captured = captured if captured.largest_nodes else None
        self.device = captured.device
        self.n_outputs, self.results = num_fwd_outputs, captured.results
        self.errors_unknown = bool(self.plan.encoded)
        transfers = self.session.carry(self.plan, captured.device, self.running, self.others)
        doing("plan", "writing its graphs")
        forward, backward = lower(captured, self.plan.residences, transfers=transfers, others=self.others)
        if not self.is_of_several and self._captured is None and self.session.replayed is None:
            self.undefined = undefined
            allocate_late(backward.graph, undefined)
        self.leaving, self.gradient_order = (
            handed_over(backward.graph),
            gradient_order(captured.joint.graph, captured.backward_outputs),
        )
        if self.session.replayed is not None:
            self.graphed = self._to_be_graphed(self.session.replayed, captured, (forward, backward))
        elif self._can_be_placed():
            self.placement = self.session.placement_on(self.device)
        return forward, backward

    def _to_be_graphed(
        self, replayed: ReplayedSteps, captured: Captured, modules: tuple[fx.GraphModule, fx.GraphModule]
    ) -> GraphedStep:
        if active_ddp_module() is not None or self.session.static.is_sharded:
            raise refuse("the model runs in a wrapper that exchanges parameters or gradients")
        if self.leaving:
            raise refuse("gradients are used in hooks while the backward pass runs")
        storages = captured.graph.storages
        inputs = {node: storages[s] for node, s in captured.storage_of.items() if node.op == "placeholder"}
        batch = [node.name for node, storage in inputs.items() if storage.kind == "input"]
        return GraphedStep(replayed, modules, self.device, batch, self.n_outputs)

    def _can_be_placed(self) -> bool:
        """Whether its blocks can lie at planned addresses: one step after the other takes the same course."""
        return bool(self.session.status.expandable_segments) and self._captured is None and CAN_RECORD_ALLOCATIONS

    def make_plan(self, captured: Captured) -> Captured:
        """Set `plan` and `basis`; the step as it is under the plan."""
        return self.session.make_plan(captured, self, self.compiled_as)

    def basis_in_call(self) -> Basis | None:
        """As of `Metered`."""
        if self.basis is None or self._captured is None or not self._numbers:
            return self.basis
        return self.basis.resized(bytes_at(self._captured, self._numbers))

    def _compile(self, part: str, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        placement = self.placement
        if placement is None:
            return checked(module, run_in_traced_layouts, example_inputs, self.departures)
        name = f"{part} {id(self)}"
        run = checked(module, run_in_traced_layouts, example_inputs, self.departures, placement.before(name))
        return placement.follow(name, module, run, lambda module: run_in_traced_layouts(module, example_inputs))

    def compile_forward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.of_plain_tensors:
            leave_in_place(module)
        run = self._compile("forward", module, example_inputs)
        sizes_of = call_sizes(module.graph)

        def forward(arguments: list[Any]) -> Any:
            sizes = sizes_of(arguments)
            if sizes and sizes not in self._sizes_seen:  # another shape, under the plan of the largest
                self._sizes_seen.add(sizes)
                self.steps_to_meter = max(self.steps_to_meter, 1)
            if self.steps_to_meter and sizes:
                self._numbers = numbers_of(module.graph, arguments)
            self.session.check_caller()
            if self.placement is not None:
                self.placement.begins(str(id(self)))
            measures = self.errors_unknown and (self.is_of_several or not self.steps_to_meter)
            runs = partial(self._measure_errors, run) if measures else run
            if self.graphed is not None:
                self.graphed.begins()
                runs = partial(self.graphed.forward, runs, ready=not (self.steps_to_meter or measures))
            return self.session.metering.forward(self, runs, arguments)

        forward._boxed_call = True  # type: ignore[attr-defined]
        return forward

    def _measure_errors(self, run: Callable[..., Any], arguments: list[Any]) -> Any:
        """Run once with the error of each encoding measured, which takes memory that is no part of the step."""
        self.errors_unknown = False
        with measured_errors() as errors:
            outputs = run(arguments)
        self.learn_errors(errors)
        return outputs

    def learn_errors(self, errors: Sequence[float]) -> None:
        """Put what its encodings really lost, in the order in which they run, into the plan."""
        assert self.plan is not None
        self.session.learn_errors(self.plan, errors)

    def compile_backward(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run = self._compile("backward", module, example_inputs)
        output: Any = module.graph.output_node().args[0]
        n_gradients = len(output)

        def learn_layouts() -> None:
            if departures := dict(self.departures):
                self.departures.clear()
                self.session.learn_layouts(self.fingerprint, departures)

        def in_parts(arguments: list[Any]) -> Gradients:
            gradients = yield from self.session.metering.backward_in_parts(self, run, arguments)
            learn_layouts()
            return gradients

        def backward(arguments: list[Any]) -> Any:
            if self.leaving:
                return gates_or_all(in_parts(arguments), self.leaving, n_gradients)
            runs = run if self.graphed is None else partial(self.graphed.backward, run)
            gradients = self.session.metering.backward(self, runs, arguments)
            learn_layouts()
            return gradients

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward


def _reject_graph_break(gm: fx.GraphModule) -> None:
    if broken := break_after(gm):
        raise CaptureError(
            "the model is not one graph; use shoal.compile, which plans several graphs as one step",
            details={
                "graph break": broken,
                "if that is a call of logging": "shoal.compile leaves it out; so does "
                "torch._dynamo.config.ignore_logging_functions",
            },
        )
