"""One model under one budget: plans each new shape, meters its first steps, plans again where they exceed it."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from shoal.capture.captured import Captured
from shoal.capture.dynamo import TooManyCaptures
from shoal.capture.traced_strides import Departure
from shoal.capture.varying_sizes import SizesSeen
from shoal.core.plan import Plan
from shoal.core.progress import doing
from shoal.core.shares import OtherTransfers
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_own_plan
from shoal.core.variant import Variant
from shoal.cost.measure import measure
from shoal.cost.measure_links import link_to
from shoal.cost.profile import profile_step
from shoal.engine import memory_warnings
from shoal.engine.calls import Call
from shoal.engine.compile_options import CompileOptions
from shoal.engine.cuda_graphs import ReplayedSteps, refuse
from shoal.engine.early_gradients import EarlyGradients
from shoal.engine.iteration.metered import Iteration
from shoal.engine.iteration.record import Metered
from shoal.engine.launched_step import as_launched
from shoal.engine.loop_memory import LoopMemory, possible_loops, step_alone, waiting_bytes
from shoal.engine.metering import Metering
from shoal.engine.observe_loop import loss_takes_more, observe_loop
from shoal.engine.open_transfers import OpenTransfers
from shoal.engine.optimizer_steps import watch
from shoal.engine.placement import Placement, spare_bytes
from shoal.engine.plan_kernels import kernels_of
from shoal.engine.plans_in_force import PlansInForce
from shoal.engine.refusal_hints import with_hint, with_reserve
from shoal.engine.repair import SetAside, exceeded, highest_predicted
from shoal.engine.reserved_budget import limit_for, look_beside, within_reserved
from shoal.engine.search.encoding import IF_FASTER, Encoding
from shoal.engine.status import Status
from shoal.engine.step_planning import UNMODIFIED, CompiledVariant, Planned, StepCosts, StepPlanning
from shoal.engine.traced_layouts import TracedLayouts
from shoal.errors import BudgetError
from shoal.kernels.generator import state_bytes
from shoal.memory.limit import limit_reserved, no_memory_limit
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import distinct_bytes
from shoal.offload.policy import Offloading
from shoal.offload.transfers import RunningTransfers, Transfers

log = logging.getLogger("shoal")

_ROOM = 0.05  # of the budget: what a plan leaves free, once the loop is known, for it to be made again
_SLOWER = 0.01  # of the plain step: what it must add for that
_MOST_WAITS = 20  # iterations that are metered until the optimizer has stepped: a GradScaler leaves out steps


class OfSeveralGraphs(NamedTuple):
    """What a session has of a model of several graphs."""

    metering: Metering
    plans: tuple[Plan, ...]
    measured_peak_bytes: int | None
    without_effect: tuple[str, ...]


@dataclass(eq=False)
class Session:
    """Plans the steps of one model.

    Attributes:
        status: `model.shoal`.
        options: what the model was compiled with.
        static: static memory outside the steps: the model and its optimizers, as far as they are known.
        name: the model's name for tables and errors.
        ready_plan: a plan to use as it is instead of planning.
        offloading: where saved storages may wait; None: only on the device.
        on_repair: called when the plans in force exceed the budget; must make the next step be planned again. None: the
            plans cannot be changed.
        loop: the memory that the training loop holds, as far as it is known.
        sizes: those of the inputs that the model was called with.
        metering: runs the steps and measures the memory that they use.
        early: how the gradients of the call under way are used while its backward pass runs.
        replayed: its steps as CUDA graphs, where they are to be.
        state_bytes: of the optimizers' state, as the plans in force count it.
        compiled_variants: what is known of each variant that a step is compiled in, by the shapes of its inputs.
        without_effect: a line for each means that was allowed by name and does not apply to the step.
        left_over: how many more calls wait, in the call under way, than in every iteration: backward passes that may
            never come, as of a batch that the loop skips.
    """

    status: Status
    options: CompileOptions = field(default_factory=CompileOptions)
    static: StaticMemory = field(default_factory=StaticMemory)
    name: str = ""
    ready_plan: Plan | None = None
    offloading: Offloading | None = None
    on_repair: Callable[[], None] | None = None
    loop: LoopMemory = field(default_factory=LoopMemory)
    sizes: SizesSeen = field(default_factory=SizesSeen)
    early: EarlyGradients = field(default_factory=EarlyGradients)
    metering: Metering = field(init=False)
    replayed: ReplayedSteps | None = None
    state_bytes: int = 0
    compiled_variants: dict[tuple[str, Variant], CompiledVariant] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    left_over: int = 0
    runs_here: ClassVar[bool] = True
    _placement: Placement | None = None
    _unlimit: Callable[[], None] | None = None
    _aside: SetAside = field(default_factory=SetAside)
    _waiting_bytes: int = 0  # of calls that are left over
    _waits: int = 0
    _improved: bool = False
    _in_force: PlansInForce = field(init=False)
    _uncounted: memory_warnings.UncountedState = field(init=False)
    _layouts: TracedLayouts = field(default_factory=TracedLayouts)
    _transfers: OpenTransfers = field(init=False)
    _plannings: weakref.WeakKeyDictionary[Metered, StepPlanning] = field(default_factory=weakref.WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.metering = self._new_metering()
        self._in_force = PlansInForce(self.status)
        self._uncounted = memory_warnings.UncountedState(self._said_name)
        self._transfers = OpenTransfers(self.offloading)
        if self.options.cuda_graphs:
            self.loop = replace(self.loop, replays=True)
            self.replayed = ReplayedSteps(self.status, self.static, self.metering.calls, self._said_name)
        self.status.has_new_plans = weakref.WeakMethod(self.has_new_plans)
        self.status.learn_refusals = weakref.WeakMethod(self.learn_refusals)
        if self.ready_plan is not None:
            self.loop = step_alone(replays=self.options.cuda_graphs)
        watch(self)

    def _new_metering(self) -> Metering:
        return Metering(self.static, self._ended, self.ran_out, backward_begins=self.foresee)

    @property
    def _said_name(self) -> str:
        return self.name or "model"

    def before_call(self) -> bool:
        """Before a training step: count what the loop holds by now, and plan again where that exceeds the budget.

        Returns:
            Whether the step accumulates onto gradients that are there.
        """
        self.learn_refusals()
        self.metering.calls.begins()
        self.check_caller()
        static = self.static
        there = static.gradients()
        if self.replayed is not None:
            self.replayed.check_call(there)
        used = bool(there) and self.metering.gradients_are_used
        if used and self.loop.drops_late and not static.gradients_pass:
            # zero_grad(set_to_none=False) keeps gradients, as zeros
            self.loop = replace(self.loop, drops_late=any(bool(gradient.any()) for gradient in there))
        static.gradients_pass = used and self.loop.drops_late
        if self.ready_plan is None:
            self._hold_over(distinct_bytes(there) if static.gradients_pass else 0)
            self.left_over = 0 if self.metering.by_call else self.metering.calls.under_way()
            if self.left_over:
                self.metering.close()  # what such a call takes is no measure of others
        return bool(there) and not static.gradients_pass

    def _hold_over(self, gradient_bytes: int) -> None:
        loop = self.loop
        now = loop
        if self.metering.calls.any_started:
            now = replace(now, held_gradient_bytes=max(loop.held_gradient_bytes or 0, gradient_bytes))
            result_bytes = sum(held.nbytes for held in self.metering.calls.held_of_the_last())
            now = replace(now, held_result_bytes=max(loop.held_result_bytes or 0, result_bytes))
        if now != loop:
            self._adapt(now)

    def bytes_beside_calls(self, n_calls: int) -> int:
        """The peak of the plans in force while that many more calls wait for backward passes."""
        waits_bytes = max((waiting_bytes(plan) for plan in self.status.plans), default=0)
        return (self.status.predicted_peak_bytes or 0) + n_calls * waits_bytes

    @contextmanager
    def beside_calls(self, n_calls: int) -> Iterator[None]:
        """Plan what is captured inside the block for a moment at which that many more calls wait; the plans in force
        before it are so again after it."""
        plans = self.status.plans
        self._waiting_bytes = self.bytes_beside_calls(n_calls) - (self.status.predicted_peak_bytes or 0)
        try:
            yield
        finally:
            self._waiting_bytes = 0
            self._in_force.go_back_to(plans)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the process has stepped: where it trains this model, its state counts as it is."""
        static = self.static
        if not static.trains(optimizer):
            return
        self.metering.gradients_are_used = True
        news = static.stepped(optimizer)
        if news:
            self.check_optimizer_step()
        if not (static.has_grown(optimizer) or news) or not self.status.plans or self.ready_plan is not None:
            return
        more_bytes = static.state_bytes() - self.state_bytes
        if not more_bytes:
            return
        news = news or f"{type(optimizer).__name__} has stepped"
        self._uncounted.stepped(news, static.state_bytes(), self.state_bytes)
        self.state_bytes += more_bytes
        self._count(more_bytes)
        budget_bytes, predicted_bytes = self.status.budget_bytes, self.status.predicted_peak_bytes or 0
        if self.on_repair is None and budget_bytes is not None and predicted_bytes > budget_bytes:
            memory_warnings.state_is_over(self._said_name, predicted_bytes, budget_bytes)

    def check_caller(self) -> None:
        """A step is called: from another thread or stream than before, cuBLAS keeps another workspace, which counts."""
        self._uncounted.called()
        more_bytes = self.static.called_from_elsewhere()
        if more_bytes and self.ready_plan is None:
            memory_warnings.called_from_elsewhere(self._said_name, more_bytes)
            self._count(more_bytes)

    def _count(self, more_bytes: int) -> None:
        """Count that many more bytes in use all step; plan again where the budget is exceeded with them."""
        self._in_force.count(more_bytes)
        self._adapt(self.loop)

    def check_optimizer_step(self) -> None:
        """Say where an optimizer's own step, which comes between the steps that are planned, passes the budget."""
        memory_warnings.optimizer_step_is_over(self._said_name, self.static, self.status.budget_bytes)

    def _adapt(self, loop: LoopMemory) -> None:
        """Count this in the plans in force; plan again where one exceeds the budget."""
        self.loop = loop
        if self._in_force.adapt(loop):
            log.info("%s: the loop holds more than was planned with; planning again", self._said_name)
            self._plan_anew()

    @property
    def may_be_iteration(self) -> bool:
        """Whether calls that overlap, or run backward twice, may be planned together from the next call on."""
        return self.ready_plan is None and self.replayed is None and self.on_repair is not None

    def has_new_plans(self) -> bool:
        """Whether the next step may be one that is metered."""
        return not self.status.plans or self._in_force.any_is_to_be_metered()

    def end_plans(self) -> tuple[Plan, ...]:
        """The plans in force, which are so no longer: something else than this runs the model from here on."""
        plans = self.status.plans
        self.metering.close()
        self._in_force.end()
        return plans

    def as_one_graph(self) -> OfSeveralGraphs:
        """Let the next step be that of a model of one graph, not planned yet; returns what `as_several_again` takes."""
        status = self.status
        before = OfSeveralGraphs(self.metering, status.plans, status.measured_peak_bytes, self.without_effect)
        self.metering = self._new_metering()
        self.metering.calls.begins()
        self.metering.gradients_are_used = before.metering.gradients_are_used
        self.without_effect = ()
        self._in_force.end()
        return before

    def as_several_again(self, before: OfSeveralGraphs) -> None:
        """Go on with the steps of several graphs: the model is not one."""
        self.metering, self.without_effect = before.metering, before.without_effect
        self.status.plans, self.status.measured_peak_bytes = before.plans, before.measured_peak_bytes

    def start_over(self, reached: TooManyCaptures) -> None:
        """Forget every captured step: there are as many as there may be. Each is captured again when it comes."""
        log.warning("%s: %s; all its plans are dropped, and made again as needed", self._said_name, reached)
        self._plan_anew()

    def _plan_anew(self) -> None:
        """Let every step be planned again from the next call on."""
        if self.on_repair is None:
            return
        self._in_force.end()
        if self._placement is not None:
            self._placement.ends()
            self._placement = None
        if not self.metering.calls.under_way():
            self.close()
        self.on_repair()

    @property
    def may_hope(self) -> bool:
        """Whether a plan may be made for a loop that holds less: the first metered step shows whether it does."""
        return not self.loop.learnt and self.ready_plan is None and self.on_repair is not None

    def loops(self, places: Collection[int]) -> tuple[LoopMemory, ...]:
        """Those that a plan may be made for, from the most that the loop may hold to the least.

        Args:
            places: of the step's outputs.
        """
        return possible_loops(self.loop, places) if self.may_hope else (self.loop,)

    def planning(self, captured: Captured, aside_bytes: int = 0) -> StepPlanning:
        """The step, profiled here and ready to be planned, with that many more bytes set aside."""
        self.state_bytes = self.static.state_bytes()
        device = captured.device
        with no_memory_limit():
            costs = StepCosts(
                lambda step: profile_step(step, device),
                measure(device),
                link_to(self.offloading, device) if self.offloading is not None else None,
                lambda graph: self._bytes_beside(graph) + aside_bytes,
                state_bytes(device),
            )
        return StepPlanning(
            captured,
            costs,
            self.options,
            ready_plan=self.ready_plan,
            encoded=self.status.encoded,
            spare_bytes=spare_bytes(device, self.options, self.status),
        )

    def try_to_plan(
        self, planning: StepPlanning, loops: Sequence[LoopMemory], encoding: Encoding = IF_FASTER
    ) -> tuple[Planned, LoopMemory]:
        """The plan of a step, and the loop that it is for: one that holds less, where nothing is known of it yet.

        `foresee` holds it against the loop that is seen, before a weight changes.

        Args:
            planning, loops, encoding: see `StepPlanning.plan_in_any`.

        Raises:
            BudgetError, NotFaster, PlanError: as that.
        """
        try:
            made, loop = planning.plan_in_any(loops, encoding)
        except BudgetError as refused:
            raise self._hinted(refused, planning) from None
        if loop != self.loop:
            log.info("%s: fits if the loop holds less than it may; the first step is metered", self.name)
        return made, loop

    def remember_variant(self, shapes: str, compiled_as: CompiledVariant) -> None:
        """Compile later steps with inputs of these shapes in this variant."""
        self.status.variants[shapes] = compiled_as.variant
        self.compiled_variants[shapes, compiled_as.variant] = replace(compiled_as, found=None)

    def make_plan(self, captured: Captured, step: Metered, compiled_as: CompiledVariant = UNMODIFIED) -> Captured:
        """Profile the step's ops here, then plan it inside the budget; `step` gets the plan and what it was made for.

        Args:
            captured: the step.
            step: as it will run.
            compiled_as: in which variant it was captured.

        Returns:
            The step as it is under the plan, which may encode storages that `captured` does not.

        Raises:
            BudgetError: no plan fits.
            PlanError: the ready plan belongs to another step.
        """
        started = time.perf_counter()
        doing("plan", f"{len(captured.graph.ops)} ops, {compiled_as.variant}")
        planned = compiled_as.planned_for(captured)
        if planned is None:
            planning = self.planning(captured)
            planned = self.try_to_plan(planning, self.loops(planning.outputs))
        made, self.loop = planned
        if self.options.budget_of == "reserved":
            made = self._within_reserved(captured, made)
        captured, plan = made.captured, made.plan
        self._plannings[step] = made.planning
        basis = compiled_as.basis(made.basis)
        check_own_plan(plan.captured_graph, plan.graph, plan.residences, self.status.budget_bytes or 0)
        seconds = time.perf_counter() - started + compiled_as.seconds
        plan = replace(
            compiled_as.described(made, self.loop, self.options),
            planning_seconds=seconds,
            without_effect=self.without_effect,
            is_at_most=bool(captured.largest_nodes),
        )
        if self.ready_plan is None:
            plan = replace(plan, kernels=kernels_of(plan, captured.device.type))
        self._in_force.put(step, plan, basis)
        return replace(captured, graph=plan.graph)

    def _within_reserved(self, captured: Captured, made: Planned) -> Planned:
        """The plan, or another one, for which the allocator reserves no more than the budget; it may not from here on.

        Raises:
            BudgetError: there is none.
        """
        static, status, device = self.static, self.status, captured.device
        budget_bytes = status.budget_bytes or 0

        def again(aside_bytes: int) -> Planned:
            return self.planning(captured, aside_bytes).plan(self.loop)

        look = look_beside(static, device, budget_bytes, self.loop)
        made, found = within_reserved(made, again, look, budget_bytes)
        status.predicted_reserved_bytes = max(found.reserved_bytes, status.predicted_reserved_bytes or 0)
        if self._unlimit is None:
            self._unlimit = limit_reserved(limit_for(budget_bytes), device)
        return made

    def say_without_effect(self, lines: tuple[str, ...]) -> None:
        """Say which means do not apply to the step, once each; its plans say it too."""
        for line in lines:
            if line not in self.without_effect:
                log.warning("%s: allow: %s", self._said_name, line)
        self.without_effect = lines

    def let_go(self) -> None:
        """The model is gone: `close`, meter nothing and bound nothing any more."""
        self.close()
        self.metering.close()
        if self.replayed is not None:
            self.replayed.release()
        if self._unlimit is not None:
            self._unlimit()
            self._unlimit = None

    def go_back_to(self, plans: tuple[Plan, ...]) -> None:
        """Have these plans in force, of all that are: a step that was planned since will not run."""
        self._in_force.go_back_to(plans)

    def _hinted(self, refused: BudgetError, planning: StepPlanning) -> BudgetError:
        error = with_hint(refused, self.static, self.state_bytes)
        return with_reserve(error, self._aside.of(planning.fingerprint))

    def _bytes_beside(self, graph: StepGraph) -> int:
        return self.static.bytes_beside(graph) + self._aside.of(graph.fingerprint) + self._waiting_bytes

    def compiles(self, inputs: Sequence[Any]) -> bool:
        """Whether the regions of a step with such inputs are compiled."""
        types = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
        return self.options.compiles("cuda" if "cuda" in types else "cpu")

    def in_regions(self, captured: Captured) -> Captured:
        """The step with the ops that this machine launches: see `as_launched`."""
        return as_launched(captured, self.options, self.ready_plan)

    def in_traced_layouts(self, captured: Captured) -> Captured:
        """The step with copies after the ops whose results were not laid out as traced; see `learn_layouts`."""
        return self._layouts.restored(captured)

    def learn_layouts(self, fingerprint: str, departures: Mapping[str, Departure]) -> None:
        """Plan again with the copies counted that put tensors into their traced layout, and say so.

        Args:
            fingerprint: of the step as captured.
            departures: by the name of the node.

        Raises:
            PlanError: the plan was given and is run as it is.
            CaptureError: the copies cannot be counted: planning again would not change the next step, or did not.
        """
        self._layouts.learn(
            self._said_name,
            fingerprint,
            departures,
            plan_is_given=self.ready_plan is not None,
            can_plan_again=self.on_repair is not None or self.status.budget_bytes is None,
        )
        self._plan_anew()

    def placement_on(self, device: torch.device) -> Placement:
        """The addresses of the plans in force, on a CUDA device."""
        if self._placement is None:
            static = self.static
            self._placement = Placement(
                device,
                self.status,
                self._said_name,
                lambda: static.awaits_optimizer,
                lambda: static.state_bytes() - static.state_there_bytes() + static.optimizer_step_bytes()[1],
            )
        return self._placement

    def carry(
        self, plan: Plan, device: torch.device, running: RunningTransfers | None, others: OtherTransfers
    ) -> Transfers | None:
        """What moves the storages that the plan offloads; None where it offloads nothing, and does nothing for others.

        Args:
            plan: of the step.
            device: where it runs.
            running: transfers of the graphs of an iteration, if it is one of several.
            others: what it does for the storages of other graphs.

        Raises:
            TransferError: the host has no room for them.
            CaptureError: the step is to be replayed as CUDA graphs.
        """
        if plan.offloaded and self.replayed is not None:
            raise refuse("the plan offloads to the host")
        return self._transfers.of(plan, device, running=running, others=others)

    def learn_errors(self, plan: Plan, errors: Sequence[float]) -> None:
        """Put what a step's encodings really lost into the plan."""
        self._in_force.learn_errors(plan, errors)

    def close(self) -> None:
        """Give the host's bytes and the link's threads back. Steps planned so far cannot run any more."""
        self._transfers.close()

    def foresee(self, iteration: Iteration, call: Call) -> None:
        """Before the last backward pass of an iteration: hold its plan against what forward pass and loss have shown.

        Args:
            iteration: what was metered so far.
            call: the one that goes back. Whoever still holds a result of it now has a name for it.

        Raises:
            BudgetError: no plan fits into such a loop; no weight has changed yet.
        """
        budget_bytes = self.status.budget_bytes
        if budget_bytes is None or not self.may_hope or not self._in_force.have(iteration.steps):
            return
        if any(step.departures for step in iteration.steps):
            return
        held = call.held_by_caller()
        held_bytes = sum({call.outputs[place].key: call.outputs[place].nbytes for place in held}.values())
        fates = replace(iteration.fates, outlived=held, let_go=set(call.outputs) - held)
        awaited_bytes = max(0, self.state_bytes - self.static.state_there_bytes())
        seen = observe_loop(
            iteration,
            fates,
            iteration.measured(),
            self.loop,
            gradients_pass=self.static.gradients_pass,
            awaited_bytes=awaited_bytes,
        )
        seen = replace(seen, held_result_bytes=held_bytes, hooks_free=True)  # no hook has run yet
        for step in iteration.steps:
            planning, basis = self._plannings.get(step), step.basis_in_call()
            if planning is None or step.plan is None or basis is None:
                continue
            if basis.of(step.plan, seen).predicted_peak_bytes > budget_bytes:
                try:
                    planning.plan(seen)
                except BudgetError as refused:
                    error = planning.enough_as_written(refused, basis.written, seen)
                    self._plan_anew()
                    raise self._hinted(error, planning) from None

    def _ended(self, iteration: Iteration) -> None:
        waits = self.static.awaits_optimizer and self._waits < _MOST_WAITS
        self._waits += waits
        for step in iteration.steps:  # the last that is metered has the optimizer's state, which may come late
            step.steps_to_meter -= step.steps_to_meter > waits
        self.learn(iteration)

    def learn(self, iteration: Iteration) -> None:
        """Compare metered calls with the plans; over the budget, warn and plan again with what was learnt."""
        status, measured = self.status, iteration.measured()
        self._plannings.clear()
        if any(step.departures for step in iteration.steps):
            return  # it took copies that are not planned yet
        budget_bytes = status.budget_bytes
        if not self._in_force.have(iteration.steps):
            if budget_bytes is not None and measured.peak_bytes > budget_bytes:
                memory_warnings.planned_apart_is_over(self._said_name, measured.peak_bytes, budget_bytes)
            return
        status.note(measured)
        if self.ready_plan is not None:
            if budget_bytes is not None and measured.peak_bytes > budget_bytes:
                memory_warnings.given_plan_is_over(self._said_name, measured.peak_bytes, budget_bytes)
            return
        if self.metering.calls.again and self.may_be_iteration:  # the next call begins one
            if budget_bytes is not None and measured.peak_bytes > budget_bytes:
                memory_warnings.graph_is_kept(self._said_name, measured.peak_bytes, budget_bytes)
            return
        before_bytes = highest_predicted(iteration.steps)
        static = self.static
        awaited_bytes = max(0, self.state_bytes - static.state_there_bytes())
        self._adapt(
            observe_loop(
                iteration,
                iteration.fates,
                measured,
                self.loop,
                gradients_pass=static.gradients_pass,
                awaited_bytes=awaited_bytes,
            )
        )
        after_bytes = highest_predicted(iteration.steps)
        if budget_bytes is None:
            return
        if measured.peak_bytes > budget_bytes:
            self._repair(iteration.steps, measured.peak_bytes, after_bytes, budget_bytes)
        elif before_bytes - after_bytes > _ROOM * budget_bytes and self._would_gain():
            self._improved = True
            freed = format_bytes(before_bytes - after_bytes)
            log.info("%s: the loop leaves %s that were planned for; planning again to use them", self.name, freed)
            self._plan_anew()

    def _would_gain(self) -> bool:
        """Whether room that turned out to be free could make the steps faster, and was not used before.

        What is encoded stays: it would change the numbers.
        """
        slowed = any(plan.predicted_seconds > (1 + _SLOWER) * plan.plain_timeline.seconds for plan in self.status.plans)
        return slowed and not self._improved and self.options.lossy is None

    def _repair(self, steps: Sequence[Metered], measured_bytes: int, predicted_bytes: int, budget_bytes: int) -> None:
        if self.on_repair is None:
            passed = exceeded(measured_bytes, predicted_bytes, budget_bytes)
            memory_warnings.cannot_plan_again(self._said_name, passed, measured_bytes - budget_bytes)
            return
        self._aside.over_budget(self._said_name, steps, measured_bytes, predicted_bytes, budget_bytes)
        self.status.repairs += 1
        self._plan_anew()

    def learn_refusals(self) -> None:
        """Plan again where memory ran out in a metered step, be it in the loss, of which only the caller knows."""
        self.metering.learn_refusals()

    def ran_out(self, iteration: Iteration, used_bytes: int, between: bool) -> None:
        """Memory ran out in a metered step: plan again with more room, for the loss where it took more than was known,
        else with some of the budget set aside. After one, say so."""
        if iteration.has_ended:
            memory_warnings.ran_out_after(self._said_name, self.static)
            return
        budget_bytes = self.status.budget_bytes
        if budget_bytes is None or self.on_repair is None or self.ready_plan is not None:
            return
        steps, loop = iteration.steps, self.loop
        if between and not loop.learnt:
            loop = loss_takes_more(loop, steps, used_bytes)
        learnt, on_cuda = loop != self.loop, all(step.device.type == "cuda" for step in steps)
        if not learnt and not on_cuda:
            return  # what is known to fit met a limit on the CPU, which may be for this call only
        if learnt:
            self.loop = loop
            room = f"room there for {loop.loss_share:.3g} times the outputs' gradients"
            memory_warnings.ran_out_in_loss(self._said_name, room, budget_bytes)
        if not learnt or (on_cuda and used_bytes <= budget_bytes):  # the device has less
            self._aside.out_of_memory(self._said_name, steps, used_bytes, budget_bytes)
        self.status.repairs += 1
        gc.collect()  # the frames that failed hold tensors
        self._plan_anew()
