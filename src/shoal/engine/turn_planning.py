"""One plan for a turn: the parts of several models that ran between two moments at which nothing was outstanding.

Parts whose forward passes all come before their backward passes are one step (`shoal.core.joined_step`). A step inside
of another one, such as a discriminator's while a generator's result waits, is to the outer one a stretch of eager code;
the outer one is planned first, and what it holds there counts in the inner one's budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.core.joined_step import Interval, Part, Pass, Place, joined_step
from shoal.core.plan import Plan
from shoal.core.residence import Residence
from shoal.core.step import StepGraph
from shoal.engine.compile_options import CompileOptions
from shoal.engine.part_planning import MeasuredParts, moment_before, plan_parts, with_more_before
from shoal.errors import BudgetError

Share = Mapping[str, Residence]


@dataclass(frozen=True)
class InOrder:
    """A step within a turn.

    Attributes:
        places: of its passes among those of the turn.
        inner: steps that begin and end between two of its passes.
        first: where it or its first inner step begins.
    """

    places: tuple[int, ...]
    inner: tuple[InOrder, ...]
    first: int


def in_order(passes: Sequence[Pass]) -> InOrder | None:
    """The turn as a step with steps inside; None where they overlap otherwise.

    >>> inner = [(1, "forward"), (1, "backward")]
    >>> step = in_order([(0, "forward"), *inner, (2, "forward"), (2, "backward"), (0, "backward")])
    >>> step.places, [one.places for one in step.inner]
    ((0, 3, 4, 5), [(1, 2)])
    """
    return _in_order(range(len(passes)), passes) if len(set(passes)) == len(passes) else None


def _in_order(places: Sequence[int], passes: Sequence[Pass]) -> InOrder | None:
    """Runs that go back after the last forward pass, and those that do not go back, are the step; others lie inside."""
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
class MeasuredTurn:
    """A turn as it was metered.

    Attributes:
        parts, passes: as of `joined_step`, in any order.
        shares: residences of each part.
        intervals: of the stretch before each pass, and of the pass.
        begin_bytes: in use when it began.
        device: where it runs.
    """

    parts: tuple[Part, ...]
    passes: tuple[Pass, ...]
    shares: tuple[Share, ...]
    intervals: tuple[Interval, ...]
    begin_bytes: int
    device: torch.device

    def with_more_before(self, place: int, more_bytes: int) -> MeasuredTurn:
        """As of `MeasuredParts`."""
        return replace(self, intervals=with_more_before(self.intervals, place, more_bytes))

    def runs_of(self, step: InOrder) -> tuple[int, ...]:
        """The parts of a step, by number, in the order of their forward passes."""
        return tuple(dict.fromkeys(self.passes[place][0] for place in step.places))

    def measured(self, step: InOrder, *, whole: bool) -> MeasuredParts:
        """One step of it.

        Args:
            step: of the turn.
            whole: whether it begins where the turn does.
        """
        runs = self.runs_of(step)
        number_of = {run: number for number, run in enumerate(runs)}
        intervals: list[Interval] = []
        before = step.first - 1
        for place in step.places:
            begin = 2 * (before + 1) if intervals or whole else 2 * step.first + 1
            stretch = self.intervals[begin : 2 * place + 1]
            end_bytes = self.intervals[2 * place].end_bytes
            intervals += [
                Interval(max((one.peak_bytes for one in stretch), default=end_bytes), end_bytes),
                self.intervals[2 * place + 1],
            ]
            before = place
        return _made_in_it(
            MeasuredParts(
                self._own(runs, number_of),
                tuple((number_of[self.passes[place][0]], self.passes[place][1]) for place in step.places),
                tuple(self.shares[run] for run in runs),
                tuple(intervals),
                self.begin_bytes if whole else self.intervals[2 * step.first].end_bytes,
                self.device,
            )
        )

    def _own(self, runs: Sequence[int], number_of: Mapping[int, int]) -> tuple[Part, ...]:
        """The parts, without what they have of parts that are not among them; the first that has it takes its place."""
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


def _made_in_it(step: MeasuredParts) -> MeasuredParts:
    """The step without inputs that are said to be made by eager code where nothing came into use: they were there."""
    for place, (number, phase) in enumerate(step.passes):
        fresh = set(step.parts[number].fresh)
        if phase != "forward" or not fresh:
            continue
        bare = joined_step("", step.parts, step.passes)
        bare = replace(bare, static_bytes=max(0, step.begin_bytes - bare.resident_bytes))
        seen_bytes = _in_use_before(bare, step.residences, step.passes, place)
        short_bytes = seen_bytes - step.intervals_without_states()[2 * place].end_bytes
        sizes = {s.id: s.nbytes for s in step.parts[number].graph.storages}
        for storage in sorted(fresh, key=lambda s: (-sizes[s], s)):
            if sizes[storage] <= 2 * short_bytes:  # eager code may have made something small besides
                short_bytes -= sizes[storage]
                fresh.discard(storage)
        parts = list(step.parts)
        parts[number] = replace(parts[number], fresh=frozenset(fresh))
        step = replace(step, parts=tuple(parts))
    return step


def _in_use_before(graph: StepGraph, residences: Share, passes: Sequence[Pass], place: int) -> int:
    """Bytes in use when the stretch of eager code before a pass ends."""
    moment = moment_before(graph, residences, passes, place)
    return moment.total_bytes - moment.workspace_bytes


@dataclass(frozen=True)
class PlannedTurn:
    """The plans of a turn.

    Attributes:
        plans: of each step, the outermost first. runs: the parts of each, by number.
        shares: residences of each part.
    """

    plans: tuple[Plan, ...]
    runs: tuple[tuple[int, ...], ...]
    shares: tuple[Share, ...]

    @property
    def predicted_peak_bytes(self) -> int:
        """Of all steps."""
        return max(plan.predicted_peak_bytes for plan in self.plans)


def plan_turn(
    turn: MeasuredTurn,
    options: CompileOptions,
    models: Sequence[str],
    *,
    more_bytes: int,
    held_bytes: int,
    fixed: bool,
) -> PlannedTurn | None:
    """Plan all steps of a turn.

    Args:
        turn: as it was metered.
        options: what the plans are to be.
        models: whose part each is.
        more_bytes: in use all turn, in addition to what was when it was metered.
        held_bytes: of what is in use when it begins, what is let go before its first backward pass.
        fixed: whether the parts keep the shares under which they were measured.

    Returns:
        The plans; None where the turn is no step with steps inside.

    Raises:
        BudgetError: no plan fits.
    """
    whole = in_order(turn.passes)
    if whole is None:
        return None
    plans: list[Plan] = []
    runs: list[tuple[int, ...]] = []
    shares = list(turn.shares)

    def plan(step: InOrder, shift_bytes: int, held_bytes: int, *, is_whole: bool) -> None:
        measured = turn.measured(step, whole=is_whole)
        own = turn.runs_of(step)
        name = " and ".join(dict.fromkeys(models[run] for run in own))
        bare = measured.graph(name)
        static_bytes = max(0, measured.begin_bytes - bare.resident_bytes + shift_bytes - held_bytes)

        def planned(*, fixed: bool) -> Plan:
            made = plan_parts(measured, options, name, static_bytes=static_bytes, held_bytes=held_bytes, fixed=fixed)
            for run, share in zip(own, made.shares, strict=True):
                shares[run] = share
            return made.plan

        try:
            made = planned(fixed=fixed)
        except BudgetError:
            if is_whole or fixed:
                raise
            made = planned(fixed=True)  # it fits as it was metered, for the outer plan has left as much
        plans.append(made)
        runs.append(own)
        static_bytes = max(0, measured.begin_bytes - bare.resident_bytes) + sum(measured.states_bytes)
        was = replace(bare, static_bytes=static_bytes)
        for inner in step.inner:
            behind = next(i for i, place in enumerate(step.places) if place > inner.places[-1])
            before_bytes = _in_use_before(was, measured.residences, measured.passes, behind)
            now_bytes = _in_use_before(made.graph, made.residences, measured.passes, behind)
            plan(inner, now_bytes - before_bytes, 0, is_whole=False)

    plan(whole, more_bytes, held_bytes, is_whole=True)
    return PlannedTurn(tuple(plans), tuple(runs), tuple(shares))
