"""One plan for an iteration: the passes of all its graphs between two moments without a pending backward pass.

Graphs whose forward passes all come before their backward passes are one step (`shoal.core.joined_step`). A step inside
of another one, such as a discriminator's while a generator's result waits, is to the outer one an eager interval; the
outer one is planned first, and what it holds there counts in the inner one's budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shoal.core.hardware import Hardware
from shoal.core.joined_step import (
    EagerUse,
    Interval,
    Part,
    Pass,
    Place,
    eager_use,
    grown,
    in_order_of_shares,
    joined_residences,
    joined_step,
    share_of,
    with_arguments,
    with_eager_use,
    with_held,
)
from shoal.core.order import op_names
from shoal.core.plan import Plan
from shoal.core.residence import Keep, Residence
from shoal.core.shares import Share
from shoal.core.simulate import simulate
from shoal.core.step import STRETCH, StepGraph
from shoal.core.timeline import WAITS, Moment
from shoal.core.validate_plan import check_own_plan
from shoal.core.variant import Variant
from shoal.cost.measure import measure
from shoal.engine.compile_options import CompileOptions
from shoal.engine.generator_states import counting_states, repeated
from shoal.engine.iteration.record import Ports
from shoal.engine.step_planning import allowed
from shoal.errors import BudgetError, PlanError
from shoal.kernels.generator import state_bytes
from shoal.planners import Planner
from shoal.planners import get as planner_called
from shoal.planners.infeasible import infeasible

_ROUNDS = 5  # of planning, where the shares of the graphs take more than the plan of the whole; the smallest is last


@dataclass(frozen=True)
class InOrder:
    """A step within an iteration.

    Attributes:
        places: of its passes among those of the iteration.
        inner: steps that begin and end between two of its passes.
        first: where it or its first inner step begins.
    """

    places: tuple[int, ...]
    inner: tuple[InOrder, ...]
    first: int


def in_order(passes: Sequence[Pass]) -> InOrder | None:
    """The iteration as a step with steps inside; None where they overlap otherwise.

    >>> inner = [(1, "forward"), (1, "backward")]
    >>> step = in_order([(0, "forward"), *inner, (2, "forward"), (2, "backward"), (0, "backward")])
    >>> step.places, [one.places for one in step.inner]
    ((0, 3, 4, 5), [(1, 2)])
    """
    return _in_order(range(len(passes)), passes) if len(set(passes)) == len(passes) else None


def _in_order(places: Sequence[int], passes: Sequence[Pass]) -> InOrder | None:
    """Runs whose backward pass comes after the last forward pass, or never, are the step; others lie inside."""
    last_forward = max(place for place in places if passes[place][1] == "forward")
    early = {passes[place][0] for place in places if passes[place][1] == "backward" and place < last_forward}
    own: list[int] = []
    inner: list[InOrder] = []
    segment: list[int] = []
    outstanding: set[int] = set()
    for place in places:
        run = passes[place][0]
        if run not in early:
            if outstanding:
                return None
            own.append(place)
            continue
        segment.append(place)
        outstanding ^= {run}
        if not outstanding:
            step = _in_order(segment, passes)
            if step is None:
                return None
            inner.append(step)
            segment = []
    return InOrder(tuple(own), tuple(inner), places[0])


@dataclass(frozen=True)
class MeasuredStep:
    """A step of several graphs as it was metered, all forward passes before all backward passes.

    Attributes:
        parts, passes: as of `joined_step`.
        shares: under which each graph ran.
        intervals: as of `eager_use`.
        begin_bytes: in use when it began.
        device: where it runs.
        sizes: where the sizes of a graph vary: what its storages took when the step was metered, by name. Its graph has
            what they may take at most.
        eager_argument_bytes: as of `Record`.
        again: as of `MeasuredIteration`.
    """

    parts: tuple[Part, ...]
    passes: tuple[Pass, ...]
    shares: tuple[Share, ...]
    intervals: tuple[Interval, ...]
    begin_bytes: int
    device: torch.device
    sizes: tuple[Mapping[str, int], ...] = ()
    eager_argument_bytes: int = 0
    again: bool = False

    @property
    def has_backward(self) -> set[int]:
        """The graphs, by number, that have a backward pass."""
        return {part for part, phase in self.passes if phase == "backward"}

    @property
    def residences(self) -> dict[str, Residence]:
        """Under which the joined step ran."""
        return self.residences_in(self.shares)

    def residences_in(self, shares: Sequence[Share]) -> dict[str, Residence]:
        """Those of the joined step in these shares. A graph without a backward pass recomputes nothing."""
        back = self.has_backward
        return joined_residences(share.residences if part in back else {} for part, share in enumerate(shares))

    @property
    def states_bytes(self) -> list[int]:
        """Of the random generator's states with which each graph repeated its random ops: they wait between its passes.
        Under another plan a step keeps others."""
        back, each_bytes = self.has_backward, state_bytes(self.device)
        pairs = enumerate(zip(self.parts, self.shares, strict=True))
        return [each_bytes * repeated(part.graph, own.residences) if n in back else 0 for n, (part, own) in pairs]

    def intervals_of_eager_code(self) -> list[Interval]:
        """The intervals less what those states took, and what was kept for another backward pass."""
        waiting_bytes, found = 0, []
        kept = self._kept_bytes()
        for place, one in enumerate(self.intervals):
            if not place % 2 and kept:
                one_kept_bytes = kept[min(place // 2, len(kept) - 1)]
                one = Interval(one.peak_bytes - one_kept_bytes, one.end_bytes - one_kept_bytes)
            found.append(Interval(one.peak_bytes - waiting_bytes, one.end_bytes - waiting_bytes))
            if place % 2 and place // 2 < len(self.passes):
                part, phase = self.passes[place // 2]
                waiting_bytes += self.states_bytes[part] * (1 if phase == "forward" else -1)
        return found

    def _kept_bytes(self) -> list[int]:
        """What is kept for another backward pass in the eager interval before each pass, and after the last one."""
        if not self.again:
            return []
        graph, residences = self.as_it_ran(), self.residences
        freed = _with_freed_bytes(graph, residences)
        before = [moment_before(graph, residences, self.passes, place).op for place in range(len(self.passes))]
        named = {moment.op: freed_bytes for moment, freed_bytes in freed}
        return [*(named[op] for op in before), freed[-1][1]]

    def bare(self) -> StepGraph:
        """The joined step, of the sizes with which it was metered, without what eager code uses."""
        return with_arguments(joined_step("", self._as_metered(), self.passes), self.eager_argument_bytes)

    def eager_use(self) -> tuple[EagerUse, ...]:
        """What eager code was measured to use, and what it may use in another run."""
        used = eager_use(self.as_it_ran(), self.residences, self.intervals_of_eager_code())
        return tuple(
            replace(one, workspace_bytes=one.workspace_bytes + self._freed_late_bytes(place))
            for place, one in enumerate(used)
        )

    def _freed_late_bytes(self, place: int) -> int:
        """What an eager interval may use in addition because gloo frees a tensor late.

        FSDP2 reduces the gradients of the pass before, and then copies the parameters of the pass after it out of what
        was gathered. On the CPU gloo reduces a copy, which its thread frees at any time after it has reported the end:
        in one run before the parameters are copied, in the next one after that.
        """
        if self.device.type != "cpu" or not 0 < place < len(self.passes) or self.passes[place - 1][1] != "backward":
            return 0
        before, after = (self.parts[number] for number, _ in self.passes[place - 1 : place + 1])
        return min(_gathered_bytes(before), _gathered_bytes(after))

    def as_it_ran(self) -> StepGraph:
        """`bare` in the order in which it was metered, in addition to what was in use when it began."""
        bare = self.bare()
        bare = replace(bare, static_bytes=max(0, self.begin_bytes - bare.resident_bytes))
        return in_order_of_shares(bare, self.shares)

    def graph(self, model: str, used: Sequence[EagerUse]) -> StepGraph:
        """The step, with what eager code uses. Its static memory is not known here."""
        step = with_eager_use(replace(self.bare(), model=model), used)
        return grown(step, joined_step(model, self.parts, self.passes)) if any(self.sizes) else step

    def in_use_before(self, graph: StepGraph, residences: Mapping[str, Residence], place: int) -> int:
        """Bytes in use when the eager interval before a pass ends."""
        moment = moment_before(graph, residences, self.passes, place)
        return moment.total_bytes - moment.workspace_bytes

    def without_old_inputs(self) -> MeasuredStep:
        """The step without inputs that eager code is said to have made, where nothing came into use: they are older."""
        step = self
        for place, (number, phase) in enumerate(step.passes):
            fresh = set(step.parts[number].fresh)
            if phase != "forward" or not fresh:
                continue
            seen_bytes = step.in_use_before(step.as_it_ran(), step.residences, place)
            short_bytes = seen_bytes - step.intervals_of_eager_code()[2 * place].end_bytes
            sizes = {s.id: s.nbytes for s in step.parts[number].graph.storages}
            for storage in sorted(fresh, key=lambda s: (-sizes[s], s)):
                if sizes[storage] <= 2 * short_bytes:  # eager code may have made something small as well
                    short_bytes -= sizes[storage]
                    fresh.discard(storage)
            parts = list(step.parts)
            parts[number] = replace(parts[number], fresh=frozenset(fresh))
            step = replace(step, parts=tuple(parts))
        return step

    def _as_metered(self) -> Sequence[Part]:
        def sized(part: Part, sizes: Mapping[str, int]) -> Part:
            storages = tuple(replace(s, nbytes=sizes.get(s.name, s.nbytes)) for s in part.graph.storages)
            return replace(part, graph=replace(part.graph, storages=storages))

        if not any(self.sizes):
            return self.parts
        return [sized(part, sizes) for part, sizes in zip(self.parts, self.sizes, strict=True)]


def _gathered_bytes(part: Part) -> int:
    return sum(part.graph.storages[s].nbytes for s in part.gathered)


@dataclass(frozen=True)
class MeasuredIteration:
    """An iteration as it was metered.

    Attributes:
        parts, passes: as of `joined_step`, in any order.
        shares: under which each graph ran.
        intervals: of the eager interval before each pass, and of the pass; one more of an interval after the last.
        begin_bytes: in use when it began; None where that cannot be measured.
        device: where it runs.
        sizes, eager_argument_bytes: as of `MeasuredStep`.
        again: whether backward passes run a second time, as with retain_graph=True: what they read is kept meanwhile.
        ports: which of their storages the graphs are given and return.
    """

    parts: tuple[Part, ...]
    passes: tuple[Pass, ...]
    shares: tuple[Share, ...]
    intervals: tuple[Interval, ...]
    begin_bytes: int | None
    device: torch.device
    sizes: tuple[Mapping[str, int], ...] = ()
    eager_argument_bytes: int = 0
    again: bool = False
    ports: tuple[Ports, ...] = ()

    def with_more_before(self, place: int, more_bytes: int) -> MeasuredIteration:
        """The same with that many more bytes in use, at its peak, in the eager interval before a pass."""
        changed = list(self.intervals)
        changed[2 * place] = replace(changed[2 * place], peak_bytes=changed[2 * place].peak_bytes + more_bytes)
        return replace(self, intervals=tuple(changed))

    def runs_of(self, step: InOrder) -> tuple[int, ...]:
        """The graphs of a step, by number, in the order of their forward passes."""
        return tuple(dict.fromkeys(self.passes[place][0] for place in step.places))

    def measured(self, step: InOrder, *, whole: bool) -> MeasuredStep:
        """One step of it.

        Args:
            step: of the iteration.
            whole: whether it begins and ends where the iteration does.
        """
        runs = self.runs_of(step)
        number_of = {run: number for number, run in enumerate(runs)}
        intervals: list[Interval] = []
        before = step.first - 1
        for place in step.places:
            begin = 2 * (before + 1) if intervals or whole else 2 * step.first + 1
            eager = self.intervals[begin : 2 * place + 1]
            end_bytes = self.intervals[2 * place].end_bytes
            intervals += [
                Interval(max((one.peak_bytes for one in eager), default=end_bytes), end_bytes),
                self.intervals[2 * place + 1],
            ]
            before = place
        if whole and step.places[-1] == len(self.passes) - 1:
            intervals += self.intervals[2 * len(self.passes) :]
        return MeasuredStep(
            self._own(runs, number_of),
            tuple((number_of[self.passes[place][0]], self.passes[place][1]) for place in step.places),
            tuple(self.shares[run] for run in runs),
            tuple(intervals),
            (self.begin_bytes or 0) if whole else self.intervals[2 * step.first].end_bytes,
            self.device,
            tuple(self.sizes[run] for run in runs) if self.sizes else (),
            self.eager_argument_bytes if whole else 0,
            self.again,
        ).without_old_inputs()

    def _own(self, runs: Sequence[int], number_of: Mapping[int, int]) -> tuple[Part, ...]:
        """The graphs, without what they have of graphs that are not among them; the first that has it takes its
        place."""
        origins: dict[Place, Place] = {}
        parts = []
        for run in runs:
            same: dict[int, Place] = {}
            for storage in self.parts[run].same:
                origin = self._origin((run, storage))
                if origin[0] in number_of:
                    same[storage] = number_of[origin[0]], origin[1]
                elif origin in origins:
                    same[storage] = origins[origin]
                else:
                    origins[origin] = number_of[run], storage
            parts.append(replace(self.parts[run], same=same))
        return tuple(parts)

    def _origin(self, place: Place) -> Place:
        seen = {place}
        while (nearer := self.parts[place[0]].same.get(place[1])) is not None and nearer not in seen:
            seen.add(nearer)
            place = nearer
        return place


def moment_before(graph: StepGraph, residences: Mapping[str, Residence], passes: Sequence[Pass], place: int) -> Moment:
    """The moment of a step of several graphs at which the eager interval before a pass runs."""
    first_backward = next((i for i, (_, phase) in enumerate(passes) if phase == "backward"), None)
    name = "loss" if place == first_backward else f"{STRETCH}{place}"
    return next(m for m in simulate(graph, residences).moments if m.op == name and m.phase not in WAITS)


@dataclass(frozen=True)
class Surroundings:
    """What an iteration is planned for, other than what was measured in it.

    Attributes:
        options: what the plans are to be.
        more_bytes: in use throughout, in addition to what was when it was metered.
        held_bytes: of what is in use when it begins, what is freed before its first backward pass.
        persistent_bytes: in use throughout; None: as it was measured.
    """

    options: CompileOptions
    more_bytes: int = 0
    held_bytes: int = 0
    persistent_bytes: int | None = None


@dataclass(frozen=True)
class VariantPlanning:
    """How an iteration is planned in whatever variant its graphs are computed.

    Attributes:
        parts, ports: of its graphs as they were measured, by number.
        trained: the graphs whose backward pass runs; the others stay as they were measured.
        graph: the step of all graphs, with others in place of those that were measured.
        plan: of such a step, by the planner given or that of the options.
        shares: those that the graphs have in a plan.
    """

    parts: tuple[Part, ...]
    ports: tuple[Ports, ...]
    trained: frozenset[int]
    graph: Callable[[tuple[Part, ...]], StepGraph]
    plan: Callable[[StepGraph, Planner | None], Plan]
    shares: Callable[[Plan], tuple[Share, ...]]


@dataclass(frozen=True)
class GraphVariant:
    """In which variant a graph of an iteration is computed.

    Attributes:
        variant: of the graph.
        fingerprint: of its step in that variant; "" if that is not known.
    """

    variant: Variant
    fingerprint: str


@dataclass(frozen=True)
class PlannedParts:
    """The plan of a step of several graphs.

    Attributes:
        plan: of all.
        shares: that each graph has in it. variants: how each is computed; None or none as they were measured.
    """

    plan: Plan
    shares: tuple[Share, ...]
    variants: tuple[GraphVariant | None, ...] = ()


# Plans the graphs of a step of an iteration, which are these by number, in the best variant.
Choose = Callable[[tuple[int, ...], VariantPlanning], PlannedParts]


@dataclass(frozen=True)
class PlannedIteration:
    """The plans of an iteration.

    Attributes:
        plans: of each step, the outermost first. runs: the graphs of each, by number.
        shares: that each graph has. variants: how each is computed; None or none as they were measured.
    """

    plans: tuple[Plan, ...]
    runs: tuple[tuple[int, ...], ...]
    shares: tuple[Share, ...]
    variants: tuple[GraphVariant | None, ...] = ()

    @property
    def predicted_peak_bytes(self) -> int:
        """Of all steps."""
        return max(plan.predicted_peak_bytes for plan in self.plans)

    def as_given(self, given: Plan) -> PlannedIteration:
        """The same with what a plan that was given says of how it was made.

        Raises:
            PlanError: it is for other steps.
        """
        if len(self.plans) != 1 or {op.name for op in self.plans[0].graph.ops} != {op.name for op in given.graph.ops}:
            raise PlanError("the plan is for an iteration of other passes; plan it again")
        made = replace(self.plans[0], planner=given.planner, variant=given.variant, candidates=given.candidates)
        return replace(self, plans=(made,))


def plan_iteration(
    iteration: MeasuredIteration,
    around: Surroundings,
    models: Sequence[str],
    *,
    fixed: bool,
    shares: Sequence[Share] | None = None,
    apart: bool = False,
    choose: Choose | None = None,
) -> PlannedIteration | None:
    """Plan all steps of an iteration.

    Args:
        iteration: as it was metered.
        around: what it is planned for.
        models: whose each graph is.
        fixed: whether the graphs keep their shares.
        shares: those; None: under which they were measured.
        apart: whether each graph starts and ends the transfers of its storages itself, as where not all graphs of the
            iteration may run.
        choose: plans a step of it in the best variant, if its sizes do not vary; None: as it was measured.

    Returns:
        The plans; None where the iteration is no step with steps inside.

    Raises:
        BudgetError: no plan fits.
    """
    whole = in_order(iteration.passes)
    if whole is None:
        return None
    apart |= iteration.again or bool(whole.inner)
    plans: list[Plan] = []
    runs: list[tuple[int, ...]] = []
    found_shares, variants = list(iteration.shares if shares is None else shares), dict[int, GraphVariant | None]()

    def plan(step: InOrder, more_bytes: int, held_bytes: int, host_bytes: int = 0, *, is_whole: bool) -> None:
        measured = iteration.measured(step, whole=is_whole)
        own = iteration.runs_of(step)
        kept = replace(measured, shares=tuple(found_shares[run] for run in own))
        name = " and ".join(dict.fromkeys(models[run] for run in own))
        used = measured.eager_use()
        bare = measured.graph(name, used)
        begin_bytes = max(0, measured.begin_bytes - bare.resident_bytes)
        if is_whole and around.persistent_bytes is not None:
            begin_bytes = around.persistent_bytes
        static_bytes = max(0, begin_bytes + more_bytes - held_bytes)

        def graph(parts: tuple[Part, ...]) -> StepGraph:
            bare = replace(measured, parts=parts).graph(name, used)
            return with_less_host(replace(with_held(bare, held_bytes), static_bytes=static_bytes), host_bytes)

        def plan_of(graph: StepGraph, planner: Planner | None = None, *, fixed: bool = False) -> Plan:
            return _planned(kept, graph, around.options, planner, fixed=fixed, retains=iteration.again, apart=apart)

        def planned(*, fixed: bool) -> Plan:
            if choose is not None and not (fixed or any(measured.sizes)):
                ports = tuple(iteration.ports[run] for run in own)
                trained, shares_in = frozenset(measured.has_backward), partial(_shares, kept)
                made = choose(own, VariantPlanning(measured.parts, ports, trained, graph, plan_of, shares_in))
            else:
                found = plan_of(graph(measured.parts), fixed=fixed)
                made = PlannedParts(found, _shares(kept, found))
            for run, share in zip(own, made.shares, strict=True):
                found_shares[run] = share
            variants.update(zip(own, made.variants, strict=False))
            return made.plan

        try:
            made = planned(fixed=fixed)
        except BudgetError:
            if is_whole or fixed:
                raise
            made = planned(fixed=True)  # it fits as it was metered, for the outer plan has left as much
        plans.append(made)
        runs.append(own)
        with_states = replace(bare, static_bytes=begin_bytes + sum(measured.states_bytes))
        was = in_order_of_shares(with_states, measured.shares)
        for inner in step.inner:
            after = next(i for i, place in enumerate(step.places) if place > inner.places[-1])
            before_bytes = measured.in_use_before(was, measured.residences, after)
            now_bytes = measured.in_use_before(made.graph, made.residences, after)
            plan(inner, now_bytes - before_bytes, 0, host_bytes + made.host_bytes, is_whole=False)

    plan(whole, around.more_bytes, around.held_bytes, is_whole=True)
    computed = tuple(map(variants.get, range(len(found_shares)))) if variants else ()
    return PlannedIteration(tuple(plans), tuple(runs), tuple(found_shares), computed)


def with_less_host(graph: StepGraph, used_bytes: int) -> StepGraph:
    """The step where other steps, which go on meanwhile, have offloaded that many bytes already."""
    link = graph.link
    if link is None or not link.host_bytes or not used_bytes:
        return graph
    left_bytes = link.host_bytes - used_bytes
    return replace(graph, link=replace(link, host_bytes=left_bytes) if left_bytes > 0 else None)  # 0: no limit


def _planned(
    measured: MeasuredStep,
    graph: StepGraph,
    options: CompileOptions,
    planner: Planner | None = None,
    *,
    fixed: bool,
    retains: bool,
    apart: bool,
) -> Plan:
    """The plan of a step of several graphs.

    Args:
        measured, graph: the step, and with what is in use around it.
        options: what the plan is to be.
        planner: what makes it; None: what the options say.
        fixed: as of `plan_iteration`.
        retains: whether what backward passes read is kept for another backward pass.
        apart: as of `plan_iteration`.

    Raises:
        BudgetError: no plan fits.
    """
    started = time.perf_counter()
    hardware, budget_bytes = measure(measured.device), options.budget_bytes or 0
    each_state_bytes = state_bytes(measured.device)
    if fixed:
        planner = counting_states(partial(_as_measured, measured), each_state_bytes)
    elif options.budget_bytes is None:
        planner = planner_called("keep_all")
    elif planner is None:
        planner = allowed(options.means, options.planner, each_state_bytes)
    lower_bound_seconds: float | None = None
    aim_bytes = budget_bytes
    for left in reversed(range(_ROUNDS)):
        refused: BudgetError | None = None
        try:
            plan = planner(graph, hardware, aim_bytes if left else 1)
        except BudgetError as error:
            refused, plan = error, _smallest(planner, graph, hardware, error)
        if lower_bound_seconds is None:
            lower_bound_seconds = plan.lower_bound_seconds
        shares, captured = _shares(measured, plan, apart=apart), plan.captured_graph
        residences, ordered = measured.residences_in(shares), in_order_of_shares(captured, shares)
        retained_bytes = _retained_bytes(ordered, residences) if retains else 0
        plan = replace(
            plan,
            graph=replace(ordered, static_bytes=ordered.static_bytes + retained_bytes),
            captured_order=op_names(captured) if ordered is not captured else (),
            residences=residences,
        )
        over_bytes = plan.predicted_peak_bytes - budget_bytes
        if not budget_bytes or over_bytes <= 0:
            break
        if refused is not None and refused.least_feasible_bytes == plan.predicted_peak_bytes:
            raise refused
        if refused is not None or not left:
            raise infeasible(plan, budget_bytes)
        aim_bytes -= over_bytes
    plan = replace(
        plan, budget_bytes=budget_bytes, lower_bound_seconds=lower_bound_seconds or 0.0, is_at_most=any(measured.sizes)
    )
    check_own_plan(plan.captured_graph, plan.graph, plan.residences, budget_bytes)
    return replace(plan, planning_seconds=time.perf_counter() - started, options=options.to_json())


def _smallest(planner: Planner, graph: StepGraph, hardware: Hardware, refused: BudgetError) -> Plan:
    """The plan of the minimum that a refusal names: as its graphs run it, each in its own order, it may need more.

    Raises:
        BudgetError: the refusal, if the planner makes no such plan.
    """
    if refused.least_feasible_bytes is None:
        raise refused
    try:
        return planner(graph, hardware, refused.least_feasible_bytes)
    except BudgetError:
        raise refused from None


def _shares(measured: MeasuredStep, plan: Plan, *, apart: bool = False) -> tuple[Share, ...]:
    """The share that each graph has in a plan; one that has no backward pass keeps its own."""
    back, pairs = measured.has_backward, enumerate(measured.shares)
    return tuple(share_of(part, plan, apart=apart) if part in back else share for part, share in pairs)


def _retained_bytes(graph: StepGraph, residences: Mapping[str, Residence]) -> int:
    """How much higher the peak is if nothing is freed that was saved for the backward passes."""
    moments = _with_freed_bytes(graph, residences)
    peak_bytes = max(moment.total_bytes for moment, _ in moments)
    return max(moment.total_bytes + freed_bytes for moment, freed_bytes in moments) - peak_bytes


def _with_freed_bytes(graph: StepGraph, residences: Mapping[str, Residence]) -> list[tuple[Moment, int]]:
    """The moments of a step, each with what has been freed until then of what was saved for the backward passes."""
    saved = [s for s in graph.saved if isinstance(residences.get(graph.storages[s].name, Keep()), Keep)]
    freed: dict[str, int] = {}
    for storage in saved:
        last = graph.ops[graph.readers[storage][-1]].name
        freed[last] = freed.get(last, 0) + graph.storages[storage].nbytes
    freed_bytes, found = 0, []
    for moment in simulate(graph, residences).moments:
        if moment.phase not in WAITS:
            found.append((moment, freed_bytes))
            freed_bytes += freed.get(moment.op, 0) if moment.phase == "backward" else 0
    return found


def _as_measured(measured: MeasuredStep, graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    ordered = in_order_of_shares(graph, measured.shares)
    plan = Plan(ordered, measured.residences, "parts", hardware.name, budget_bytes, captured_order=op_names(graph))
    if budget_bytes and plan.predicted_peak_bytes > budget_bytes:
        raise infeasible(plan, budget_bytes)
    return plan
