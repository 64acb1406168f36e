"""One plan for the parts of a step: their steps joined, with what was measured between them, planned and shared out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shoal.core.hardware import Hardware
from shoal.core.joined_step import (
    STRETCH,
    Interval,
    Part,
    Pass,
    are_in_order,
    grown,
    joined_residences,
    joined_step,
    residences_of,
    with_arguments,
    with_held,
    with_measured,
)
from shoal.core.over_budget import over_budget
from shoal.core.plan import Plan
from shoal.core.residence import Residence
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.timeline import WAITS, Moment
from shoal.core.validate_plan import check_own_plan
from shoal.cost.measure import measure
from shoal.engine.compile_options import CompileOptions
from shoal.engine.generator_states import counting_states, repeated
from shoal.engine.overlapping import plan_overlapping
from shoal.engine.part_record import Record
from shoal.engine.session import Session
from shoal.engine.step_planning import allowed
from shoal.errors import BudgetError, CaptureError
from shoal.kernels.generator import state_bytes
from shoal.planners import Planner
from shoal.planners import get as planner_called
from shoal.planners.infeasible import infeasible
from shoal.planners.joint import joint
from shoal.planners.limits import DEFAULT
from shoal.planners.smallest_plan import smallest_plan

_ROOMY = 0.5  # of the budget: so much may be in use before the whole step is known, and everything be kept
_ROUNDS = 4  # of planning, where the shares of the parts take more than the plan of the whole
_Shares = tuple[Mapping[str, Residence], ...]


def fits_easily(graph: StepGraph, in_use_bytes: int, budget_bytes: int) -> bool:
    """Whether everything of a part can be kept in addition to what is in use, with room for parts that are not known
    yet."""
    alone = _with_loss(graph, 0)
    return in_use_bytes + simulate(alone, {}).peak_bytes - graph.resident_bytes <= _ROOMY * budget_bytes


def first_share(
    graph: StepGraph,
    device: torch.device,
    in_use_bytes: int,
    budget_bytes: int,
    *,
    keeps_little: bool,
    who: str = "one of its graphs",
) -> Mapping[str, Residence]:
    """Under which residences a part runs before its whole step is planned: everything kept, or as little as can be.

    Args:
        graph: the part's step.
        device: where it runs.
        in_use_bytes: device bytes in use now; parameters and the part's inputs are among them.
        budget_bytes: of the whole step.
        keeps_little: whether nothing is kept, however much room there is.
        who: what the part is called in an error.

    Raises:
        BudgetError: the part does not fit in addition to what is in use.
    """
    if not keeps_little and fits_easily(graph, in_use_bytes, budget_bytes):
        return {}
    graph = _with_loss(graph, 0)  # what comes between the passes of a part is not known yet

    limits, hardware = replace(DEFAULT, order=False), measure(device)
    everything_bytes = 4 * sum(s.nbytes for s in graph.storages)
    least = smallest_plan(_with_loss(graph, everything_bytes), hardware, 1, limits).residences
    if _peak_bytes(graph, least, device, in_use_bytes) <= budget_bytes:
        return least
    room_bytes = budget_bytes - in_use_bytes + graph.resident_bytes
    planner = counting_states(partial(joint, limits=limits), state_bytes(device))
    found: Mapping[str, Residence] | None = None
    most_bytes, least_bytes = room_bytes, 0  # in addition to what it saves, while later parts run
    aside_bytes = 0
    for _ in range(_ROUNDS):
        try:
            found = planner(_with_loss(graph, aside_bytes), hardware, room_bytes).residences
            least_bytes = aside_bytes
        except BudgetError as error:
            if found is None:
                needed_bytes = (error.least_feasible_bytes or room_bytes) + budget_bytes - room_bytes
                raise over_budget(
                    graph.model,
                    needed_bytes,
                    budget_bytes,
                    is_minimum=False,
                    details={"needed by": f"{who}, with what is in use when it runs; others may need more"},
                ) from None
            most_bytes = aside_bytes
        aside_bytes = (least_bytes + most_bytes) // 2
    assert found is not None
    return found


def least_bytes(graph: StepGraph, device: torch.device, in_use_bytes: int) -> int:
    """The smallest budget in which a part runs before its whole step is planned, in addition to what is in use then."""
    alone = _with_loss(graph, 0)
    least = smallest_plan(alone, measure(device), 1, replace(DEFAULT, order=False))
    return _peak_bytes(alone, least.residences, device, in_use_bytes)


def _peak_bytes(graph: StepGraph, residences: Mapping[str, Residence], device: torch.device, in_use_bytes: int) -> int:
    states_bytes = repeated(graph, residences) * state_bytes(device)
    return in_use_bytes + states_bytes + simulate(graph, residences).peak_bytes - graph.resident_bytes


def no_graph(session: Session, broken: str) -> CaptureError:
    """The refusal of a model of which nothing that trains can be captured.

    Args:
        session: of the model.
        broken: where Dynamo could not go on, and why.
    """
    if "sparse Tensor" in broken:  # so Dynamo words it
        return CaptureError(
            f"{session.name or 'the model'} reads a sparse tensor in compiled code; read it in a method with "
            "@torch.compiler.disable, or use budget=None",
            details={"graph break": broken},
        )
    way_out = f"it breaks at {broken}; take that line out of the model"
    if session.static.is_sharded:
        way_out = (
            "fully_shard is applied to single layers of torch.nn; apply it to modules with a forward of their own, "
            "such as a block of layers"
        )
    return CaptureError(
        f"no graph of {session.name or 'the model'} that trains can be captured, so no step can be planned: {way_out}, "
        "or give budget=None"
    )


def _with_loss(graph: StepGraph, workspace_bytes: int) -> StepGraph:
    """While later parts run, what this one saved waits: it is to leave them that many bytes.

    Autograd lets the gradients of its results go to its backward pass.
    """
    ops = (replace(op, workspace_bytes=workspace_bytes) if op.phase == "loss" else op for op in graph.ops)
    storages = (replace(s, kind="activation_gradient") if s.kind == "tangent" else s for s in graph.storages)
    return replace(graph, ops=tuple(ops), storages=tuple(storages), link=None)


@dataclass(frozen=True)
class MeasuredParts:
    """A step of several parts as it was metered.

    Attributes:
        parts, passes: as of `joined_step`.
        shares: residences of each part.
        intervals: as of `with_measured`.
        begin_bytes: in use when it began.
        device: where it runs.
        sizes: where the sizes of a part vary: what its storages took when the step was metered, by name. Its graph has
            what they may take at most.
        static_bytes, eager_argument_bytes: as of `Record`.
    """

    parts: tuple[Part, ...]
    passes: tuple[Pass, ...]
    shares: _Shares
    intervals: tuple[Interval, ...]
    begin_bytes: int
    device: torch.device
    sizes: tuple[Mapping[str, int], ...] = ()
    static_bytes: int = 0
    eager_argument_bytes: int = 0

    @staticmethod
    def of_last_call(record: Record, intervals: Sequence[Interval]) -> MeasuredParts | None:
        """The last call of a record; None where its passes are not in order, or others ran between them."""
        last = record.of_last_call()
        places = [place for place, (number, _) in enumerate(record.passes) if number in last]
        passes = [record.passes[place] for place in places]
        if places != list(range(places[0], places[-1] + 1)) or not are_in_order(passes):
            return None
        if len(intervals) <= 2 * len(record.passes):
            intervals = [Interval(0, 0)] * (2 * len(record.passes) + 1)
        begin = intervals[2 * places[0]].end_bytes
        until = len(intervals) if places[-1] == len(record.passes) - 1 else 2 * places[-1] + 3
        number_of = {number: place for place, number in enumerate(last)}
        parts = [record.runs[number].part() for number in last]
        own = [
            replace(part, same={s: (number_of[n], of) for s, (n, of) in part.same.items() if n in number_of})
            for part in parts
        ]
        return MeasuredParts(
            tuple(own),
            tuple((number_of[number], phase) for number, phase in passes),
            tuple(record.runs[number].step.share for number in last),
            tuple(intervals[2 * places[0] + 1 : until]),
            begin,
            record.runs[last[0]].step.device,
            tuple(record.runs[number].step.bytes_in_call() for number in last),
            record.static_bytes,
            record.eager_argument_bytes,
        )

    @property
    def residences(self) -> dict[str, Residence]:
        """Under which the joined step ran. A part that did not go back recomputed nothing."""
        back = {part for part, phase in self.passes if phase == "backward"}
        return joined_residences(share if part in back else {} for part, share in enumerate(self.shares))

    @property
    def states_bytes(self) -> list[int]:
        """Of the random generator's states with which each part repeated its random ops: they wait between its passes.
        Under another plan a step keeps others."""
        back = {part for part, phase in self.passes if phase == "backward"}
        each_bytes, shares = state_bytes(self.device), enumerate(self.shares)
        return [each_bytes * repeated(self.parts[n].graph, share) if n in back else 0 for n, share in shares]

    def intervals_without_states(self) -> list[Interval]:
        """The intervals less what those states took."""
        waiting_bytes, found = 0, []
        for place, one in enumerate(self.intervals):
            found.append(Interval(one.peak_bytes - waiting_bytes, one.end_bytes - waiting_bytes))
            if place % 2:
                part, phase = self.passes[place // 2]
                waiting_bytes += self.states_bytes[part] * (1 if phase == "forward" else -1)
        return found

    def graph(self, model: str) -> StepGraph:
        """The step, with what eager code was measured to use. Its static memory is not known here."""
        largest = joined_step(model, self.parts, self.passes)
        varies = any(self.sizes)
        bare = joined_step(model, self._parts_as_metered(), self.passes) if varies else largest
        bare = with_arguments(bare, self.eager_argument_bytes)
        static_bytes = max(0, self.begin_bytes - bare.resident_bytes)
        if any(part.gathered for part in self.parts):  # what is gathered before the first pass is no static memory
            own_bytes = sum(s.nbytes for s in bare.storages if s.kind in ("parameter", "buffer"))
            static_bytes = max(0, self.static_bytes - own_bytes)
        as_measured = replace(bare, static_bytes=static_bytes)
        measured = with_measured(as_measured, self.residences, self.intervals_without_states())
        return replace(grown(measured, largest) if varies else measured, static_bytes=0)

    def with_more_before(self, place: int, more_bytes: int) -> MeasuredParts:
        """The same with that many more bytes in use, at its peak, in the eager interval before a pass."""
        return replace(self, intervals=with_more_before(self.intervals, place, more_bytes))

    def _parts_as_metered(self) -> list[Part]:
        def sized(part: Part, sizes: Mapping[str, int]) -> Part:
            storages = tuple(replace(s, nbytes=sizes.get(s.name, s.nbytes)) for s in part.graph.storages)
            return replace(part, graph=replace(part.graph, storages=storages))

        return [sized(part, sizes) for part, sizes in zip(self.parts, self.sizes, strict=True)]


def with_more_before(intervals: Sequence[Interval], place: int, more_bytes: int) -> tuple[Interval, ...]:
    """Intervals as of `with_measured`, with a higher peak of the one before a pass."""
    changed = list(intervals)
    changed[2 * place] = replace(changed[2 * place], peak_bytes=changed[2 * place].peak_bytes + more_bytes)
    return tuple(changed)


def moment_before(graph: StepGraph, residences: Mapping[str, Residence], passes: Sequence[Pass], place: int) -> Moment:
    """The moment of a step of several parts at which the eager interval before a pass runs."""
    first_backward = next((i for i, (_, phase) in enumerate(passes) if phase == "backward"), None)
    name = "loss" if place == first_backward else f"{STRETCH}{place}"
    return next(m for m in simulate(graph, residences).moments if m.op == name and m.phase not in WAITS)


@dataclass(frozen=True)
class PartedStep:
    """A planned step of several parts.

    Attributes:
        plan: of the joined step.
        shares: of the parts.
    """

    plan: Plan
    shares: _Shares

    def bytes_before(self, passes: Sequence[Pass], place: int) -> int:
        """What the plan has in use, at its peak, in the eager interval before a pass."""
        return moment_before(self.plan.graph, self.plan.residences, passes, place).total_bytes


def plan_parts(
    measured: MeasuredParts,
    options: CompileOptions,
    model: str,
    *,
    static_bytes: int,
    held_bytes: int = 0,
    calls_at_once: int = 1,
    fixed: bool = False,
) -> PartedStep:
    """The plan of a step of several parts, and the share that each has in it.

    Args:
        measured: the step.
        options: what the plan is to be.
        model: its name.
        static_bytes: as of `StepGraph`.
        held_bytes: what the training loop holds of the step before, until the loss is known.
        calls_at_once: how many calls come before a backward pass.
        fixed: whether the parts keep the shares under which they were measured.

    Raises:
        BudgetError: no plan fits.
    """
    started = time.perf_counter()
    graph = replace(with_held(measured.graph(model), held_bytes), static_bytes=static_bytes)
    hardware, budget_bytes = measure(measured.device), options.budget_bytes or 0
    each_state_bytes = state_bytes(measured.device)
    planner: Planner
    if fixed:
        planner = counting_states(partial(_as_measured, measured.residences), each_state_bytes)
    elif options.budget_bytes is None:
        planner = planner_called("keep_all")
    else:
        planner = allowed(options.means - {"order"}, options.planner, each_state_bytes)
    shares: dict[int, _Shares] = {}

    def make(others_bytes: int) -> Plan:
        step = replace(graph, static_bytes=graph.static_bytes + others_bytes)
        first: Plan | None = None
        aim_bytes = budget_bytes
        for _ in range(_ROUNDS):
            plan = planner(step, hardware, aim_bytes)
            first = first or plan
            shares[others_bytes] = tuple(
                residences_of(part, step, plan.residences) for part in range(len(measured.parts))
            )
            residences = joined_residences(shares[others_bytes])
            over_bytes = simulate(plan.graph, residences).peak_bytes - budget_bytes
            if not budget_bytes or over_bytes <= 0:
                break
            aim_bytes -= over_bytes
        else:
            raise over_budget(model, budget_bytes + over_bytes, budget_bytes)
        return replace(
            plan, residences=residences, budget_bytes=budget_bytes, lower_bound_seconds=first.lower_bound_seconds
        )

    aside_bytes, plan = plan_overlapping(calls_at_once, budget_bytes, make)
    check_own_plan(plan.captured_graph, plan.graph, plan.residences, budget_bytes)
    plan = replace(plan, planning_seconds=time.perf_counter() - started, options=options.to_json())
    back = {part for part, phase in measured.passes if phase == "backward"}
    made = enumerate(shares[aside_bytes])
    return PartedStep(plan, tuple(share if part in back else measured.shares[part] for part, share in made))


@dataclass(frozen=True)
class KnownStep:
    """A step that was metered, to be planned as often as more is known of the loop around it.

    Attributes:
        parts: as they ran.
        fixed: whether the parts keep the shares under which they ran.
    """

    parts: MeasuredParts
    fixed: bool

    def plan(self, session: Session, learnt_bytes: int, held_bytes: int) -> PartedStep:
        """Its plan, with that many bytes set aside, and what the training loop holds of the step before.

        Raises:
            BudgetError: no plan fits.
        """
        bare = self.parts.graph(session.name)
        return plan_parts(
            self.parts,
            session.options,
            session.name,
            static_bytes=session.static.bytes_beside(bare) + learnt_bytes,
            held_bytes=held_bytes,
            calls_at_once=session.loop.calls_at_once,
            fixed=self.fixed,
        )


def _as_measured(residences: Mapping[str, Residence], graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    plan = Plan(graph, residences, "parts", hardware.name, budget_bytes)
    if budget_bytes and plan.predicted_peak_bytes > budget_bytes:
        raise infeasible(plan, budget_bytes)
    return plan
