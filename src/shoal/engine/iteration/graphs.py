"""The graphs of an iteration in the order in which they run: captured by Dynamo, each compiled for its place."""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext, TracingContext, tracing

from shoal.capture.assigned_data import copy_assigned_data
from shoal.capture.capture_step import InputPlaces, joint_step
from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encoded
from shoal.capture.graph_breaks import break_after
from shoal.capture.pieces import choose_pieces, in_pieces
from shoal.capture.step_writer import shrunk
from shoal.capture.varying_sizes import SizesSeen, bytes_at, make_static, shape_of
from shoal.core.joined_step import label
from shoal.core.means import KERNEL_MEANS, LOSSY
from shoal.core.order import op_names
from shoal.core.plan import Plan
from shoal.core.progress import preparing
from shoal.core.shares import Share, other_transfers
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Pieces, Variant
from shoal.cost.measure_links import link_to
from shoal.cost.profile import profile_step
from shoal.engine.backend import PlannedStep
from shoal.engine.choose_variant import in_variant
from shoal.engine.compile_options import WITHOUT_LINK
from shoal.engine.iteration.first import fits_easily
from shoal.engine.iteration.plan import GraphVariant
from shoal.engine.iteration.record import Ports
from shoal.engine.many_shapes import compile_for_shapes
from shoal.engine.once_differentiable import once_differentiable
from shoal.engine.search.choose_encoded import encoded_by
from shoal.engine.search.variants import Variants
from shoal.engine.session import Session
from shoal.engine.step_planning import CompiledVariant, limited_step
from shoal.errors import BudgetError, PlanError
from shoal.lowlevel.constant_numbers import as_constants, constant_numbers, is_number
from shoal.lowlevel.torch_state import autocast_state, autocasting, outside_backward
from shoal.memory import reads
from shoal.memory.limit import no_memory_limit
from shoal.offload.transfers import RunningTransfers


@dataclass(eq=False)
class DynamoGraph:
    """A graph of Dynamo's, to be compiled for each of its runs in a step."""

    graph: fx.GraphModule
    inputs: Sequence[Any]
    places: InputPlaces
    context: TracingContext | None
    broken: str
    constants: frozenset[str]
    means: frozenset[str]
    autocast: Mapping[str, torch.dtype]
    unmodified: Captured | None = None  # its step as its author wrote it, once it is compiled
    first: GraphVariant | None = None  # in which it fits before its iteration is known, if it does not unmodified
    too_large: StepGraph | None = None  # its step unmodified, if there is such a variant
    steps: weakref.WeakSet[GraphStep] = field(default_factory=weakref.WeakSet)  # as it is compiled by now

    @cached_property
    def variants(self) -> Variants:
        """Its variants, of which nothing may be asked if its sizes vary: the answer would hold for one size."""
        return Variants(self.graph, self.means)


@dataclass(eq=False)
class Node:
    """A part at one place of the sequence.

    Attributes:
        part: None for where every sequence begins.
        before, after: the nodes around it. What follows a part may differ from step to step.
        share: that it has in the plan of the step; None before there is one.
        chosen: the variant that the plan is for; None if it is the one in which the part was measured.
        pieces: its convolutions that are computed in pieces; None before it is compiled.
        step, run: the part as it is compiled for this place, or for another one that is alike; None before.
        in_use_bytes: what was in use when it ran first.
    """

    part: DynamoGraph | None = None
    before: Node | None = None
    after: dict[DynamoGraph, Node] = field(default_factory=dict)
    share: Share | None = None
    chosen: GraphVariant | None = None
    pieces: tuple[Pieces, ...] | None = None
    step: GraphStep | None = None
    run: Callable[..., Any] | None = None
    in_use_bytes: int = 0

    def followed_by(self, part: DynamoGraph) -> Node:
        """The node of a part that comes next."""
        if part not in self.after:
            self.after[part] = Node(part, self)
        return self.after[part]

    def path(self) -> list[Node]:
        """The nodes from the first part to this one."""
        path: list[Node] = []
        node: Node | None = self
        while node is not None and node.part is not None:
            path.append(node)
            node = node.before
        return path[::-1]


class GraphStep(PlannedStep):
    """One part for one place, or several that are alike, as AOTAutograd compiles it.

    Attributes:
        trains: whether it has a backward pass; the rest exists only then.
        graph: its own step, with costs.
        ports: what its graphs are given and return.
        share: under which it runs.
        checkpoints: as of `Plan`.
        run: what runs it.
        errors: as of `Plan`, once they have been measured.
    """

    graph: StepGraph
    ports: Ports
    run: Callable[..., Any]

    def __init__(self, steps: GraphSequence, node: Node, places: InputPlaces) -> None:
        super().__init__(steps.session, places, self._in_its_variant)
        self.steps, self.running = steps, steps.running
        self.node = node
        self.trains = False
        self.share = Share()
        self.checkpoints = 0
        self.errors: Mapping[str, float] = {}

    def _in_its_variant(self, captured: Captured) -> tuple[CompiledVariant, Captured]:
        """Shrunk wherever there is a budget: how little room there is for a part is known when all have run."""
        chosen, part = self.node.chosen, self.node.part
        if part is not None and chosen is None:
            part.unmodified = captured
        shrinks = chosen.variant.shrunk if chosen is not None else bool(self.session.status.budget_bytes)
        smaller = shrunk(captured) if shrinks else None
        compiled_as = CompiledVariant(Variant(shrunk=smaller is not None))
        return compiled_as, in_variant(self.session, smaller or captured, WHOLE)

    def make_plan(self, captured: Captured) -> Captured:
        """Take the part's share of the plan, or for a first run what leaves most room."""
        in_use_bytes = self.node.in_use_bytes = self.steps.in_use_bytes()
        with no_memory_limit():
            if self.node.pieces is None:
                self.node.pieces = self.steps.pieces_of(captured, in_use_bytes)
            captured = exact = in_pieces(captured, self.node.pieces)
            chosen, share = self.node.chosen, self.node.share
            if share is not None and (encoding := encoded_by(share.residences)) is not None:
                with suppress(PlanError):  # then it is another step than was planned
                    captured = encoded(captured, encoding[1], encoding[0])
            self.graph = self.steps.costed(captured)
            self.steps.check_given(self.node, self.graph)
            if chosen is not None and chosen.fingerprint not in (self.graph.fingerprint, ""):
                self.steps.is_not_as_planned(f"graph {len(self.node.path())}")
                captured, share = exact, None
                self.graph = self.steps.costed(captured)
            if share is None:
                if not self.steps.fits_easily(self.graph, in_use_bytes):
                    gc.collect()  # cycles of Dynamo's hold what functions were called with that it gave up in the midst
                    self.node.in_use_bytes = self.steps.in_use_bytes()
                share = self.steps.first_share(self.node, self.graph, captured.device)
        self.ports, self.trains, self.share = Ports.of(captured), True, share
        self.checkpoints, ordered, own = captured.checkpoints, share.in_order(self.graph), share.alone(self.graph)
        self.plan = Plan(ordered, own.residences, "parts", captured_order=op_names(self.graph))
        self.others = other_transfers(share)
        return replace(captured, graph=ordered)

    def learn_errors(self, errors: Sequence[float]) -> None:
        """As of `PlannedStep`."""
        assert self.plan is not None
        self.errors = dict(zip((storage.name for storage in self.plan.encoded), errors, strict=True))
        self.steps.learn_errors()

    def bytes_in_call(self) -> Mapping[str, int]:
        """As of `MeteredGraph`."""
        return {} if self._captured is None or not self._numbers else bytes_at(self._captured, self._numbers)


def described(
    plan: Plan, nodes: Sequence[Node], without_effect: tuple[str, ...], broken: str = "", *, is_chosen: bool
) -> Plan:
    """The plan with what is told of its graphs: their variant, checkpointed regions, where the model breaks.

    Args:
        plan: of the parts joined into one step.
        nodes: the parts, in the order in which they run forward.
        without_effect: a line for each means that was allowed by name and that no plan of several graphs uses.
        broken: where Dynamo could not go on before it broke at the parts, where that is known.
        is_chosen: whether its variant was chosen; if not, the parts stay as they are.
    """
    pieces = tuple(replace(cut, op=label(place) + cut.op) for place, n in enumerate(nodes) for cut in n.pieces or ())
    breaks = dict.fromkeys([broken, *(n.part.broken for n in nodes if n.part is not None)])
    of_first_run = next((n.chosen.variant for n in nodes if n.chosen is not None), WHOLE)
    as_they_are = replace(
        of_first_run, pieces=pieces, shrunk=any(n.step is not None and n.step.compiled_as.variant.shrunk for n in nodes)
    )
    return replace(
        plan,
        variant=plan.variant if is_chosen else as_they_are,
        breaks=tuple(filter(None, breaks)),
        checkpoints=sum(n.step.checkpoints for n in nodes if n.step is not None),
        without_effect=without_effect,
    )


class GraphSequence(ABC):
    """Compiles the graphs of a step one after another, each for the place at which it runs.

    Args:
        session: of the model, or of several.

    Attributes:
        node: the part that has run last, of those that train. What else runs decides nothing, and Dynamo may run
            another graph in its place in the next step: one that was captured later, with symbols for its sizes.
        n_run: how many graphs have run in this step.
        compiled: how often a part was.
        sizes_vary: whether the inputs of a part have been of several shapes, at the same place in the step.
        running: the transfers of the graphs, of the step that goes on.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.node = Node()
        self.n_run = 0
        self.compiled = 0
        self.sizes_vary = False
        self.running = RunningTransfers(lambda: len(self.node.path()) - 1)
        self._sizes: dict[Any, SizesSeen] = {}

    def costed(self, captured: Captured) -> StepGraph:
        """The step of a part, profiled here, as far as it may be recomputed and offloaded."""
        options, offloading, link = self.session.options, self.session.offloading, None
        with no_memory_limit():
            if offloading is not None and options.planner not in WITHOUT_LINK:
                link = link_to(offloading, captured.device)
            return limited_step(options.means, replace(profile_step(captured, captured.device), link=link))

    @abstractmethod
    def in_use_bytes(self) -> int:
        """Device bytes in use now, as far as they are known."""

    @abstractmethod
    def first_share(self, node: Node, graph: StepGraph, device: torch.device) -> Share:
        """How a part runs before the step is planned.

        Raises:
            BudgetError: there is no room for the part in addition to what is in use.
        """

    @abstractmethod
    def given(self, node: Node) -> tuple[GraphVariant, Share] | None:
        """In which variant, and how, a part runs by a plan that was given; None if none was."""

    @abstractmethod
    def check_given(self, node: Node, graph: StepGraph) -> None:
        """Raise PlanError if a plan was given and is for another step than this one of a part."""

    @abstractmethod
    def may_vary(self, node: Node) -> bool:
        """Whether a part that does not fit before its iteration is known may run in another variant."""

    @abstractmethod
    def first_variant(self, part: DynamoGraph, in_use_bytes: int) -> GraphVariant:
        """In which variant a part fits before its iteration is known, or needs the fewest bytes."""

    @abstractmethod
    def sizes_changed(self, seen: SizesSeen) -> None:
        """The part that is captured has inputs of other sizes than those that were seen at its place, as of what a mask
        selects."""

    @abstractmethod
    def is_not_as_planned(self, name: str) -> None:
        """A part, as it is compiled in a variant, is another step than was planned."""

    @abstractmethod
    def learn_errors(self) -> None:
        """A part has measured the errors of what it encodes."""

    @abstractmethod
    def reached(self, node: Node) -> None:
        """A part runs next; it is compiled after this where it is not."""

    def fits_easily(self, graph: StepGraph, in_use_bytes: int) -> bool:
        """Whether everything of a graph can be kept, with room for later ones."""
        budget_bytes = self.session.status.budget_bytes
        return budget_bytes is None or fits_easily(graph, in_use_bytes, budget_bytes)

    def pieces_of(self, captured: Captured, in_use_bytes: int) -> tuple[Pieces, ...]:
        """Which convolutions of a part to compute in pieces: none where everything can be kept."""
        means = self.session.options.variant_means
        if not KERNEL_MEANS & means or captured.largest_nodes:
            return ()
        graph = profile_step(captured, captured.device)
        if self.fits_easily(graph, in_use_bytes):
            return ()
        return choose_pieces(captured, graph, means, lambda other: profile_step(other, other.device))

    def captured(self, part: DynamoGraph, graph: fx.GraphModule) -> Captured:
        """The step of a variant of a part, captured and not run."""
        context = None if part.context is None else TracingContext(part.context.fake_mode)
        with (
            tracing(context),
            as_constants(part.constants),
            reads.paused(),
            no_memory_limit(),
            torch.enable_grad(),
            outside_backward(),
            autocasting(part.autocast),
        ):
            return joint_step(graph, part.inputs, part.places, name=self.session.name, keeps_as_written=False)

    def compile_graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph of Dynamo's, wherever in the sequence that comes."""
        self.session.status.captures += 1
        copy_assigned_data(gm, example_inputs)
        # Dynamo hands over the batch itself; the part is compiled again later, and must not keep more than numbers.
        inputs = [
            given if is_number(given) else node.meta["example_value"]
            for node, given in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        ]
        part = DynamoGraph(
            gm,
            inputs,
            InputPlaces.of(gm),
            TracingContext.try_get(),
            break_after(gm),
            constant_numbers(),
            self.session.options.variant_means if self.session.ready_plan is None else LOSSY,
            autocast_state(example_inputs),
        )
        here = self.node.followed_by(part)  # what is captured runs next, and its guards are still open

        def compile_here() -> None:
            self.compile(here)

        seen = self._sizes_of_this_graph()
        if not seen.fixed and seen.is_another(shape_of(gm)):
            self.sizes_changed(seen)
        if self.sizes_vary and not self.session.compiles(example_inputs):
            compile_for_shapes(self.session, gm, compile_here, compile_here, seen)
        else:
            make_static(gm)
            compile_here()
            seen.note(shape_of(gm))
            seen.note_captured(shape_of(gm))

        def run(*arguments: Any) -> Any:
            before, self.n_run = self.node, self.n_run + 1
            node = self.node = before.followed_by(part)
            self.reached(node)
            if node.run is None:
                self.compile(node)
            assert node.run is not None and node.step is not None
            if not node.step.trains:
                self.node = before
            return node.run(*arguments)

        return run

    def plan_less_far(self, refused: BudgetError) -> bool:
        """Plan for sizes that are nearer to those seen, or for each by itself; False where that is done already."""
        budget_bytes = self.session.status.budget_bytes or 1
        needed_share = max(1.0, (refused.least_feasible_bytes or budget_bytes) / budget_bytes)
        if all(seen.fixed for seen in self._sizes.values()):
            return False
        growth = min(seen.most_growth for seen in self._sizes.values())  # sizes of one iteration grow together
        for seen in self._sizes.values():
            seen.most_growth = growth
            seen.refuse(needed_share)
        return True

    def _sizes_of_this_graph(self) -> SizesSeen:
        """With which the function that Dynamo captures was captured before, at this place of the sequence."""
        compile_id = CompileContext.current_compile_id()
        place = compile_id.frame_id if compile_id else None, self.n_run
        return self._sizes.setdefault(place, SizesSeen())

    def compile(self, node: Node) -> None:
        """Compile a part for its place, under its share of the plan where there is one."""
        part = node.part
        assert part is not None
        if node.chosen is None and (given := self.given(node)) is not None:
            node.chosen, node.share = given
            node.pieces = node.chosen.variant.pieces
        if node.share is None and part.first is not None and self.may_vary(node):
            node.chosen, node.pieces = part.first, part.first.variant.pieces
        alike = self._compiled_alike(part, node)
        if alike is not None:
            node.step, node.run = alike, alike.run
            return
        try:
            self._compile(part, node)
        except BudgetError:
            if node.share is not None or not self.may_vary(node):
                raise
            part.too_large = None if node.step is None else node.step.graph
            with no_memory_limit():
                part.first = self.first_variant(part, node.in_use_bytes)
            self.compile(node)

    def _compile(self, part: DynamoGraph, node: Node) -> None:
        self.compiled += 1
        step = node.step = GraphStep(self, node, part.places)
        with (
            preparing(self.session.name),
            tracing(part.context),
            as_constants(part.constants),
            reads.paused(),
            no_memory_limit(),  # what is tried out on this machine is not part of a step
        ):
            session = self.session
            graph = part.graph if node.chosen is None else part.variants.graph(node.chosen.variant)
            compiled = step.compile(graph, part.inputs)
            node.run = step.run = once_differentiable(compiled, lambda *given: session.metering.returned(*given))
        part.steps.add(step)

    def _compiled_alike(self, part: DynamoGraph, node: Node) -> GraphStep | None:
        """The part as it is compiled for another place, where it would be the same here: a cell's call after call."""
        for step in part.steps:
            if not step.trains:
                return step
            pieces = step.node.pieces if node.pieces is None else node.pieces
            if step.node.pieces != pieces or step.node.chosen != node.chosen:
                continue
            share = node.share
            if share is None:
                node.in_use_bytes = self.in_use_bytes()
                try:
                    share = self.first_share(node, step.graph, step.device)
                except BudgetError:
                    return None  # compiling it looks again, and says so
            if share == step.share:
                node.pieces = pieces
                return step
        return None
