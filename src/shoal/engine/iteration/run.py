"""The iterations of one model of several graphs, or of several models: each is metered as it first runs, planned as one
step, and repeated.

An iteration is a sequence of graphs, of whichever model. In its first run each graph keeps everything while there is
ample room, else the minimum, and every eager interval is measured. When its last backward pass has ended, or it begins
again, all its graphs are planned as one (`shoal.engine.iteration.plan`), with what the loop, other models and the
optimizers hold by then.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.capture.dynamo import capturing, plain_call
from shoal.capture.graph_breaks import capturing_parts
from shoal.capture.layered import Refused
from shoal.capture.varying_sizes import SizesSeen
from shoal.core.joined_step import Interval, label, op_names_of, share_of
from shoal.core.over_budget import over_budget
from shoal.core.progress import doing, preparing
from shoal.core.residence import Residence
from shoal.core.shares import Share
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_plan
from shoal.core.validate_step import check_step
from shoal.core.variant import WHOLE
from shoal.engine import memory_warnings
from shoal.engine.backend import STEPS_TO_METER
from shoal.engine.iteration.first import CallsBefore, first_share, least_bytes, minimum_share, no_graph
from shoal.engine.iteration.graphs import DynamoGraph, GraphSequence, GraphStep, Node
from shoal.engine.iteration.known import FIRST_RUN, KnownIteration, first_run_bytes
from shoal.engine.iteration.metered import Iteration
from shoal.engine.iteration.plan import (
    Choose,
    GraphVariant,
    MeasuredIteration,
    PlannedParts,
    VariantPlanning,
    with_less_host,
)
from shoal.engine.iteration.record import Metered
from shoal.engine.iteration.variants import IterationVariants, first_variant, plan_best_variant
from shoal.engine.loop_memory import waiting_bytes
from shoal.engine.metering import Metering
from shoal.engine.optimizer_steps import watch
from shoal.engine.plan_kernels import check_kernels
from shoal.engine.refusal_hints import with_reserve
from shoal.engine.repair import aside_when_out
from shoal.engine.search.without_effect import A_MODEL, SEVERAL_MODELS
from shoal.engine.session import Session
from shoal.engine.snapshot import Snapshot
from shoal.errors import BudgetError, CaptureError, PlanError
from shoal.memory.limit import this_thread_trains
from shoal.memory.storage_bytes import WeakStorage, dense_tensors, distinct_bytes

log = logging.getLogger("shoal")

# Budgets: a first iteration that needs more at one of its graphs is refused there. It takes no more than twice what was
# given to find what to name, and where that is not enough, what is named at least doubles.
_MOST_OVER = 2.0


class Iterations(GraphSequence):
    """The iterations of one or several models.

    Args:
        session: of all of them.
        device: where they run.
        models: by name, as somebody else holds them: Dynamo keeps this object for good.
        shared: whether they share a `shoal.Budget`: then everything that is allocated counts, and a call cannot begin
            again, for others have run before it.
        broken: where Dynamo could not go on when the model was to be one graph, and why.
        before: calls that are under way, of a model that was one graph up to here.

    Attributes:
        models: those that are alive, by name.
        known: the iterations that have run, by their graphs.
    """

    def __init__(
        self,
        session: Session,
        device: torch.device,
        models: Mapping[str, nn.Module],
        *,
        shared: bool,
        broken: str = "",
        before: CallsBefore | None = None,
    ) -> None:
        super().__init__(session)
        self.models = models
        self.known: dict[tuple[Node, ...], KnownIteration] = {}
        self.metering = Metering(
            session.static, self._ended, self._ran_out, self._note_back, by_call=True, counts_all=shared, device=device
        )
        self._device, self._shared = device, shared
        self._broken = broken
        self._begin = self.node
        self._whose: dict[Node, str] = {}
        self._calling = ""
        self._times_forgotten = 0
        self._unknown: set[Node] = set()  # iterations that begin with these have to be metered
        self._stay_as_measured = False  # the graphs: no variant of an iteration is looked for
        self._is_not_as_planned = False  # a graph, when it was compiled in the variant that was chosen
        self._said: set[str] = set()
        self._used: set[str] = set()  # models whose optimizer has stepped since their last backward pass
        self._keeps_little = shared or before is not None
        self._before = before  # until the first of these iterations has ended
        if before is not None:
            self.metering.calls = before.calls
        self._buffer_bytes: dict[str, int] | None = None  # before the iteration; None: no copies of buffers are kept
        self._refused: BudgetError | None = None
        self._goes_back_later = False  # an iteration was taken for one that is left over, and was not
        self._over: BudgetError | None = None  # why the iteration that goes on does not fit
        self._shapes: dict[int, set[tuple[torch.Size, ...]]] = {}  # of each call of an iteration, by number
        self._is_new_shape = True  # of the call under way
        self._has_other_sizes = False  # it has, after its first graph
        self._in_call = False
        self._surroundings: object = None  # of the plans, as far as the session knows them
        self._given = session.ready_plan
        if self._given is not None:
            check_step(self._given.graph)
            check_plan(self._given.graph, self._given.residences, session.status.budget_bytes or 0)
            check_kernels(self._given, device.type)
        session.metering = self.metering
        if shared:
            session.on_repair = self.forget
        else:
            session.status.has_new_plans = weakref.WeakMethod(self.has_new_plans)
            session.static.keep_library_memory()  # the first iteration is measured, not planned
        watch(self)

    def call(
        self,
        name: str,
        captured: dict[Any, Callable[..., Any]],
        kind: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        strict: bool = False,
    ) -> Any:
        """Call a model for a training step.

        Args:
            name: the model's.
            captured: its calls as Dynamo knows them, filled in here and kept by who keeps the model.
            kind: what decides, other than shapes, over how it is captured.
            args, kwargs: the call's.
            strict: whether the model must be one graph.

        Raises:
            BudgetError: no plan fits; or, in the first iteration, a graph does not.
            CaptureError: nothing of the model that trains can be captured, or it is not one graph.
        """
        if self._refused is not None:
            raise self._refused.with_traceback(None)  # of this call, not of those before
        if strict and (kind, self._times_forgotten) not in captured:
            capture = capturing(self.models[name], self.compile_graph, name, self.session.status.prepared)
            captured[kind, self._times_forgotten] = capture
        if not self._may_begin_again():
            return self._run(name, captured, kind, args, kwargs)
        before, sizes = Snapshot(self.models[name]), copy.deepcopy(self._sizes)
        if self.metering.iteration is None or self.metering.is_over():
            self._buffer_bytes = {key: distinct_bytes([b]) for key, b in self.models[name].named_buffers()}
        try:
            return self._run(name, captured, kind, args, kwargs, before.tensors)
        except CaptureError:
            before.restore()
            raise
        except BudgetError:
            if not self._may_keep_less(name):
                raise
            log.debug("%s: too much was kept for its later graphs", name)
        gc.collect()  # frames of the traceback held what the forward pass has saved
        before.restore()
        self._sizes = sizes  # what did not fit may do so now
        self.forget()
        return self._run(name, captured, kind, args, kwargs, before.tensors)

    def _may_begin_again(self) -> bool:
        """Whether the call may turn out not to fit and begin again with less kept: not once all plans are made."""
        is_first = self._before is not None and (self.metering.iteration is None or not self.metering.is_over())
        return not (self._shared or self._budget_bytes is None or is_first) and (
            not self.known or not self._keeps_little or bool(self._unknown) or self._closely()
        )

    def _may_keep_less(self, name: str) -> bool:
        """Whether the graphs that ran could have left more room for one that did not fit.

        They could if everything was kept, and if they ran by a plan that does not know it.
        """
        iteration = self.metering.iteration
        may = not self._keeps_little or any(node.share is not None for node in self.node.path())
        self._keeps_little = True
        return may and iteration is not None and iteration.called == [name]

    def _run(
        self,
        name: str,
        captured: dict[Any, Callable[..., Any]],
        kind: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        copies: Sequence[torch.Tensor] = (),
    ) -> Any:
        iteration = self._enter(args, kwargs, copies)
        self._note_shape(len(iteration.called), args, kwargs)
        this = kind, self._times_forgotten
        if this not in captured:
            captured[this] = capturing_parts(self.models[name], self.compile_graph)
        before = self.metering.begins_to_train()
        self._say_over(before.peak_bytes, "before an iteration's first graph, by a call without gradients")
        iteration.called.append(name)
        self._calling = name
        this_thread_trains()
        self.metering.calls.begins()
        status, path, n_run = self.session.status, len(self.node.path()), self.n_run
        why = "its graphs are compiled again" if status.preparations else ""
        self._in_call = True
        try:
            with preparing(name, why=why, record=status.prepared):
                compiled = self.compiled
                outputs = captured[this](*args, **kwargs)
            if self.compiled > compiled and not self._shared:
                gc.collect()  # cycles of Dynamo's hold what functions were called with that it gave up in the midst
            if not self._shared and self._budget_bytes is not None and not self._trains(outputs, path, n_run):
                raise no_graph(self.session.name, self._broken, is_sharded=self.session.static.is_sharded)
        except BaseException:
            iteration.failed = True
            raise
        finally:
            self._in_call = False
        iteration.results += _weak(outputs)
        return outputs

    def call_plainly(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a model that is not trained by this call. What it uses and returns counts while an iteration goes on."""
        iteration = self._enter(args, kwargs, trains=False)
        outputs = plain_call(self.models[name], *args, **kwargs)
        iteration.results += _weak(outputs)
        return outputs

    def accumulates(self, name: str) -> bool:
        """Whether a step of the model adds to gradients that exist and that no optimizer has used."""
        return name not in self._used and any(p.grad is not None for p in self.models[name].parameters())

    def is_between_steps(self) -> bool:
        """Whether no backward pass is pending."""
        return self.metering.is_over()

    def forget(self) -> None:
        """Capture and plan again from the next call on."""
        for seen in self._sizes.values() if self._has_other_sizes else ():
            seen.forget_captured()
        self.metering.iteration = None
        self._begin = self.node = Node()
        self.n_run = 0
        self._times_forgotten += 1
        self.known.clear()
        self._unknown.clear()
        self._whose.clear()
        self._refused = self._over = None
        self.session.status.plans = ()

    def meter_again(self) -> None:
        """Meter every iteration when it runs next: something else is in memory."""
        for known in self.known.values():
            known.to_meter = max(1, known.to_meter)

    def has_new_plans(self) -> bool:
        """As `Session.has_new_plans`."""
        return not self.known or any(known.to_meter for known in self.known.values())

    def close(self) -> None:
        """Meter nothing any more."""
        self.metering.close()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the process has stepped."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._used.update(n for n, m in self.models.items() if any(id(p) in trained for p in m.parameters()))
        self.session.optimizer_stepped(optimizer)  # its state is known from here on, whoever is told first
        iteration = self.metering.iteration
        if iteration is not None and iteration.closely and self.session.static.trains(optimizer):
            iteration.state_is_now(self.session.static.state_there_bytes())

    @property
    def _budget_bytes(self) -> int | None:
        return self.session.status.budget_bytes

    @property
    def _said_name(self) -> str:
        return self.session.name or "model"

    def in_use_bytes(self) -> int:
        waits_bytes = 0 if self._before is None else self._before.waits_bytes
        return self.metering.in_use_bytes() + waits_bytes

    def given(self, node: Node) -> tuple[GraphVariant, Share] | None:
        given, part = self._given, node.part
        if given is None or part is None:
            return None
        place = self._place(node)
        cuts = (cut for cut in given.variant.pieces if cut.op.startswith(label(place)))
        pieces = tuple(replace(cut, op=cut.op.removeprefix(label(place))) for cut in cuts)
        try:
            _, own = IterationVariants([part]).graph(given.variant).get(part, (part.graph, WHOLE))
        except Refused:
            own = WHOLE  # only other graphs of the iteration have it
        variant = GraphVariant(replace(own, pieces=pieces, shrunk=given.variant.shrunk), "")
        return variant, share_of(place, given)

    def check_given(self, node: Node, graph: StepGraph) -> None:
        if self._given is None:
            return
        place = self._place(node)
        theirs = op_names_of(place, self._given.captured_graph)
        ours = [op.name for op in graph.ops if op.phase != "loss"]
        if theirs != ours:
            raise PlanError(
                f"the plan is for other graphs than those of {self._said_name}; plan it again",
                details={"graph": str(place + 1), "plan": f"{len(theirs)} ops", "step": f"{len(ours)} ops"},
            )

    def _place(self, node: Node) -> int:
        """Of a graph that trains, among those of its iteration."""
        return len(node.path()) - 1

    def first_share(self, node: Node, graph: StepGraph, device: torch.device) -> Share:
        budget_bytes, in_use_bytes = self._budget_bytes, node.in_use_bytes
        if budget_bytes is None:
            return Share()
        plans = [node.step.plan for node in self.node.path() if node.step is not None and node.step.plan is not None]
        before_bytes = 0 if self._before is None else self._before.host_bytes
        graph = with_less_host(graph, before_bytes + sum(plan.host_bytes for plan in plans))
        if self._shared:
            return Share(self._first_share_of_several(graph, device, in_use_bytes, budget_bytes))
        try:
            return Share(first_share(graph, device, in_use_bytes, budget_bytes, keeps_little=self._keeps_little))
        except BudgetError as error:
            if self.may_vary(node) or not self._may_run_over(graph, device, in_use_bytes):
                raise
            self._over = _without_frames(error)
            return Share(minimum_share(graph, device))

    def _first_share_of_several(
        self, graph: StepGraph, device: torch.device, in_use_bytes: int, budget_bytes: int
    ) -> Mapping[str, Residence]:
        """As `first_share` with room for all models' gradients; without it where that does not fit, for they may never
        exist at the same time."""
        own_bytes = sum(s.nbytes for s in graph.storages if s.kind == "gradient")
        to_come = [p for m in self.models.values() for p in m.parameters() if p.requires_grad and p.grad is None]
        to_come_bytes = max(0, distinct_bytes(to_come) - own_bytes) + self._state_to_come_bytes()
        try:
            return first_share(
                graph, device, in_use_bytes + to_come_bytes, budget_bytes, keeps_little=self._keeps_little
            )
        except BudgetError:
            return first_share(
                graph, device, in_use_bytes, budget_bytes, keeps_little=self._keeps_little, who=self._calling
            )

    def may_vary(self, node: Node) -> bool:
        static, part = self.session.static, node.part
        stays = self._stay_as_measured or self.sizes_vary or static.is_sharded or self._given is not None
        return part is not None and node.chosen is None and not stays and part.variants.has_other_graphs

    def first_variant(self, part: DynamoGraph, in_use_bytes: int) -> GraphVariant:
        return first_variant(part, self, self._device, in_use_bytes, self._budget_bytes or 0)

    def _may_run_over(self, graph: StepGraph, device: torch.device, in_use_bytes: int) -> bool:
        """Whether an iteration that does not fit goes on with the minimum all the same: it is refused when its first
        `backward()` has ended, with a budget in which all of it runs."""
        return (
            self._keeps_little
            and self.metering.measures
            and not self.sizes_vary
            and all(node.share is None for node in self.node.path())
            and least_bytes(graph, device, in_use_bytes) <= _MOST_OVER * (self._budget_bytes or 0)
        )

    def is_not_as_planned(self, name: str) -> None:
        self._is_not_as_planned = True
        self._say(
            f"{self._said_name}: {name} is another step than was planned in its variant; it keeps the minimum in this "
            "iteration, and the next ones are planned unmodified"
        )

    def learn_errors(self) -> None:
        """Have the plans in force, each with what its graphs' encodings really lost once they all have measured it."""
        self.session.status.plans = tuple(plan for known in self.known.values() for plan in known.learn_errors())

    def sizes_changed(self, seen: SizesSeen) -> None:
        if not self._is_new_shape:
            self.sizes_vary = self._keeps_little = self._has_other_sizes = seen.wander = True

    def _note_shape(self, n_calls: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A call begins, after `n_calls` others of its iteration. Calls of different sizes, such as of several crops,
        do not vary if they are the same in each iteration."""
        leaves = tree_leaves((args, dict(kwargs)))
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
        known = self._shapes.setdefault(n_calls, set())
        self._is_new_shape = shapes not in known
        known.add(shapes)
        self._has_other_sizes = False
        if len(known) > 1 and not (self.sizes_vary or self._shared):
            self.sizes_vary = self._keeps_little = True  # the next shape may be larger than those that are planned

    def reached(self, node: Node) -> None:
        self._whose[node] = self._calling
        iteration = self.metering.iteration
        if node.before is not self._begin or iteration is None or not iteration.closely or iteration.runs:
            return
        begun = [known for path, known in self.known.items() if path[0] is node]
        for known in begun:
            grown_bytes = max(0, iteration.begin_bytes - known.begin_bytes)
            held_bytes = self._held_bytes(known, iteration)
            if known.planned is None or grown_bytes - held_bytes > known.grown_bytes - known.held_bytes:
                known.grown_bytes, known.held_bytes = grown_bytes, held_bytes
        if any(known.has_to_be_planned(self._budget_bytes) for known in begun):
            self._plan(begun)
        if begun and node not in self._unknown and not any(known.to_meter for known in begun):
            iteration.record = None

    def _closely(self) -> bool:
        """Whether the next iteration is to be metered."""
        return not self.known or bool(self._unknown) or any(known.to_meter for known in self.known.values())

    def _enter(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        copies: Sequence[torch.Tensor] = (),
        *,
        trains: bool = True,
    ) -> Iteration:
        """A call begins, and with it an iteration if none goes on."""
        metering = self.metering
        metering.learn_refusals()
        tensors = dense_tensors((args, dict(kwargs), *copies))
        is_beside = False
        if metering.iteration is not None:
            if not metering.is_over() and self._waits_only_for_calls_before((args, kwargs)):
                self._ended(metering.iteration)
            elif not metering.is_over():
                # A teacher may be called when all graphs have run: only another training call shows a skipped batch.
                is_beside = trains and self._is_left_over(metering.iteration, (args, kwargs))
                if not is_beside:
                    metering.goes_on_with(tensors)
                    return metering.iteration
            self._settle(metering.iteration)
        if self._is_not_as_planned:
            self._is_not_as_planned, self._stay_as_measured, self._keeps_little = False, True, True
            self.forget()
        self.node, self.n_run = self._begin, 0
        self.running.begin()
        if not self._shared:
            self._note_surroundings()
        between = metering.begin(self.models, tensors, closely=self._closely() and not is_beside)
        self._say_over(
            between.peak_bytes, "between two iterations, as by an optimizer's step or a call without gradients"
        )
        iteration = metering.iteration
        assert iteration is not None
        iteration.after, iteration.is_beside = metering.calls.number if self._before is None else 0, is_beside
        return iteration

    def _waits_only_for_calls_before(self, given: Any) -> bool:
        """Whether nothing is pending but calls of before the first of these iterations, whose backward passes may never
        come, and the call that begins is not given what they returned."""
        before, calls, iteration = self._before, self.metering.calls, self.metering.iteration
        if before is None or iteration is None or not iteration.went_back or calls.under_way(after=before.last):
            return False
        return not calls.lead_to(tree_leaves(given))

    def _is_left_over(self, iteration: Iteration, given: Any) -> bool:
        """Whether the loop has skipped the backward pass of the iteration that goes on: all its calls are made, as far
        as is known, and the next one is given nothing that they returned. What it takes beside them is said."""
        path = tuple(self.node.path())
        known = self.known.get(path)
        if known is None or known.planned is None or iteration.went_back or self._goes_back_later:
            return False
        if any(len(other) > len(path) and other[: len(path)] == path for other in self.known):
            return False
        if self.metering.calls.lead_to(tree_leaves(given)):
            return False
        peak_bytes = known.predicted_bytes + max(map(waiting_bytes, known.planned.plans))
        if peak_bytes > (self._budget_bytes or peak_bytes) and "left over" not in self._said:
            self._said.add("left over")
            memory_warnings.left_over(known.name, len(iteration.called), peak_bytes)
        return True

    def _note_surroundings(self) -> None:
        """What the loop or the optimizers hold has changed: see in the next iteration what that takes."""
        loop = self.session.loop
        now = loop.held_gradient_bytes, loop.held_result_bytes, self.session.static.state_bytes()
        if now != self._surroundings:
            self._surroundings = now
            self.meter_again()

    def _ended(self, iteration: Iteration) -> None:
        """A `backward()` has ended and none is pending: plan the iteration before an optimizer changes a weight.

        What comes after this without a forward pass, as a second loss, is held against that plan.
        """
        path = tuple(self.node.path())
        if not path or path in self.known or iteration.record is None or self._in_call:
            return
        before = self._before
        if before is not None and iteration.went_back and not iteration.failed:
            self._check_first_of_calls(before, iteration.peak_bytes + before.waits_bytes)
        if self._is_of_no_use(iteration):
            return
        if self._has_other_sizes and self._budget_bytes is not None and any(node.share is not None for node in path):
            self._plan_for_all_sizes()
            return
        self._learn(iteration, path)
        if not self._shared:  # what other models hold when it begins again is not known yet
            self._plan([known for nodes, known in self.known.items() if nodes[0] is path[0]])
        self._refuse_if_over(iteration.peak_bytes)

    def _check_first_of_calls(self, before: CallsBefore, peak_bytes: int) -> None:
        """Calls of which the first was planned before it was known how many there are: where they are over the budget,
        say so if the next ones, which are planned together, are expected to fit, else refuse them."""
        budget_bytes = self._budget_bytes
        if budget_bytes is None or peak_bytes <= budget_bytes:
            return
        kept_bytes = before.waits_bytes - before.least_bytes(self._device)
        if peak_bytes - kept_bytes <= budget_bytes:
            self._over = None
            memory_warnings.planned_apart_is_over(self._said_name, peak_bytes, budget_bytes)
        self._refuse_if_over(peak_bytes, before.most_bytes - before.waits_bytes)

    def _refuse_if_over(self, needed_bytes: int, more_bytes: int = 0) -> None:
        """Refuse an iteration that has run once with the minimum kept, and was over the budget.

        Args:
            needed_bytes: what it took.
            more_bytes: how much more it takes where there is room.
        """
        over, self._over = self._over, None
        if over is None or needed_bytes <= over.budget_bytes:
            return
        needed_bytes = first_run_bytes(self.node.path(), needed_bytes, more_bytes + self._grown_bytes()[0])
        self._refused = over_budget(self._said_name, needed_bytes, over.budget_bytes, details=FIRST_RUN)
        raise self._refused

    def _plan_for_all_sizes(self) -> None:
        """Capture again with symbols for sizes that vary within an iteration: else each would be a way of its own, for
        which none of the graphs before it was planned. Any of them may be larger in the next one."""
        log.info("%s: sizes within it differ between iterations; planning for all of them", self._said_name)
        for seen in self._sizes.values():
            seen.wander = True
        self.forget()

    def _is_of_no_use(self, iteration: Iteration) -> bool:
        """Whether it failed, did not train, or took copies that are not planned yet."""
        steps = [node.step for node in self.node.path()]
        copied = any(step is not None and step.departures for step in steps)
        waits = self.metering.waits_for_the_counter and not self.metering.measures
        return iteration.failed or not iteration.went_back or copied or waits or self._before is not None

    def _settle(self, iteration: Iteration) -> None:
        """An iteration is over: know it, or hold it against its plan."""
        path, is_of_no_use = tuple(self.node.path()), self._is_of_no_use(iteration)
        if self._before is not None:  # its calls come one place later from here on
            self._before = None
            self._shapes.clear()
            self._sizes.clear()
        self.node, self.metering.iteration = self._begin, None
        if iteration.is_mixed and iteration.is_beside:
            log.info("%s: more calls come before their backward passes; measuring again", self._said_name)
            self._goes_back_later = True
            self.forget()
        if iteration.is_beside:
            return
        if not path and iteration.went_back:
            self._say_over(iteration.peak_bytes, "in an iteration of which nothing could be captured")
            return
        if is_of_no_use:
            return
        known = self.known.get(path)
        if known is None:
            if not path:
                return
            if iteration.record is None:
                self._unknown.add(path[0])
                return
            known = self._learn(iteration, path)
        known.peak_bytes = max(known.peak_bytes, iteration.peak_bytes)
        if iteration.again and known.measured is not None and not known.measured.again:
            known.measured, known.planned = replace(known.measured, again=True), None
        known.stayed |= iteration.stayed
        known.results = iteration.results
        if known.has_run_planned or known.as_it_ran:
            self._check(known, iteration)
        known.has_run_planned = known.planned is not None

    def _learn(self, iteration: Iteration, path: tuple[Node, ...]) -> KnownIteration:
        """The first run of an iteration is over."""
        self._unknown.discard(path[0])
        record = iteration.record
        assert record is not None
        steps = [run.step for run in record.runs]
        nodes = tuple(node for node in path if node.step is not None and node.step.trains)
        assert [node.step for node in nodes] == steps
        begin_bytes, intervals = iteration.as_later()
        known = KnownIteration(nodes, tuple(self._whose[node] for node in nodes), None, begin_bytes)
        known.grown_bytes, measured_bytes = self._grown_bytes()
        known.begin_bytes += measured_bytes
        known.broken = self._broken
        known.peak_bytes = max((one.peak_bytes for one in intervals), default=0)
        known.first_bytes = known.peak_bytes if self._keeps_little else 0
        self.known[path] = known
        self._say_over_its_first_run(known)
        measures = bool(intervals)
        n_intervals = 2 * len(record.passes)
        if not measures:
            why = "within another model's step" if self.metering.is_within_another else "without a C++ compiler"
            intervals = [Interval(0, 0)] * n_intervals
            self._say(f"{self._said_name}: {why}, what eager code between its graphs uses is not counted in the budget")
        if len(intervals) not in (n_intervals, n_intervals + 1):
            return known
        known.measured = MeasuredIteration(
            tuple(run.part() for run in record.runs),
            tuple(record.passes),
            tuple(step.share if self._given else step.share.alone(step.graph) for step in steps),
            tuple(intervals),
            begin_bytes + iteration.late_bytes if measures else None,
            steps[0].device,
            tuple(run.sizes for run in record.runs),
            record.eager_argument_bytes if measures else 0,
            iteration.again,
            tuple(step.ports for step in steps),
        )
        return known

    def _grown_bytes(self) -> tuple[int, int]:
        """How much more the next iteration takes than was measured because buffers have grown in this one, as those of
        observers do: themselves, and the copies that are kept to begin again. And how much of them was measured."""
        before = self._buffer_bytes
        if before is None:
            return 0, 0
        grown = [
            (distinct_bytes([buffer]) - before.get(name, 0), buffer)
            for model in self.models.values()
            for name, buffer in model.named_buffers()
        ]
        measured_bytes = sum(distinct_bytes([b]) for more, b in grown if more > 0 and self.metering.measures_it(b))
        return max(0, 2 * sum(max(0, more) for more, _ in grown) - measured_bytes), measured_bytes

    def _held_bytes(self, known: KnownIteration, iteration: Iteration) -> int:
        """Of what is in use now, what such an iteration frees before its first backward pass: old results and
        gradients."""
        held = [result for result in known.results if result.is_alive]
        for name in self._used.intersection(known.models) - known.stayed:
            held += [gradient for gradient in iteration.old_gradients.get(name, ()) if gradient.is_alive]
        return sum({one.key: one.nbytes for one in held}.values())

    def _plan(self, begun: Sequence[KnownIteration]) -> None:
        """Plan iterations that begin alike. Those with most graphs first: what others have of these graphs is decided
        then."""
        session = self.session
        if len(begun) > 1 and not self._stay_as_measured:
            self._stay_as_measured = True
            if any(node.chosen is not None for known in begun for node in known.nodes):
                log.info("%s: what follows its graphs differs between iterations; measuring again", self._said_name)
                self._keeps_little = True
                self.forget()
                return
        begun = sorted(begun, key=lambda known: -len(known.nodes))
        with preparing(begun[0].name, why="its graphs have been measured", record=session.status.prepared):
            doing("plan")
            try:
                decided = self._decide(begun, fixed=False)
            except BudgetError as error:
                refused = self._planned_less_far(error, begun)
                if refused is not None:
                    raise refused from None
                if not self.known:
                    return  # it is captured again
                decided = self._decide(begun, fixed=True)
        for node, share in decided.items():
            node.share = share
            if node.step is not None and node.step.share != share:
                node.run = None  # it is compiled again when it runs next
        status = session.status
        plans = [plan for known in self.known.values() if known.planned is not None for plan in known.planned.plans]
        new = [plan for plan in plans if all(plan is not before for before in status.plans)]
        status.planning_seconds += sum(plan.planning_seconds for plan in new)
        self.learn_errors()  # a graph that goes on as it is compiled has measured them
        session.state_bytes = session.static.state_bytes()

    def _planned_less_far(self, error: BudgetError, begun: Sequence[KnownIteration]) -> BudgetError | None:
        """What to do about a refusal: None where there is another way to plan, which is prepared."""
        if len(begun) > 1:
            return None
        (known,) = begun
        if len(self.known) > 1 and not self._keeps_little:
            log.info("%s: what follows its graphs differs between iterations; measuring again", self._said_name)
            self._keeps_little = True
            self.forget()
            return None
        if known.measured is not None and any(known.measured.sizes) and self.plan_less_far(error):
            log.info("%s: %s; planning for sizes nearer to those seen", self._said_name, error.message)
            self.forget()
            return None
        error = with_reserve(error, known.learnt_bytes)
        if not self._shared:
            self._refused = error
        return error

    def _decide(self, begun: Sequence[KnownIteration], *, fixed: bool) -> dict[Node, Share]:
        """The shares of all graphs of iterations.

        Args:
            begun: the iterations.
            fixed: whether all graphs keep the shares under which they were measured.
        """
        decided: dict[Node, Share] = {}
        what = SEVERAL_MODELS if self._shared else A_MODEL
        session = self.session
        apart = len(begun) > 1  # a graph of one iteration may not run in another one
        for known in begun:
            choose, given = self._choose_for(known), self._given
            fixed |= given is not None
            known.planned = known.plan(
                session.options, session.static, what, decided, fixed=fixed, apart=apart, choose=choose
            )
            if known.planned is not None and given is not None:
                known.planned = known.planned.as_given(given)
            if known.planned is not None:
                lines = (*session.without_effect, *known.planned.plans[0].without_effect)
                session.say_without_effect(tuple(dict.fromkeys(lines)))
            known.has_run_planned = False
            known.to_meter = STEPS_TO_METER
            if known.planned is not None:
                known.peak_bytes = 0
                shares: Sequence[Share] = known.planned.shares
            else:
                shares = self._keep_as_it_ran(known)
            for node, share in zip(known.nodes, shares, strict=True):
                decided.setdefault(node, share)
            variants = known.planned.variants if known.planned is not None else ()
            for node, chosen in zip(known.nodes, variants, strict=False):
                if chosen is not None and node.chosen != chosen:
                    node.chosen, node.pieces, node.run = chosen, chosen.variant.pieces, None
        return decided

    def _choose_for(self, known: KnownIteration) -> Choose | None:
        """What plans an iteration in its best variant; None if it stays as it was measured."""
        session, budget_bytes = self.session, self._budget_bytes
        graphs = [node.part for node in known.nodes if node.part is not None]
        if budget_bytes is None or session.static.is_sharded or self._stay_as_measured or self._given is not None:
            return None

        def choose(runs: tuple[int, ...], planning: VariantPlanning) -> PlannedParts:
            return plan_best_variant(planning, [graphs[run] for run in runs], self, budget_bytes)

        return choose

    def _keep_as_it_ran(self, known: KnownIteration) -> list[Share]:
        """The shares of an iteration that cannot be planned as one: everything is kept if all of it fits in any
        case."""
        budget_bytes = self._budget_bytes
        reason = "backward passes run twice, or between forward passes: the iteration is not planned as one step"
        if budget_bytes is not None and known.predicted_bytes > budget_bytes:
            error = over_budget(
                known.name,
                known.predicted_bytes,
                budget_bytes,
                instead="call backward() once for each forward pass",
                details={"not planned": reason},
            )
            if not self._shared:
                self._refused = error
            raise error
        known.as_it_ran = True
        shares: list[Share] = []
        for node in known.nodes:
            step = node.step
            assert step is not None
            saved_bytes = sum(step.graph.storages[storage].nbytes for storage in step.graph.saved)
            if step.share.residences and known.predicted_bytes + saved_bytes <= (budget_bytes or 0):
                known.peak_bytes += saved_bytes  # at most
                shares.append(Share())
            else:
                shares.append(step.share.alone(step.graph))
        little = sum(bool(share.residences) for share in shares)
        if little or not self._shared:
            self._say(f"{known.name}: {reason}; {little} of its {len(shares)} graphs keep as little as they can")
        return shares

    def _check(self, known: KnownIteration, iteration: Iteration) -> None:
        """Hold a planned iteration against its plan; plan it again if it is over the budget."""
        status = self.session.status
        budget_bytes = self._budget_bytes
        if iteration.record is not None:
            known.to_meter = max(0, known.to_meter - 1)
        if budget_bytes is None or iteration.peak_bytes <= budget_bytes:
            return
        if self._given is not None:
            if "given" not in self._said:
                self._said.add("given")
                memory_warnings.given_plan_is_over(known.name, iteration.peak_bytes, budget_bytes)
            return
        over_bytes = max(0, iteration.peak_bytes - known.predicted_bytes)
        log.warning(
            "%s: the measured peak of %s is over the budget of %s (predicted: %s); planning again with %s set aside",
            known.name,
            format_bytes(iteration.peak_bytes),
            format_bytes(budget_bytes),
            format_bytes(known.predicted_bytes),
            format_bytes(over_bytes),
        )
        known.learnt_bytes += over_bytes
        known.planned = None
        known.to_meter = max(1, known.to_meter)
        status.repairs += 1
        status.measured_peak_bytes = None

    def _ran_out(self, iteration: Iteration, used_bytes: int, between: bool) -> None:
        """Memory ran out in a metered iteration, or after it: plan it again, with room for the eager code if that took
        more than was measured, else with some of the budget set aside. In its first run keep as little as can be."""
        session, budget_bytes = self.session, self._budget_bytes
        if budget_bytes is None:
            return
        if self._over is not None:
            over, self._over = self._over, None
            raise over.with_traceback(None)
        path, place = tuple(self.node.path()), len(iteration.intervals) // 2
        begun = [k for nodes, k in self.known.items() if nodes[: len(path)] == path and k.planned is not None]
        goes_on = any(k.measured is not None and place < len(k.measured.passes) for k in begun)
        if between and iteration.went_back and not iteration.failed and not goes_on:
            memory_warnings.ran_out_after(session.name, session.static)
            return
        iteration.failed = True
        repaired = False
        for known in begun:
            learnt_bytes = known.eager_takes_more(place, used_bytes) if between else 0
            if learnt_bytes:
                room = f"{format_bytes(learnt_bytes)} more there"
                memory_warnings.ran_out_in_loss(known.name, room, budget_bytes)
            more_bytes = 0
            if not learnt_bytes or used_bytes <= budget_bytes:
                more_bytes = aside_when_out(
                    known.name, known.predicted_bytes, known.learnt_bytes, used_bytes, budget_bytes
                )
            if learnt_bytes or more_bytes:
                known.learnt_bytes += more_bytes
                known.planned, known.refused, repaired = None, None, True
                known.to_meter = max(1, known.to_meter)
        if not begun and not self._shared:
            repaired = self._ran_out_before_a_plan(used_bytes, budget_bytes, between=between)
        session.status.repairs += repaired

    def _ran_out_before_a_plan(self, used_bytes: int, budget_bytes: int, *, between: bool) -> bool:
        """Keep the minimum from now on; whether that is new."""
        if not self._keeps_little:
            self._keeps_little = True
            self.forget()
            return True
        if between and used_bytes > budget_bytes:
            self._refused = over_budget(
                self._said_name,
                used_bytes,
                budget_bytes,
                is_minimum=False,
                details={"needed by": "eager code between its graphs, such as the loss, with the minimum kept"},
            )
        return False

    def _trains(self, outputs: Any, n_trained: int, n_run: int) -> bool:
        """Whether a graph of this call has a backward pass, if its results have one, or hide whether they do.

        Args:
            outputs: of the call.
            n_trained: graphs that train which had run before the call. n_run: graphs that had.
        """
        if len(self.node.path()) > n_trained:
            return True
        plain = (torch.Tensor, int, float, str, type(None))  # else an object that may hold tensors
        without = [isinstance(one, plain) and not getattr(one, "requires_grad", False) for one in tree_leaves(outputs)]
        return self.n_run > n_run and all(without)

    def _state_to_come_bytes(self) -> int:
        static = self.session.static
        return max(0, static.state_bytes() - static.state_there_bytes())

    def _note_back(self, step: Metered, peak_bytes: int) -> None:
        if isinstance(step, GraphStep):
            self._used.discard(self._whose.get(step.node, ""))
        status = self.session.status
        if peak_bytes:
            status.measured_peak_bytes = max(status.measured_peak_bytes or 0, peak_bytes)

    def _say_over_its_first_run(self, known: KnownIteration) -> None:
        budget_bytes = self._budget_bytes
        if budget_bytes is not None and known.peak_bytes > budget_bytes and self._over is None:
            log.warning(
                "%s: the measured peak of %s is over the budget of %s: the iteration was not planned yet, because only "
                "its first run shows what comes together; the next one is",
                known.name,
                format_bytes(known.peak_bytes),
                format_bytes(budget_bytes),
            )

    def _say_over(self, peak_bytes: int, when: str) -> None:
        budget_bytes = self._budget_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            self._say(
                f"{', '.join(self.models)}: {format_bytes(peak_bytes)} were in use {when}; that is over the budget of "
                f"{format_bytes(budget_bytes)}, and no plan changes it",
                key="no plan changes it",
            )

    def _say(self, text: str, key: str = "") -> None:
        """Warn once."""
        if (key or text) not in self._said:
            self._said.add(key or text)
            log.warning("%s", text)


def _without_frames(error: BudgetError) -> BudgetError:
    """The error without tracebacks, whose frames hold what the forward pass has made."""
    error.__context__ = None
    return error.with_traceback(None)


def _weak(outputs: Any) -> list[WeakStorage]:
    return [WeakStorage(output) for output in dense_tensors(outputs)]
