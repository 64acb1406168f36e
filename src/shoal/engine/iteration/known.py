"""An iteration that has run: how it was measured, what it is planned for, and its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.core.joined_step import joined_step, label
from shoal.core.over_budget import over_budget
from shoal.core.plan import Plan
from shoal.core.shares import Share
from shoal.core.sizes import format_bytes
from shoal.engine.compile_options import CompileOptions
from shoal.engine.iteration.first import first_share, least_bytes, waits_bytes
from shoal.engine.iteration.graphs import Node, described
from shoal.engine.iteration.plan import (
    Choose,
    MeasuredIteration,
    PlannedIteration,
    Surroundings,
    moment_before,
    plan_iteration,
)
from shoal.engine.search.without_effect import in_several_graphs
from shoal.errors import BudgetError
from shoal.memory.static_memory import StaticMemory
from shoal.memory.storage_bytes import WeakStorage

FIRST_RUN = {
    "needed by": "the first iteration, before what follows each graph is known",
    "searched": "no; a smaller budget may do",
}
_ROUNDS = 4  # of looking for a budget in which a first iteration runs


def first_run_bytes(nodes: Sequence[Node], peak_bytes: int, beside_bytes: int = 0, later_bytes: int = 0) -> int:
    """A budget in which an iteration runs before it is planned.

    A graph that does not fit with the minimum, as far as can be told before what follows it is known, keeps more to
    need less itself: what it keeps more counts. With a budget in which each of them is expected to fit, all run again
    as they did, unless one ran in another variant: in a larger budget it runs unmodified if it fits so, and keeps more.

    Args:
        nodes: its graphs, as they ran with the minimum.
        peak_bytes: what was measured then.
        beside_bytes: in use throughout, in addition to what was.
        later_bytes: a budget in which later iterations run.
    """
    peak_bytes += beside_bytes
    needed_bytes = max(peak_bytes, later_bytes)
    trained = [(node, node.step) for node in nodes if node.step is not None and node.step.trains]
    unmodified = {node: node.part.too_large for node, _ in trained if node.part and node.part.too_large}
    expected = (least_bytes(step.graph, step.device, node.in_use_bytes + beside_bytes) for node, step in trained)
    enough_bytes = max(peak_bytes, *expected) if trained else peak_bytes
    for _ in range(_ROUNDS + len(unmodified)):
        more_bytes = 0
        for node, step in trained:
            in_use_bytes = node.in_use_bytes + beside_bytes + more_bytes
            own = step.share.alone(step.graph)
            for graph in (unmodified[node], step.graph) if node in unmodified else (step.graph,):
                try:
                    share = first_share(graph, step.device, in_use_bytes, needed_bytes, keeps_little=True)
                except BudgetError:
                    continue  # it runs in its variant; with the minimum, as it did
                more_bytes += waits_bytes(graph, share) - waits_bytes(own.in_order(step.graph), own.residences)
                break
        if peak_bytes + more_bytes <= needed_bytes:
            break
        needed_bytes = peak_bytes + more_bytes
    return needed_bytes if unmodified else min(needed_bytes, enough_bytes)


@dataclass(eq=False)
class KnownIteration:
    """An iteration that has run.

    Attributes:
        nodes: its parts.
        models: whose each part is.
        measured: as it ran first; None where its parts cannot be planned together.
        begin_bytes: in use when it began, in that run.
        grown_bytes: how much more is in use when it begins now. held_bytes: of that, what it lets go.
        planned_bytes: the same two, as its plan counts them.
        stayed: models whose old gradients stay while it runs.
        planned: its plans, once it has begun a second time.
        learnt_bytes: set aside because a planned one took more than was predicted.
        peak_bytes: the highest that was measured.
        first_bytes: that of its first run, if that was with the minimum; 0 if not.
        to_meter: how many more are metered.
        results: of its last run.
        has_run_planned: whether its last run was under the plan.
        broken: where its model breaks into graphs, as far as that is known.
        as_it_ran: whether its parts keep what they kept, for they cannot be planned as one.
        refused: why it cannot be planned, and what it was to be planned for.
    """

    nodes: tuple[Node, ...]
    models: tuple[str, ...]
    measured: MeasuredIteration | None
    begin_bytes: int
    grown_bytes: int = 0
    held_bytes: int = 0
    planned_bytes: tuple[int, int] = (0, 0)
    stayed: set[str] = field(default_factory=set)
    planned: PlannedIteration | None = None
    learnt_bytes: int = 0
    peak_bytes: int = 0
    first_bytes: int = 0
    to_meter: int = 1
    results: list[WeakStorage] = field(default_factory=list)
    broken: str = ""
    has_run_planned: bool = False
    as_it_ran: bool = False
    refused: tuple[BudgetError, tuple[int, int]] | None = None

    @property
    def name(self) -> str:
        """The models whose graphs run, in order."""
        return " and ".join(dict.fromkeys(self.models))

    @property
    def predicted_bytes(self) -> int:
        """Its predicted peak with what is in use now; as measured where it is not planned."""
        if self.planned is None:
            return self.peak_bytes + self.grown_bytes
        return self.planned.predicted_peak_bytes + max(0, self.grown_bytes - self.planned_bytes[0])

    def has_to_be_planned(self, budget_bytes: int | None) -> bool:
        """Whether it cannot run as its graphs are."""
        if self.planned is None:
            return not self.as_it_ran
        return budget_bytes is not None and self.predicted_bytes > budget_bytes

    def learn_errors(self) -> tuple[Plan, ...]:
        """Its plans, with the errors that its graphs have measured once they all have."""
        if self.planned is None:
            return ()

        def known(plan: Plan, runs: Sequence[int]) -> Plan:
            steps = ((label(place), self.nodes[run].step) for place, run in enumerate(runs))
            errors = {own + name: e for own, step in steps if step is not None for name, e in step.errors.items()}
            if not plan.encoded or any(storage.name not in errors for storage in plan.encoded):
                return plan
            return replace(plan, errors={s.name: errors[s.name] for s in plan.encoded}, errors_measured=True)

        self.planned = replace(self.planned, plans=tuple(map(known, self.planned.plans, self.planned.runs)))
        return self.planned.plans

    def eager_takes_more(self, place: int, used_bytes: int) -> int:
        """Memory ran out before a pass of it, by its place: how much more the eager code there takes than was
        measured, which is noted. 0 where it does not, or is within a step inside of another.

        Args:
            place: among the passes.
            used_bytes: what it would have taken to go on.
        """
        measured, planned = self.measured, self.planned
        if measured is None or planned is None or len(planned.plans) != 1 or place >= len(measured.passes):
            return 0
        plan = planned.plans[0]
        planned_bytes = moment_before(plan.graph, plan.residences, measured.passes, place).total_bytes
        more_bytes = max(0, used_bytes + self.learnt_bytes - planned_bytes)
        self.measured = measured.with_more_before(place, more_bytes)
        return more_bytes

    def plan(
        self,
        options: CompileOptions,
        static: StaticMemory,
        what: str,
        decided: Mapping[Node, Share],
        *,
        fixed: bool,
        apart: bool,
        choose: Choose | None = None,
    ) -> PlannedIteration | None:
        """Plan it for what is in use now.

        Args:
            options: what the plans are to be.
            static: of the models.
            what: as of `in_several_graphs`.
            decided: shares that some of its graphs have in the plan of another iteration.
            fixed: whether the graphs keep the shares under which they were measured.
            apart, choose: as of `plan_iteration`.

        Returns:
            The plans; None where it cannot be planned as one.

        Raises:
            BudgetError: no plan fits.
        """
        measured = self.measured
        if measured is None:
            return None
        to_come_bytes = max(0, static.state_bytes() - static.state_there_bytes())
        now = self.grown_bytes + self.learnt_bytes + to_come_bytes, self.held_bytes
        around = Surroundings(options, *now)
        if measured.begin_bytes is None:
            whole = joined_step("", measured.parts, measured.passes)
            around = Surroundings(options, self.learnt_bytes, persistent_bytes=static.bytes_beside(whole))
        if self.refused is not None and self.refused[1] == now:
            raise self.refused[0].with_traceback(None)
        back = {run for run, phase in measured.passes if phase == "backward"}  # what others keep nothing for
        taken = {run: decided[node] for run, node in enumerate(self.nodes) if node in decided and run in back}
        shares = tuple(taken.get(run, share) for run, share in enumerate(measured.shares))
        try:
            planned = plan_iteration(
                measured, around, self.models, fixed=fixed or bool(taken), shares=shares, apart=apart, choose=choose
            )
        except BudgetError as error:
            if taken:
                raise
            self.refused = self.with_first_run(error), now
            raise self.refused[0] from None
        self.refused, self.planned_bytes = None, (self.grown_bytes, self.held_bytes)
        if planned is None:
            return None
        made = zip(planned.plans, planned.runs, strict=True)

        def is_chosen(runs: Sequence[int]) -> bool:
            return bool(planned.variants) and any(planned.variants[run] is not None for run in runs)

        graphs = dict.fromkeys(node.part for node in self.nodes if node.part is not None)
        lines = in_several_graphs(
            (graph.variants for graph in graphs),
            options,
            what,
            leaves=any(part.graph.link is not None for part in measured.parts),
            may_vary=bool(planned.variants),
        )
        plans = tuple(
            described(plan, [self.nodes[run] for run in runs], lines, self.broken, is_chosen=is_chosen(runs))
            for plan, runs in made
        )
        return replace(planned, plans=plans)

    def with_first_run(self, error: BudgetError) -> BudgetError:
        """The error with a minimum in which the iteration also runs before it is planned."""
        steps = [(node.step, node.in_use_bytes) for node in self.nodes if node.step is not None]
        beside_bytes = max(0, self.grown_bytes - self.held_bytes) + self.learnt_bytes
        if self.first_bytes:
            later_bytes = error.least_feasible_bytes or 0
            first_bytes = first_run_bytes(self.nodes, self.first_bytes, beside_bytes, later_bytes)
        else:
            first_bytes = max(least_bytes(step.graph, step.device, own + beside_bytes) for step, own in steps)
        if error.least_feasible_bytes is None or first_bytes <= error.least_feasible_bytes:
            return error
        later = format_bytes(error.least_feasible_bytes)
        return over_budget(
            self.name,
            first_bytes,
            error.budget_bytes,
            details={**error.details, "minimum of later iterations": later, **FIRST_RUN},
            persistent_bytes=error.persistent_bytes,
            op=error.op,
            phase=error.phase,
            layer=error.layer,
            workspace_bytes=error.workspace_bytes,
            largest=error.largest,
        )
