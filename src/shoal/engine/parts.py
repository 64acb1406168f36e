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
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.capture.graph_breaks import capturing_parts
from shoal.capture.varying_sizes import SizesSeen
from shoal.core.over_budget import over_budget
from shoal.core.progress import doing, preparing
from shoal.core.residence import Residence
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.engine import memory_warnings
from shoal.engine.backend import STEPS_TO_METER
from shoal.engine.metering import Window
from shoal.engine.part_metering import PartMetering
from shoal.engine.part_planning import KnownStep, MeasuredParts, PartedStep, first_share, no_graph
from shoal.engine.part_sequence import Node, PartSequence, PartStep, described
from shoal.engine.refusal_hints import with_reserve
from shoal.engine.repair import aside_when_out
from shoal.engine.search.without_effect import A_MODEL, in_several_graphs
from shoal.engine.session import Session
from shoal.engine.snapshot import Snapshot
from shoal.errors import BudgetError, CaptureError
from shoal.memory.storage_bytes import dense_tensors

log = logging.getLogger("shoal")


class PartedSteps(PartSequence):
    """The steps of one model that is several graphs.

    Args:
        session: of the model.
        broken: where Dynamo could not go on when the model was to be one graph, and why.
    """

    def __init__(self, session: Session, broken: str) -> None:
        super().__init__(session)
        self.metering = PartMetering(session.static, self.learn, self.ran_out, session.ran_out_after)
        self._broken = broken
        self._begin: dict[Any, Node] = {}
        self._times_forgotten = 0
        self._measured: dict[tuple[Node, ...], KnownStep] = {}
        self._planned: dict[tuple[Node, ...], PartedStep] = {}
        self._refused: BudgetError | None = None
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._keeps_little = False
        self._branches = False
        self._is_new_shape = True  # of the step under way
        self._has_other_sizes = False  # it has, after its first part
        self._learnt_bytes = self._held_bytes = self._state_bytes = 0
        session.metering = self.metering
        session.status.has_new_plans = weakref.WeakMethod(self.has_new_plans)
        session.static.keep_library_memory()  # the first step is measured, not planned
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
            kind: what decides, other than shapes, over how the step is captured.
            args, kwargs: the call's.

        Raises:
            BudgetError: no plan fits; or, in the first step, a part of the model does not.
            CaptureError: no part of the model that trains can be captured.
        """
        self.metering.settle()
        if self._refused is not None:
            raise self._refused.with_traceback(None)  # of this call, not of those before
        self._count_what_changed()
        is_new_shape = self._note_shape(args, kwargs)
        if self._planned and (self._branches or self.session.status.budget_bytes is None):
            return self._run(model, captured, kind, args, kwargs, is_new_shape=is_new_shape)
        before = Snapshot(model)
        try:
            return self._run(model, captured, kind, args, kwargs, before.tensors, is_new_shape=is_new_shape)
        except CaptureError:
            before.restore()
            raise
        except BudgetError:
            if not self._may_keep_less():
                raise
            log.debug("%s: too much was kept for its later graphs", self.session.name)
        gc.collect()  # frames of the traceback held what the forward pass has saved
        before.restore()
        self._keeps_little = True
        self.forget()
        return self._run(model, captured, kind, args, kwargs, before.tensors, is_new_shape=is_new_shape)

    def _may_keep_less(self) -> bool:
        """Whether the parts that ran could have left more room for one that did not fit.

        They could where everything was kept, and where they ran by a plan that does not know it.
        """
        if any(node.share is not None for node in self.node.path()):
            self._branches = not self._has_other_sizes
            return True
        return not self._keeps_little

    def is_between_steps(self) -> bool:
        """Whether no call of the model is under way, and none is being metered."""
        self.metering.settle()
        return not self.metering.calls.under_way()

    def _run(
        self,
        model: nn.Module,
        captured: dict[Any, Callable[..., Any]],
        kind: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        beside: Sequence[torch.Tensor] = (),
        *,
        is_new_shape: bool,
    ) -> Any:
        """The model's call, metered where its step is not known well."""
        this = kind, self._times_forgotten
        if this not in captured:
            captured[this] = capturing_parts(model, self.compile_graph)
        run, self.node = captured[this], self._begin.setdefault(kind, Node())
        metering, status = self.metering, self.session.status
        metering.arguments = dense_tensors((args, dict(kwargs), *beside))
        metering.in_call = True
        first = [after.step for after in self.node.after.values()]
        if is_new_shape or not first or any(step is None or step.steps_to_meter for step in first):
            metering.begin_call(next((p.device for p in model.parameters()), torch.device("cpu")))
        try:
            compiled, why = self.compiled, "its graphs are compiled again" if status.preparations else ""
            with preparing(self.session.name, why=why, record=status.prepared):
                outputs = run(*args, **kwargs)
            if self.compiled > compiled:
                gc.collect()  # cycles of Dynamo's hold what functions were called with that it gave up in the midst
            if status.budget_bytes is not None and not self._trains(outputs):
                raise no_graph(self.session, self._broken)
            return outputs
        except BaseException:
            metering.abandon()
            raise
        finally:
            metering.in_call, metering.arguments = False, []

    def _trains(self, outputs: Any) -> bool:
        """Whether a graph of this call has a backward pass, where its results have one, or hide whether they do."""
        path = self.node.path()
        if any(node.step is not None and node.step.trains for node in path):
            return True
        plain = (torch.Tensor, int, float, str, type(None))  # else an object that may hold tensors
        without = [isinstance(one, plain) and not getattr(one, "requires_grad", False) for one in tree_leaves(outputs)]
        return bool(path) and all(without)

    def _note_shape(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the model has not been called with inputs of these shapes yet."""
        leaves = tree_leaves((args, dict(kwargs)))
        shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
        is_new = self._is_new_shape = shapes not in self._shapes
        self._shapes.add(shapes)
        if len(self._shapes) > 1 and not self.sizes_vary:
            self.sizes_vary = self._keeps_little = True  # the next shape may be larger than those that are planned
        self._has_other_sizes = False
        return is_new

    def sizes_changed(self, seen: SizesSeen) -> None:
        if not self._is_new_shape:
            self.sizes_vary = self._keeps_little = self._has_other_sizes = seen.wander = True

    def forget(self) -> None:
        """Capture and plan again from the next step on."""
        for seen in self._sizes.values() if self._has_other_sizes else ():
            seen.forget_captured()
        self._begin.clear()
        self._times_forgotten += 1
        self._measured.clear()
        self._planned.clear()
        self._refused = None

    def in_use_bytes(self) -> int:
        return self.metering.in_use_bytes()

    def reached(self, node: Node) -> None:
        if node.share is None:
            for earlier in node.path():
                if earlier.step is not None:  # let the next step like this one be metered from its first part on
                    earlier.step.steps_to_meter = max(1, earlier.step.steps_to_meter)

    def first_share(self, graph: StepGraph, device: torch.device, in_use_bytes: int) -> Mapping[str, Residence]:
        budget_bytes = self.session.status.budget_bytes
        if budget_bytes is None:
            return {}
        budget_bytes -= self._learnt_bytes
        return first_share(graph, device, in_use_bytes, budget_bytes, keeps_little=self._keeps_little)

    def has_new_plans(self) -> bool:
        """As `Session.has_new_plans`."""
        steps = [node.step for nodes in self._planned for node in nodes]
        return not steps or any(step is None or step.steps_to_meter for step in steps)

    def ran_out(self, window: Window, used_bytes: int, between: bool) -> None:
        """Memory ran out in a metered step: plan it again, with room for the eager code where that took more than was
        measured, else with some of the budget set aside; before there is a plan, keep as little of each graph as can
        be."""
        session, budget_bytes = self.session, self.session.status.budget_bytes
        if budget_bytes is None:
            return
        name, predicted = session.name or "model", [step.plan.predicted_peak_bytes for step in self._planned.values()]
        if between and not predicted and self._keeps_little and used_bytes > budget_bytes:
            self._refused = over_budget(
                name,
                used_bytes,
                budget_bytes,
                is_minimum=False,
                details={"needed by": "eager code between its graphs, such as the loss, with the minimum kept"},
            )
            return
        learnt = between and self._eager_takes_more(used_bytes, budget_bytes)
        if (predicted or self._keeps_little) and (not learnt or used_bytes <= budget_bytes):
            predicted_bytes = max(predicted, default=used_bytes + self._learnt_bytes)
            more_bytes = aside_when_out(name, predicted_bytes, self._learnt_bytes, used_bytes, budget_bytes)
            if not more_bytes and not learnt:
                return  # as much was set aside before: no plan takes less, and the step is not run again
            self._learnt_bytes += more_bytes
        session.status.repairs += 1
        if predicted:
            session.status.measured_peak_bytes = None
            self._plan_again()
        else:
            self._keeps_little = True
            self.forget()

    def _eager_takes_more(self, used_bytes: int, budget_bytes: int) -> bool:
        """Memory ran out between two passes: whether that takes more than was measured, which is noted."""
        record = self.metering.record
        last = record.of_last_call()
        nodes = [step.node for step in (record.runs[number].step for number in last) if isinstance(step, PartStep)]
        place = sum(number in last for number, _ in record.passes)
        most_bytes = 0
        for path, planned in self._planned.items():
            known = self._measured[path]
            if list(path[: len(nodes)]) != nodes or place >= len(known.parts.passes):
                continue
            more_bytes = used_bytes + self._learnt_bytes - planned.bytes_before(known.parts.passes, place)
            if more_bytes > 0:
                self._measured[path] = replace(known, parts=known.parts.with_more_before(place, more_bytes))
                most_bytes = max(most_bytes, more_bytes)
        if most_bytes:
            room = f"{format_bytes(most_bytes)} more there"
            memory_warnings.ran_out_in_loss(self.session.name or "model", room, budget_bytes)
        return bool(most_bytes)

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
        status.note(measured)
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
            if self._has_other_sizes and budget_bytes is not None and any(node.share is not None for node in nodes):
                self._plan_for_all_sizes()
            else:
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

    def _plan_for_all_sizes(self) -> None:
        """Capture the step again with symbols for sizes that vary within it: else each would be a way of its own, which
        none of the parts before it was planned for. Any of them may be larger in the next step."""
        log.info("%s: sizes within it differ between steps; planning for all of them", self.session.name)
        for seen in self._sizes.values():
            seen.wander = True
        self.forget()

    def _plan(self, nodes: tuple[Node, ...], peak_bytes: int) -> None:
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
        self._measured[nodes] = KnownStep(measured, fixed=branches or self._branches)
        self._plan_again()

    def _keep_as_it_ran(self, nodes: tuple[Node, ...], peak_bytes: int) -> None:
        """A step whose parts cannot be planned together: what it took is refused or stays."""
        budget_bytes = self.session.status.budget_bytes
        name = self.session.name or "the model"
        reason = f"the graphs of {name} do not all run forward before they run backward, so they are not one step"
        if budget_bytes is not None and peak_bytes > budget_bytes:
            call = "call backward() after the forward pass"
            self._refused = over_budget(name, peak_bytes, budget_bytes, instead=call, details={"not planned": reason})
            return
        log.warning("%s; it took %s, and its graphs keep what they kept in it", reason, format_bytes(peak_bytes))
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
                    planned = known.plan(session, self._learnt_bytes, self._held_bytes)
                    lines = in_several_graphs(session.options, A_MODEL)
                    planned = replace(planned, plan=described(planned.plan, nodes, lines, self._broken))
                    self._planned[nodes] = planned
            except BudgetError as error:
                if known.fixed and not self._branches:
                    log.info("%s: what follows its parts differs between steps; planning for all", session.name)
                    self._branches = self._keeps_little = True
                    self.forget()
                elif any(known.parts.sizes) and self.plan_less_far(error):
                    log.info("%s: %s; planning for sizes nearer to those seen", session.name, error.message)
                    self.forget()
                else:
                    self._refused = with_reserve(error, self._learnt_bytes)
                break
            for node, share in zip(nodes, planned.shares, strict=True):
                node.share = share
                if node.step is not None and node.step.share != share:
                    node.run = None  # it is compiled again when it runs next
                elif node.step is not None:
                    node.step.steps_to_meter = STEPS_TO_METER
        session.status.plans = tuple(planned.plan for planned in self._planned.values())
        session.status.planning_seconds += sum(plan.planning_seconds for plan in session.status.plans)

    def _count_what_changed(self) -> None:
        """Before a step: what the loop and the optimizers hold by now."""
        loop = self.session.loop
        held_bytes = max(self._held_bytes, (loop.held_gradient_bytes or 0) + (loop.held_result_bytes or 0))
        if held_bytes == self._held_bytes and self.session.state_bytes == self._state_bytes:
            return
        self._held_bytes = held_bytes
        if self._measured:
            self._plan_again()
