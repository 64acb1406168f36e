"""From a captured step to its plan: profile its ops, count what the training loop holds, call the planner."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import cast

from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal import planners
from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encoded
from shoal.core.hardware import Hardware, Link
from shoal.core.order import in_order_of, op_names
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_order, check_plan, check_step
from shoal.core.variant import WHOLE, Candidate, Variant
from shoal.engine.compile_options import CompileOptions
from shoal.engine.generator_states import counting_states, states_of
from shoal.engine.loop_memory import Basis, LoopMemory, best_case, by_itself, in_loop
from shoal.engine.plan_cache import remembered
from shoal.engine.refusal_hints import with_optimistic
from shoal.engine.search.choose_encoded import bounding_step, choose_encoded, encoded_by
from shoal.engine.search.encoded_steps import EncodedSteps
from shoal.engine.search.encoding import IF_FASTER, EncodeNothing, Encoding
from shoal.engine.search.priced import Encodable, Made, Priced
from shoal.errors import BudgetError, PlanError
from shoal.memory.limit import no_memory_limit
from shoal.planners.estimates import least_seconds, quick_least
from shoal.planners.limits import DEFAULT
from shoal.planners.smallest_plan import refuse_in_a_moment, smallest_inside

log = logging.getLogger("shoal")
InLoop = Callable[[StepGraph], StepGraph]  # a step by itself → the same with what the training loop holds


@dataclass(frozen=True)
class Planned:
    """A plan, the step that it is for (which may encode storages that the captured one does not), its basis, and what
    plans the step in another loop."""

    captured: Captured
    plan: Plan
    basis: Basis
    planning: StepPlanning


@dataclass(frozen=True)
class PlannedVariant:
    """A step in one variant, and its plan.

    Attributes:
        captured: the step. laid_out: so that its results are laid out as traced.
        planned: its plan.
        loop: that the plan is for.
    """

    captured: Captured
    laid_out: Captured
    planned: Planned
    loop: LoopMemory


@dataclass(frozen=True)
class CompiledVariant:
    """In which variant a step is compiled.

    Attributes:
        variant: which.
        candidates: the variants that were considered.
        seconds: how long that took.
        written: what is known of the step in the variant in which its author wrote it, if this is another; its static
            bytes are those in addition to this variant's.
        found: the step as it was captured to be considered, and its plan; None where nothing was considered.
    """

    variant: Variant = WHOLE
    candidates: tuple[Candidate, ...] = ()
    seconds: float = 0.0
    written: Basis | None = None
    found: PlannedVariant | None = None

    def planned_for(self, captured: Captured) -> tuple[Planned, LoopMemory] | None:
        """The plan that was found, for the same step as it is captured to be run; None where it has to be made.

        A step that encodes storages is another one than was captured, and is planned again.
        """
        found = self.found
        if found is None or found.planned.captured is not found.laid_out:
            return None
        if found.laid_out.graph.fingerprint != captured.graph.fingerprint:
            return None
        return replace(found.planned, captured=captured), found.loop

    def basis(self, made: Basis) -> Basis:
        """What a plan was made for, with the variant in which the author wrote the step."""
        return replace(made, written=self.written and self.written.with_static(made.graph.static_bytes))

    def described(self, made: Planned, loop: LoopMemory, options: CompileOptions) -> Plan:
        """A plan of the step in this variant, with what was considered and what it was made for."""
        return replace(
            made.plan,
            options=options.to_json(),
            variant=self.variant,
            candidates=self.basis(made.basis).candidates(self.candidates, loop),
            checkpoints=made.captured.checkpoints,
            compiled=made.captured.read_with.compiled,
        )


UNMODIFIED = CompiledVariant()


@dataclass(frozen=True)
class CountedStep:
    """A step of which only the counts are known, as of one that was not captured at this batch."""

    graph: StepGraph
    outputs: Mapping[int, str]

    def output_storages(self) -> Mapping[int, str]:
        """As of `Captured`."""
        return self.outputs


@dataclass(frozen=True)
class StepCosts:
    """What steps cost where they are planned for.

    Attributes:
        timed: a step as it was captured → with seconds and workspaces.
        hardware: its rates.
        link: through which storages leave the device; None where they stay.
        bytes_beside: a step → bytes in use all step that are none of its storages.
        state_bytes: of one state of the random generator.
    """

    timed: Callable[[Captured], StepGraph]
    hardware: Hardware
    link: Link | None
    bytes_beside: Callable[[StepGraph], int]
    state_bytes: int


class StepPlanning:
    """One step, with what it costs and ready to be planned.

    Args:
        captured: the step; its counts are enough to plan it with nothing encoded.
        costs: what it costs.
        options: what its plan is to be.
        ready_plan: residences to take as they are; None to plan.
        encoded: by step, what its plan encodes; filled in, and taken again where it exists.
        spare_bytes: of the budget, which a plan leaves free where there is one that can.

    Attributes:
        fingerprint: of the step as it was captured.
    """

    def __init__(
        self,
        captured: Captured | CountedStep,
        costs: StepCosts,
        options: CompileOptions,
        *,
        ready_plan: Plan | None = None,
        encoded: dict[str, tuple[str, ...]] | None = None,
        spare_bytes: int = 0,
    ) -> None:
        self.outputs = captured.output_storages()
        self._captured = captured = cast(Captured, captured)  # counts are neither encoded nor run
        self._costs = costs
        self._options = options
        self._ready_plan = ready_plan
        self._encoded = {} if encoded is None else encoded
        self._spare_bytes = spare_bytes
        with no_memory_limit():
            timed = costs.timed(captured)
        self.fingerprint = timed.fingerprint
        self._beside_bytes = costs.bytes_beside(timed)
        self._costed = [(captured, self._complete(timed))]

    def plan(self, loop: LoopMemory, encoding: Encoding = IF_FASTER) -> Planned:
        """Plan the step in a training loop.

        Args:
            loop: the memory that it holds.
            encoding: which plans are asked for, where the options let storages be encoded.

        Raises:
            BudgetError: no plan fits.
            NotFaster: no plan that encodes takes less than what `encoding` says.
            PlanError: the ready plan belongs to another step, or breaks a rule.
        """
        captured, plan = self._plan_one(lambda graph: in_loop(graph, loop, self.outputs), encoding)
        exact = self._costs_of(self._captured) if plan.exact_graph is not None else None
        return Planned(captured, plan, replace(self.unplanned, graph=self._costs_of(captured), exact_graph=exact), self)

    def plan_in_any(self, loops: Sequence[LoopMemory], encoding: Encoding = IF_FASTER) -> tuple[Planned, LoopMemory]:
        """The plan in the first of some loops that the step fits in, and that loop.

        Args:
            loops: what the loop may hold, from the most to the least.
            encoding: as of `plan`.

        Raises:
            BudgetError: it fits in none; what the first one needs, and what is enough for the last.
            NotFaster, PlanError: as `plan`.
        """
        loops = tuple(dict.fromkeys(loops))
        may_fit = (loop for loop in loops if len(loops) == 1 or self.may_fit(loop))  # one after another: it takes long
        refused: dict[LoopMemory, BudgetError] = {}
        for loop in chain(may_fit, (loops[0], loops[-1])):  # of the last two for what they need
            if loop in refused:
                continue
            try:
                return self.plan(loop, encoding), loop
            except BudgetError as error:
                refused[loop] = error
        raise with_optimistic(refused[loops[0]], refused[loops[-1]]).with_traceback(None)

    @property
    def unplanned(self) -> Basis:
        """The step by itself, with nothing encoded."""
        return Basis(self._costs_of(self._captured), None, self.outputs, self.fingerprint)

    def enough_as_written(self, refused: BudgetError, written: Basis | None, loop: LoopMemory) -> BudgetError:
        """The refusal of a variant, or of the one in which the author wrote the step if a new training would take that
        one in the budget that is named: in which variant a step is compiled is chosen before its loop is known.

        Args:
            refused: of this step in the loop.
            written: of the step as its author wrote it; None if it is this one.
            loop: the memory that it holds.
        """
        options, named_bytes = self._options, refused.least_feasible_bytes
        if written is None or named_bytes is None or options.lossy is not None or options.budget_bytes is None:
            return refused
        planner = allowed(options.means, options.planner, self._costs.state_bytes)
        hoped, seen = (
            in_loop(written.graph, one, written.outputs) for one in (best_case(LoopMemory(), written.outputs), loop)
        )
        with suppress(BudgetError):
            planner(hoped, self._costs.hardware, named_bytes)
            try:
                planner(seen, self._costs.hardware, options.budget_bytes)
            except BudgetError as error:
                return max(refused, error, key=lambda one: one.least_feasible_bytes or 0)
        return refused

    def by(self, planner: planners.Planner) -> StepPlanning:
        """The same step, planned by another planner."""
        other = copy(self)
        other._options = replace(self._options, planner=planner)
        return other

    def inside(self, budget_bytes: int | None) -> StepPlanning:
        """The same step, planned inside another budget; None to keep everything."""
        other = copy(self)
        other._options, other._encoded = replace(self._options, budget_bytes=budget_bytes), {}
        return other

    def priced(self, loop: LoopMemory) -> StepGraph:
        """The step by itself in a training loop, with nothing encoded, as far as it may be recomputed and offloaded."""
        return limited_step(self._options.means, in_loop(self._costs_of(self._captured), loop, self.outputs))

    def in_loops(
        self, loops: Sequence[LoopMemory], made: Callable[[StepPlanning, Encoding], tuple[Made, Plan]]
    ) -> Priced[Made]:
        """What the step costs, in whichever of some loops.

        Args:
            loops: as of `plan_in_any`.
            made: what is wanted of a plan of the step, and the plan.
        """
        known, is_joint = self.priced(loops[-1]), self._options.planner == "joint"

        @unset_fake_temporarily()
        def planned(budget_bytes: int, how: Encoding, planner: planners.Planner | None = None) -> tuple[Made, Plan]:
            one = self if budget_bytes == self._options.budget_bytes else self.inside(budget_bytes or None)
            return made(one if planner is None else one.by(planner), how)

        @cache
        @no_memory_limit()
        @unset_fake_temporarily()
        def with_share_encoded(share: float) -> StepGraph:
            return limited_step(self._options.means, self.bounding_step(loops[-1], share))

        smallest = partial(smallest_inside, limits=replace(DEFAULT, order="order" in self._options.means))
        return Priced(
            known,
            lambda budget_bytes: planned(budget_bytes, EncodeNothing()),
            None if self._options.lossy is None else Encodable(with_share_encoded, planned),
            refuse=(lambda nbytes: planned(nbytes, EncodeNothing(), refuse_in_a_moment)) if is_joint else None,
            smallest=(lambda nbytes: planned(nbytes, EncodeNothing(), smallest)) if is_joint else None,
        )

    def may_fit(self, loop: LoopMemory) -> bool:
        """Whether the step is expected to fit in a loop, with nothing encoded: by its bound, which holds for the ops in
        two orders, or by a plan that was found in a moment."""
        budget_bytes = self._options.budget_bytes
        if self._ready_plan is not None or budget_bytes is None or self._options.lossy is not None:
            return True
        graph = self.priced(loop)
        fits_by_bound = math.isfinite(least_seconds(graph, budget_bytes))
        return fits_by_bound or quick_least(graph, budget_bytes).expected_bytes <= budget_bytes

    def bounding_step(self, loop: LoopMemory, share: float) -> StepGraph:
        """The same with a share of what may be encoded: see `choose_encoded.bounding_step`."""
        return bounding_step(self._encoded_steps, share, lambda graph: in_loop(graph, loop, self.outputs))

    @cached_property
    def _encoded_steps(self) -> EncodedSteps:
        assert self._options.lossy is not None
        return EncodedSteps({"": self._captured}, self._options.lossy, lambda graphs: self._costs_of(graphs[""]))

    def _plan_one(self, placed: InLoop, encoding: Encoding) -> tuple[Captured, Plan]:
        captured, budget_bytes = self._captured, self._options.budget_bytes
        if self._ready_plan is not None:
            each_bytes = self._costs.state_bytes
            return _adopt(
                self._ready_plan, captured, lambda step: placed(self._costs_of(step)), each_bytes, budget_bytes
            )
        if budget_bytes is None:
            return captured, planners.get("keep_all")(placed(self._costs_of(captured)), self._costs.hardware, 0)
        if self._spare_bytes:
            with suppress(BudgetError):
                captured, made = self._plan_within(budget_bytes - self._spare_bytes, placed, encoding)
                return captured, replace(made, budget_bytes=budget_bytes)
        return self._plan_within(budget_bytes, placed, encoding)

    def _plan_within(self, budget_bytes: int, placed: InLoop, encoding: Encoding) -> tuple[Captured, Plan]:
        options, hardware = self._options, self._costs.hardware
        planner = allowed(options.means, options.planner, self._costs.state_bytes)
        before = placed(self._costs_of(self._captured))
        if options.lossy is None or isinstance(encoding, EncodeNothing):
            return self._captured, planner(before, hardware, budget_bytes)
        step = f"{before.fingerprint}, {before.static_bytes} bytes in addition"
        graphs, made = choose_encoded(
            self._encoded_steps,
            budget_bytes,
            lambda graph: planner(graph, hardware, budget_bytes),
            self._encoded.get(step),
            encoding,
            placed,
        )
        self._encoded[step] = tuple(storage.name for storage in made.encoded)
        return graphs[""], made

    def _costs_of(self, step: Captured) -> StepGraph:
        known = next((graph for one, graph in self._costed if one is step), None)
        if known is None:
            with no_memory_limit():
                known = self._complete(self._costs.timed(step))
            self._costed.append((step, known))
        return known

    def _complete(self, graph: StepGraph) -> StepGraph:
        if self._options.cuda_graphs:
            graph = graph.without_launches()  # the host launches two graphs a step
        return replace(graph, static_bytes=graph.static_bytes + self._beside_bytes, link=self._costs.link)


def allowed(means: frozenset[str], planner: str | planners.Planner, each_state_bytes: int = 0) -> planners.Planner:
    """A planner that recomputes, offloads and orders only where that is among the means.

    Args:
        means, planner: what the options say.
        each_state_bytes: as of `counting_states`.
    """
    make = counting_states(remembered(planner, order="order" in means), each_state_bytes)
    if {"recompute", "offload"} <= means:
        return make

    def plan(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        made = make(limited_step(means, graph), hardware, budget_bytes)
        graph = replace(graph, static_bytes=made.graph.static_bytes)
        return replace(made, graph=in_order_of(graph, op_names(made.graph)) if made.captured_order else graph)

    return plan


def limited_step(means: frozenset[str], graph: StepGraph) -> StepGraph:
    """A step of which nothing can be recomputed or offloaded where that is not among the means."""
    ops = graph.ops if "recompute" in means else tuple(replace(op, recomputable=False) for op in graph.ops)
    return replace(graph, ops=ops, link=graph.link if "offload" in means else None)


def _is_same(one: StepGraph, other: StepGraph) -> bool:
    return by_itself(one).fingerprint == by_itself(other).fingerprint


def _adopt(
    plan: Plan,
    captured: Captured,
    costed: Callable[[Captured], StepGraph],
    each_state_bytes: int,
    budget_bytes: int | None,
) -> tuple[Captured, Plan]:
    """The residences of a plan made elsewhere, with the costs of this machine, and the step with what it encodes.

    Raises:
        PlanError: it was made for another model or shape, breaks a rule, or passes the budget here.
    """
    graph = costed(captured)
    for step in (plan.graph, plan.exact_step):
        check_step(step)
    check_plan(replace(plan.graph, link=graph.link), plan.residences)
    states_bytes = states_of(plan) * each_state_bytes

    def with_states(graph: StepGraph) -> StepGraph:
        return replace(graph, static_bytes=graph.static_bytes + states_bytes)

    exact = graph = with_states(graph)
    said = encoded_by(plan.residences)
    if said is not None and _is_same(plan.exact_step, graph):
        lossy, chosen = said
        captured = encoded(captured, chosen, lossy)
        graph = with_states(costed(captured))
    if not _is_same(plan.captured_graph, graph):
        theirs = [s.shape for s in plan.graph.storages if s.kind == "input"]
        ours = [s.shape for s in graph.storages if s.kind == "input"]
        raise PlanError(
            f"the plan is for another step than that of {graph.model or 'this model'}; call shoal.plan again",
            details={
                "plan": f"{plan.graph.model or 'a model'}, inputs {theirs}, {len(plan.graph.ops)} ops",
                "step": f"{graph.model or 'a model'}, inputs {ours}, {len(graph.ops)} ops",
            },
        )
    ordered = in_order_of(graph, op_names(plan.graph)) if plan.captured_order else graph
    check_order(graph, ordered)
    check_plan(ordered, plan.residences, budget_bytes or 0)
    adopted = replace(
        plan,
        graph=ordered,
        exact_graph=exact if said is not None else None,
        captured_order=op_names(graph) if plan.captured_order else (),
        states_bytes=states_bytes,
    )
    if budget_bytes is None and 0 < plan.budget_bytes < adopted.predicted_peak_bytes:
        log.warning(
            "%s: the plan was made for %s, but takes %s here; give budget= to have it refused, or plan it again",
            graph.model or "model",
            format_bytes(plan.budget_bytes),
            format_bytes(adopted.predicted_peak_bytes),
        )
    return captured, adopted
