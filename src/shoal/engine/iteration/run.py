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
from shoal.capture.varying_sizes import SizesSeen
from shoal.core.over_budget import over_budget
from shoal.core.progress import preparing
from shoal.core.sizes import format_bytes
from shoal.engine import memory_warnings
from shoal.engine.iteration.first import CallsBefore, no_graph
from shoal.engine.iteration.graphs import GraphStep, Node
from shoal.engine.iteration.metered import Iteration
from shoal.engine.iteration.planned import PlannedGraphs
from shoal.engine.iteration.record import Metered
from shoal.engine.loop_memory import waiting_bytes
from shoal.engine.metering import Metering
from shoal.engine.optimizer_steps import watch
from shoal.engine.repair import aside_when_out
from shoal.engine.session import Session
from shoal.engine.snapshot import Snapshot
from shoal.errors import BudgetError, CaptureError
from shoal.memory.storage_bytes import WeakStorage, dense_tensors, distinct_bytes

log = logging.getLogger("shoal")


class Iterations(PlannedGraphs):
    """The iterations of one or several models, as these are called. Its arguments are those of `PlannedGraphs`."""

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
        super().__init__(session, device, models, shared=shared, broken=broken, before=before)
        self.metering = Metering(
            session.static, self._ended, self._ran_out, self._note_back, by_call=True, counts_all=shared, device=device
        )
        if before is not None:
            self.metering.calls = before.calls
        self._begin = self.node
        self._times_forgotten = 0
        self._goes_back_later = False  # an iteration was taken for one that is left over, and was not
        self._shapes: dict[int, set[tuple[torch.Size, ...]]] = {}  # of each call of an iteration, by number
        self._is_new_shape = True  # of the call under way
        self._has_other_sizes = False  # it has, after its first graph
        self._in_call = False
        self._surroundings: object = None  # of the plans, as far as the session knows them
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
        self.session.status.put(())

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

    def _note_back(self, step: Metered, peak_bytes: int) -> None:
        if isinstance(step, GraphStep):
            self._used.discard(self._whose.get(step.node, ""))
        path = tuple(self.node.path())
        runs_planned = any(k.planned is not None for nodes, k in self.known.items() if nodes[: len(path)] == path)
        if peak_bytes:
            self.session.status.note_iteration(peak_bytes, runs_planned=runs_planned)

    def _say_over(self, peak_bytes: int, when: str) -> None:
        budget_bytes = self._budget_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            self._say(
                f"{', '.join(self.models)}: {format_bytes(peak_bytes)} were in use {when}; that is over the budget of "
                f"{format_bytes(budget_bytes)}, and no plan changes it",
                key="no plan changes it",
            )


def _weak(outputs: Any) -> list[WeakStorage]:
    return [WeakStorage(output) for output in dense_tensors(outputs)]
