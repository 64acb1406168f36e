"""The turns of several models under one budget: each is metered as it first runs, planned as one, and repeated.

A turn is a sequence of parts, whoever's they are. In its first run each part keeps as little as it can, and what every
stretch between them uses is measured. When such a turn begins again all its parts are planned as one
(`shoal.engine.turn_planning`), with what the loop, the other models and the optimizers hold by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.capture.dynamo import plain_call
from shoal.capture.graph_breaks import capturing_parts
from shoal.capture.varying_sizes import SizesSeen
from shoal.core.over_budget import over_budget
from shoal.core.progress import doing, preparing
from shoal.core.residence import Residence
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.engine import memory_warnings
from shoal.engine.backend import STEPS_TO_METER
from shoal.engine.known_turn import KnownTurn
from shoal.engine.optimizer_steps import watch
from shoal.engine.part_planning import first_share
from shoal.engine.part_record import MeteredPart
from shoal.engine.part_sequence import Node, PartSequence, PartStep
from shoal.engine.repair import aside_when_out
from shoal.engine.session import Session
from shoal.engine.turn_metering import Turn, TurnMetering
from shoal.engine.turn_planning import MeasuredTurn
from shoal.errors import BudgetError
from shoal.memory.step_meter import WeakStorage
from shoal.memory.storage_bytes import dense_tensors, distinct_bytes

log = logging.getLogger("shoal")


class TurnSteps(PartSequence):
    """The steps of several models.

    Args:
        session: of all of them.
        device: where they run.

    Attributes:
        models: those that are there, by name, as somebody else holds them.
        known: the turns that have run, by their parts.
    """

    def __init__(self, session: Session, device: torch.device, models: Mapping[str, nn.Module]) -> None:
        super().__init__(session)
        self.models = models
        self.known: dict[tuple[Node, ...], KnownTurn] = {}
        self.metering = TurnMetering(session.static, device, self._note_back, self._ran_out)
        self._begin = self.node
        self._whose: dict[Node, str] = {}
        self._calling = ""
        self._times_forgotten = 0
        self._unknown: set[Node] = set()  # turns that begin with these have to be metered
        self._said: set[str] = set()
        self._used: set[str] = set()  # models whose optimizer has stepped since their last backward pass
        session.metering = self.metering
        session.on_repair = self.forget
        watch(self)

    def call(
        self,
        name: str,
        captured: dict[Any, Callable[..., Any]],
        kind: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a model for a training step.

        Args:
            name: the model's.
            captured: its calls as Dynamo knows them, filled in here and kept by who keeps the model.
            kind: what decides, other than shapes, over how it is captured.
            args, kwargs: the call's.

        Raises:
            BudgetError: no plan fits; or, in the first turn, a part of it does not.
        """
        turn = self._enter(args, kwargs)
        this = kind, self._times_forgotten
        if this not in captured:
            captured[this] = capturing_parts(self.models[name], self.compile_graph)
        turn.called.append(name)
        self._calling = name
        self.metering.calls.begins()
        status = self.session.status
        try:
            why = f"turns of {', '.join(self.models)} are planned" if status.preparations else ""
            with preparing(name, why=why, record=status.prepared):
                outputs = captured[this](*args, **kwargs)
        except BaseException:
            turn.failed = True
            raise
        turn.results += _weak(outputs)
        return outputs

    def call_plainly(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a model that is not trained by this call. What it uses and returns counts where a turn goes on."""
        turn = self._enter(args, kwargs)
        outputs = plain_call(self.models[name], *args, **kwargs)
        turn.results += _weak(outputs)
        return outputs

    def accumulates(self, name: str) -> bool:
        """Whether a step of the model adds to gradients that are there and that no optimizer has used."""
        return name not in self._used and any(p.grad is not None for p in self.models[name].parameters())

    def forget(self) -> None:
        """Capture and plan again from the next call on."""
        self._begin = self.node = Node()
        self._times_forgotten += 1
        self.known.clear()
        self._unknown.clear()
        self._whose.clear()
        self.session.status.plans = ()

    def meter_again(self) -> None:
        """Meter every turn when it runs next: something else is in memory."""
        for known in self.known.values():
            known.to_meter = max(1, known.to_meter)

    def close(self) -> None:
        """Meter nothing any more."""
        self.metering.close()

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the process has stepped."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._used.update(n for n, m in self.models.items() if any(id(p) in trained for p in m.parameters()))
        self.session.optimizer_stepped(optimizer)  # its state is known from here on, whoever is told first
        turn = self.metering.turn
        if turn is not None and turn.closely and self.session.static.trains(optimizer):
            turn.state_is_now(self.session.static.state_there_bytes())

    @property
    def _budget_bytes(self) -> int:
        budget_bytes = self.session.status.budget_bytes
        assert budget_bytes is not None
        return budget_bytes

    def in_use_bytes(self) -> int:
        return self.metering.in_use_bytes()

    def first_share(self, graph: StepGraph, device: torch.device, in_use_bytes: int) -> Mapping[str, Residence]:
        budget_bytes = self._budget_bytes
        own_bytes = sum(s.nbytes for s in graph.storages if s.kind == "gradient")
        to_come = [p for m in self.models.values() for p in m.parameters() if p.requires_grad and p.grad is None]
        to_come_bytes = max(0, distinct_bytes(to_come) - own_bytes) + self._state_to_come_bytes()
        try:
            return first_share(graph, device, in_use_bytes + to_come_bytes, budget_bytes, keeps_little=True)
        except BudgetError:  # gradients of other models may never be there at the same time
            return first_share(graph, device, in_use_bytes, budget_bytes, keeps_little=True, who=self._calling)

    def sizes_changed(self, seen: SizesSeen) -> None:
        """It is another turn, with a plan of its own."""

    def reached(self, node: Node) -> None:
        self._whose[node] = self._calling
        turn = self.metering.turn
        if node.before is not self._begin or turn is None or not turn.closely or turn.runs:
            return
        begun = [known for path, known in self.known.items() if path[0] is node]
        for known in begun:
            known.grown_bytes = max(known.grown_bytes, turn.begin_bytes - known.begin_bytes)
            known.held_bytes = self._held_bytes(known, turn)
        if any(known.has_to_be_planned(self._budget_bytes) for known in begun):
            self._plan(begun)
        if begun and node not in self._unknown and not any(known.to_meter for known in begun):
            turn.record = None

    def _enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Turn:
        """A call begins, and with it a turn where none goes on."""
        metering = self.metering
        metering.learn_refusals()
        tensors = dense_tensors((args, dict(kwargs)))
        if metering.turn is not None:
            if not metering.is_over():
                metering.goes_on_with(tensors)
                return metering.turn
            self._settle(metering.turn)
        self.node = self._begin
        closely = not self.known or bool(self._unknown) or any(known.to_meter for known in self.known.values())
        between = metering.begin(self.models, tensors, closely=closely)
        self._say_over(between.peak_bytes, "between two turns, as by an optimizer's step or a call without gradients")
        assert metering.turn is not None
        return metering.turn

    def _settle(self, turn: Turn) -> None:
        """A turn is over: know it, or hold it against its plan."""
        path, self.node = tuple(self.node.path()), self._begin
        self.metering.turn = None
        if turn.intervals:
            self._say_over(turn.intervals[0].peak_bytes, "before a turn's first graph, by a call without gradients")
        if turn.failed or not turn.went_back:
            return
        if not path:
            self._say_over(turn.peak_bytes, "in a turn of which nothing could be captured")
            return
        if any(node.step is not None and node.step.departures for node in path):
            return  # it took copies that are not planned yet
        known = self.known.get(path)
        if known is None:
            if turn.record is None:
                self._unknown.add(path[0])
                return
            self._unknown.discard(path[0])
            known = self.known[path] = self._first_run_of(turn, path)
            self._say_over_its_first_run(known, turn.peak_bytes)
        else:
            known.peak_bytes = max(known.peak_bytes, turn.peak_bytes)
        known.stayed |= turn.stayed
        known.results = turn.results
        if known.planned is not None or known.as_it_ran:
            self._check(known, turn)

    def _first_run_of(self, turn: Turn, path: tuple[Node, ...]) -> KnownTurn:
        record = turn.record
        assert record is not None
        steps = [run.step for run in record.runs]
        nodes = tuple(step.node for step in steps if isinstance(step, PartStep))
        begin_bytes, intervals = turn.as_later()
        known = KnownTurn(nodes, tuple(self._whose[node] for node in nodes), None, begin_bytes)
        known.peak_bytes = max(one.peak_bytes for one in intervals[1:])
        # What ran before the first part held nothing for it to make room for.
        intervals[:1] = [replace(intervals[0], peak_bytes=intervals[0].end_bytes)]
        if turn.again or len(intervals) != 2 * len(record.passes):
            return known
        known.measured = MeasuredTurn(
            tuple(run.part() for run in record.runs),
            tuple(record.passes),
            tuple(step.share for step in steps),
            tuple(intervals),
            begin_bytes + turn.late_bytes,
            steps[0].device,
        )
        return known

    def _held_bytes(self, known: KnownTurn, turn: Turn) -> int:
        """Of what is in use now, what such a turn lets go before its first backward pass: old results and gradients."""
        held = [result for result in known.results if result.is_alive]
        for name in self._used.intersection(known.models) - known.stayed:
            held += [gradient for gradient in turn.old_gradients.get(name, ()) if gradient.is_alive]
        return sum({one.key: one.nbytes for one in held}.values())

    def _plan(self, begun: Sequence[KnownTurn]) -> None:
        """Plan turns that begin alike. Those with most parts first: what others have of these parts is decided then."""
        session = self.session
        begun = sorted(begun, key=lambda known: -len(known.nodes))
        with preparing(begun[0].name, why="its graphs have been measured", record=session.status.prepared):
            doing("plan")
            try:
                decided = self._decide(begun, fixed=False)
            except BudgetError:
                if len(begun) == 1:
                    raise
                decided = self._decide(begun, fixed=True)
        for node, share in decided.items():
            node.share = share
            if node.step is not None and node.step.share != share:
                node.run = None  # it is compiled again when it runs next
        status = session.status
        plans = [plan for known in self.known.values() if known.planned is not None for plan in known.planned.plans]
        new = [plan for plan in plans if all(plan is not before for before in status.plans)]
        status.planning_seconds += sum(plan.planning_seconds for plan in new)
        status.plans = tuple(plans)
        session.state_bytes = session.static.state_bytes()

    def _decide(self, begun: Sequence[KnownTurn], *, fixed: bool) -> dict[Node, Mapping[str, Residence]]:
        """The shares of all parts of turns.

        Args:
            begun: the turns.
            fixed: whether all parts keep the shares under which they were measured.
        """
        decided: dict[Node, Mapping[str, Residence]] = {}
        for known in begun:
            known.planned = known.plan(self.session.options, self._state_to_come_bytes(), decided, fixed=fixed)
            known.to_meter = STEPS_TO_METER
            if known.planned is not None:
                known.peak_bytes = 0
                shares: Sequence[Mapping[str, Residence]] = known.planned.shares
            else:
                shares = self._keep_as_it_ran(known)
            for node, share in zip(known.nodes, shares, strict=True):
                decided.setdefault(node, share)
        return decided

    def _keep_as_it_ran(self, known: KnownTurn) -> list[Mapping[str, Residence]]:
        """The shares of a turn that cannot be planned as one: everything is kept where all of it fits in any case."""
        budget_bytes = self._budget_bytes
        reason = "backward passes run twice, or between forward passes: the iteration is not planned as one step"
        if known.predicted_bytes > budget_bytes:
            raise over_budget(
                known.name,
                known.predicted_bytes,
                budget_bytes,
                instead="call backward() once for each forward pass",
                details={"not planned": reason},
            )
        known.as_it_ran = True
        shares: list[Mapping[str, Residence]] = []
        for node in known.nodes:
            step = node.step
            assert step is not None
            saved_bytes = sum(step.graph.storages[storage].nbytes for storage in step.graph.saved)
            if step.share and known.predicted_bytes + saved_bytes <= budget_bytes:
                known.peak_bytes += saved_bytes  # at most
                shares.append({})
            else:
                shares.append(step.share)
        if any(shares):
            self._say(f"{reason}; {sum(map(bool, shares))} of its {len(shares)} graphs keep as little")
        return shares

    def _check(self, known: KnownTurn, turn: Turn) -> None:
        """Hold a planned turn against its plan; plan it again where it is over the budget."""
        status = self.session.status
        budget_bytes = self._budget_bytes
        if turn.record is not None:
            known.to_meter = max(0, known.to_meter - 1)
        if turn.peak_bytes <= budget_bytes:
            return
        over_bytes = max(0, turn.peak_bytes - known.predicted_bytes)
        log.warning(
            "%s: the measured peak of %s is over the budget of %s (predicted: %s); planning again with %s set aside",
            known.name,
            format_bytes(turn.peak_bytes),
            format_bytes(budget_bytes),
            format_bytes(known.predicted_bytes),
            format_bytes(over_bytes),
        )
        known.learnt_bytes += over_bytes
        known.planned = None
        known.to_meter = max(1, known.to_meter)
        status.repairs += 1

    def _ran_out(self, turn: Turn, used_bytes: int, between: bool) -> None:
        """Memory ran out in a metered turn, or after it: plan it again, with room for the eager code where that took
        more than was measured, else with some of the budget set aside. In its first run as little is kept as can be."""
        session, budget_bytes = self.session, self._budget_bytes
        path, place = tuple(self.node.path()), len(turn.intervals) // 2
        begun = [k for nodes, k in self.known.items() if nodes[: len(path)] == path and k.planned is not None]
        goes_on = any(k.measured is not None and place < len(k.measured.passes) for k in begun)
        if between and turn.went_back and not turn.failed and not goes_on:
            memory_warnings.ran_out_after(session.name, session.static)
            return
        turn.failed = True
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
        session.status.repairs += repaired

    def _state_to_come_bytes(self) -> int:
        static = self.session.static
        return max(0, static.state_bytes() - static.state_there_bytes())

    def _note_back(self, step: MeteredPart, peak_bytes: int) -> None:
        if isinstance(step, PartStep):
            self._used.discard(self._whose.get(step.node, ""))
        status = self.session.status
        status.measured_peak_bytes = max(status.measured_peak_bytes or 0, peak_bytes)

    def _say_over_its_first_run(self, known: KnownTurn, peak_bytes: int) -> None:
        budget_bytes = self._budget_bytes
        if peak_bytes > budget_bytes:
            log.warning(
                "%s: the measured peak of %s is over the budget of %s: the turn was not planned yet, because only its "
                "first run shows what comes together; the next one is",
                known.name,
                format_bytes(peak_bytes),
                format_bytes(budget_bytes),
            )

    def _say_over(self, peak_bytes: int, when: str) -> None:
        budget_bytes = self._budget_bytes
        if peak_bytes > budget_bytes:
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


def _weak(outputs: Any) -> list[WeakStorage]:
    return [WeakStorage(output) for output in dense_tensors(outputs)]
