"""One model's training under one budget: plans each new shape and repairs a promise that a measurement breaks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from shoal import planners
from shoal.capture import Captured
from shoal.check_plan import check_own_plan, check_plan
from shoal.check_step import check_step
from shoal.choose_encoded import choose_encoded, encoded_by
from shoal.encoding import encoded
from shoal.errors import BudgetError, PlanError
from shoal.hardware import Hardware
from shoal.lossy import Lossy
from shoal.measure import measure
from shoal.measure_links import link_to
from shoal.offloading import Offloading
from shoal.plan import Plan
from shoal.profile import profile_step
from shoal.runtime.links.open_link import OpenLink, open_link
from shoal.runtime.step_meter import Measured
from shoal.runtime.transfers import Transfers
from shoal.runtime.wall import lifted
from shoal.sizes import format_bytes
from shoal.standing import Standing
from shoal.step import StepGraph

log = logging.getLogger("shoal")


@dataclass
class Status:
    """What became of the promise; `model.shoal`.

    Attributes:
        budget_bytes: the promise. None: everything is kept and the peak is only reported.
        plans: every plan in force, one for each shape, and one more where gradients are there before the step.
        measured_peak_bytes: highest measured use of any metered step of the plans in force; None before the first.
        planning_seconds: capture, profiling and planning of all plans, repairs included.
        repairs: how often plans were made anew because a measured peak was over the budget.
        encoded: by step, the storages that its plan encodes. Which those are hangs on times measured here; what an
            earlier run had, put here before the first step, is chosen again, so that its numbers come again.
    """

    budget_bytes: int | None
    plans: tuple[Plan, ...] = ()
    measured_peak_bytes: int | None = None
    planning_seconds: float = 0.0
    repairs: int = 0
    encoded: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest step so far; None before the first training step."""
        return max(self.plans, key=lambda plan: plan.plain_peak_bytes, default=None)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """What the plans promise: the highest of their peaks."""
        return max((plan.predicted_peak_bytes for plan in self.plans), default=None)

    @property
    def lower_bound_seconds(self) -> float | None:
        """No plan of the largest step inside the budget adds less time than this."""
        return self.plan.lower_bound_seconds if self.plan else None


@dataclass
class Session:
    """Plans the steps of one model.

    Attributes:
        status: what users see.
        planner: its name, or a function with the planners' signature.
        standing: what is in use beside the steps: the model and the optimizer, as far as they are known.
        name: the model's name for tables and errors.
        ready_plan: a plan to use as it is instead of planning.
        offloading: where saved storages may wait; None: on the device alone.
        on_repair: called when a plan in force broke its promise; must make the next step be planned anew.
        lossy: how convolution inputs may be encoded; None where they may not.
    """

    status: Status
    planner: str | planners.Planner = "joint"
    standing: Standing = field(default_factory=Standing)
    name: str = ""
    ready_plan: Plan | None = None
    offloading: Offloading | None = None
    on_repair: Callable[[], None] = lambda: None
    lossy: Lossy | None = None
    _learnt_bytes: dict[str, int] = field(default_factory=dict)
    _link: OpenLink | None = None
    _transfers: list[Transfers] = field(default_factory=list)

    def make_plan(self, captured: Captured, device: torch.device) -> tuple[Captured, Plan]:
        """Profile the step's ops here, then plan it inside the budget.

        Returns:
            The step that the plan is for, which may encode storages that `captured` does not, and the plan.

        Raises:
            BudgetError: no plan fits.
            PlanError: the ready plan belongs to another step.
        """
        started = time.perf_counter()
        with lifted():
            graph = profile_step(captured, device)
            hardware = measure(device)
            link = link_to(self.offloading, device) if self.offloading is not None else None
        set_aside_bytes = self.standing.bytes_beside(graph) + self._learnt_bytes.get(graph.fingerprint, 0)

        def costed(step: Captured) -> StepGraph:
            with lifted():
                of_step = graph if step is captured else profile_step(step, device)
            return replace(of_step, standing_bytes=of_step.standing_bytes + set_aside_bytes, link=link)

        captured, plan = self._plan(captured, hardware, costed)
        check_own_plan(plan.graph, plan.residences, self.status.budget_bytes or 0)
        plan = replace(plan, planning_seconds=time.perf_counter() - started)
        others = (p for p in self.status.plans if not _is_same_step(p.exact_step, plan.exact_step))
        self.status.plans = (*others, plan)
        self.status.planning_seconds += plan.planning_seconds
        return captured, plan

    def _plan(
        self, captured: Captured, hardware: Hardware, costed: Callable[[Captured], StepGraph]
    ) -> tuple[Captured, Plan]:
        if self.ready_plan is not None:
            return _adopt(self.ready_plan, captured, costed, self.status.budget_bytes)
        budget_bytes = self.status.budget_bytes
        if budget_bytes is None:
            return captured, planners.get("keep_all")(costed(captured), hardware, 0)
        planner = planners.get(self.planner)
        try:
            if self.lossy is not None:
                return self._plan_encoded(
                    captured, self.lossy, budget_bytes, costed, lambda graph: planner(graph, hardware, budget_bytes)
                )
            return captured, planner(costed(captured), hardware, budget_bytes)
        except BudgetError as error:
            if gradient_bytes := self.standing.gradient_bytes():
                raise error.with_hint(
                    f"gradients of an earlier step take {format_bytes(gradient_bytes)}: call optimizer.zero_grad() "
                    "before the forward pass unless you accumulate them"
                ) from None
            raise

    def _plan_encoded(
        self,
        captured: Captured,
        lossy: Lossy,
        budget_bytes: int,
        costed: Callable[[Captured], StepGraph],
        plan: Callable[[StepGraph], Plan],
    ) -> tuple[Captured, Plan]:
        before = costed(captured)
        step = f"{before.fingerprint}, {before.standing_bytes} bytes beside"
        captured, made = choose_encoded(captured, lossy, budget_bytes, costed, plan, self.status.encoded.get(step))
        self.status.encoded[step] = tuple(storage.name for storage in made.encoded)
        return captured, made

    def carry(self, plan: Plan, device: torch.device) -> Transfers | None:
        """What moves the storages that the plan offloads; None where it offloads nothing.

        Raises:
            TransferError: the host has no room for them.
        """
        if not plan.offloaded or self.offloading is None:
            return None
        pace = self.offloading.pace
        if self._link is None:
            self._link = open_link(
                device,
                self.offloading.where,
                self.offloading.host_bytes,
                pace.to_host_bytes_per_second if pace else None,
                pace.to_device_bytes_per_second if pace else None,
                pace.latency_seconds if pace else 0.0,
            )
        overlaps = pace is None or pace.overlaps
        transfers = Transfers(self._link, [storage.nbytes for storage in plan.offloaded], overlaps=overlaps)
        self._transfers.append(transfers)
        return transfers

    def learn_errors(self, plan: Plan, errors: Sequence[float]) -> None:
        """Put what a step's encodings really lost into the plan."""
        named = dict(zip((storage.name for storage in plan.encoded), errors, strict=True))
        known = replace(plan, errors=named, errors_measured=True)
        self.status.plans = tuple(known if p is plan else p for p in self.status.plans)

    def close(self) -> None:
        """Give the host's bytes and the link's threads back. Steps planned so far cannot run any more."""
        for transfers in self._transfers:
            transfers.close()
        self._transfers.clear()
        if self._link is not None:
            self._link.close()
            self._link = None

    def learn(self, plan: Plan, measured: Measured) -> None:
        """Hold a measured step against the promise; over the budget, plan again with what was learnt, and say so."""
        status = self.status
        status.measured_peak_bytes = max(status.measured_peak_bytes or 0, measured.peak_bytes)
        budget_bytes = status.budget_bytes
        if budget_bytes is None or measured.peak_bytes <= budget_bytes or self.ready_plan is not None:
            return
        over_bytes = measured.peak_bytes - plan.predicted_peak_bytes
        log.warning(
            "%s: the measured peak of %s is over the budget of %s (predicted: %s); planning again with %s set aside",
            self.name or "model",
            format_bytes(measured.peak_bytes),
            format_bytes(budget_bytes),
            format_bytes(plan.predicted_peak_bytes),
            format_bytes(over_bytes),
        )
        fingerprint = plan.exact_step.fingerprint
        self._learnt_bytes[fingerprint] = self._learnt_bytes.get(fingerprint, 0) + over_bytes
        status.repairs += 1
        status.measured_peak_bytes = None
        status.plans = ()
        self.close()
        self.on_repair()


def _is_same_step(one: StepGraph, other: StepGraph) -> bool:
    return one.fingerprint == other.fingerprint and one.standing_bytes == other.standing_bytes


def _adopt(
    plan: Plan, captured: Captured, costed: Callable[[Captured], StepGraph], budget_bytes: int | None
) -> tuple[Captured, Plan]:
    """The residences of a plan made elsewhere, with the costs of this machine, and the step with what it encodes.

    Raises:
        PlanError: it was made for another model or shape, breaks a rule, or passes the budget here.
    """
    exact = graph = costed(captured)
    for step in (plan.graph, plan.exact_step):
        check_step(step)
    check_plan(replace(plan.graph, link=graph.link), plan.residences)
    said = encoded_by(plan)
    if said is not None and plan.exact_step.fingerprint == graph.fingerprint:
        lossy, chosen = said
        captured = encoded(captured, chosen, lossy)
        graph = costed(captured)
    if plan.graph.fingerprint != graph.fingerprint:
        theirs = [s.shape for s in plan.graph.storages if s.kind == "input"]
        ours = [s.shape for s in graph.storages if s.kind == "input"]
        raise PlanError(
            f"the plan is for {plan.graph.model or 'another model'} with inputs {theirs} and {len(plan.graph.ops)} ops"
            f"; this step is {graph.model or 'a model'} with inputs {ours} and {len(graph.ops)} ops; plan it anew"
        )
    check_plan(graph, plan.residences, budget_bytes or 0)
    adopted = replace(plan, graph=graph, exact_graph=exact if said is not None else None)
    if budget_bytes is None and 0 < plan.budget_bytes < adopted.predicted_peak_bytes:
        log.warning(
            "%s: the plan was made for %s, but takes %s here; give budget= to have it refused, or plan it anew",
            graph.model or "model",
            format_bytes(plan.budget_bytes),
            format_bytes(adopted.predicted_peak_bytes),
        )
    return captured, adopted
