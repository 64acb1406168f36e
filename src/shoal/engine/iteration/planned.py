"""The iterations of a sequence of graphs that have run, and their plans.

In its first run each graph keeps everything while there is ample room, else the minimum; what was measured then is
planned as one step. A plan that is exceeded is made again.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from shoal.capture.layered import Refused
from shoal.core.joined_step import Interval, label, op_names_of, share_of
from shoal.core.over_budget import over_budget
from shoal.core.progress import doing, preparing
from shoal.core.residence import Residence
from shoal.core.shares import Share
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.validate_plan import check_plan, check_step
from shoal.core.variant import WHOLE
from shoal.engine import memory_warnings
from shoal.engine.backend import STEPS_TO_METER
from shoal.engine.iteration.first import CallsBefore, first_share, least_bytes, minimum_share
from shoal.engine.iteration.graphs import DynamoGraph, GraphSequence, Node
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
from shoal.engine.iteration.variants import IterationVariants, first_variant, plan_best_variant
from shoal.engine.metering import Metering
from shoal.engine.plan_kernels import check_kernels
from shoal.engine.refusal_hints import with_reserve
from shoal.engine.repair import aside_when_over
from shoal.engine.search.without_effect import A_MODEL, SEVERAL_MODELS
from shoal.engine.session import Session
from shoal.errors import BudgetError, PlanError
from shoal.memory.storage_bytes import distinct_bytes

log = logging.getLogger("shoal")

# Budgets: a first iteration that needs more at one of its graphs is refused there. It takes no more than twice what was
# given to find what to name, and where that is not enough, what is named at least doubles.
_MOST_OVER = 2.0


class PlannedGraphs(GraphSequence):
    """Graphs whose iterations are planned once they have run.

    Args:
        session: of all models.
        device: where they run.
        models: by name, as somebody else holds them: Dynamo keeps this object for good.
        shared: whether they share a `shoal.Budget`: then everything that is allocated counts, and a call cannot begin
            again, for others have run before it.
        broken: where Dynamo could not go on when the model was to be one graph, and why.
        before: calls that are under way, of a model that was one graph up to here.

    Attributes:
        models: those that are alive, by name.
        known: the iterations that have run, by their graphs.
        metering: measures them.
    """

    metering: Metering

    def __init__(
        self,
        session: Session,
        device: torch.device,
        models: Mapping[str, nn.Module],
        *,
        shared: bool,
        broken: str,
        before: CallsBefore | None,
    ) -> None:
        super().__init__(session)
        self.models = models
        self.known: dict[tuple[Node, ...], KnownIteration] = {}
        self._device, self._shared = device, shared
        self._broken = broken
        self._whose: dict[Node, str] = {}
        self._calling = ""
        self._unknown: set[Node] = set()  # iterations that begin with these have to be metered
        self._stay_as_measured = False  # the graphs: no variant of an iteration is looked for
        self._is_not_as_planned = False  # a graph, when it was compiled in the variant that was chosen
        self._said: set[str] = set()
        self._used: set[str] = set()  # models whose optimizer has stepped since their last backward pass
        self._keeps_little = shared or before is not None
        self._before = before  # until the first of these iterations has ended
        self._buffer_bytes: dict[str, int] | None = None  # before the iteration; None: no copies of buffers are kept
        self._is_repaired = False  # a plan was over the budget, and the next is not made yet
        self._refused: BudgetError | None = None
        self._over: BudgetError | None = None  # why the iteration that goes on does not fit
        self._given = session.ready_plan
        if self._given is not None:
            check_step(self._given.graph)
            check_plan(self._given.graph, self._given.residences, session.status.budget_bytes or 0)
            check_kernels(self._given, device.type)

    @abstractmethod
    def forget(self) -> None:
        """Capture and plan again from the next call on."""

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
        self.session.status.put(tuple(plan for known in self.known.values() for plan in known.learn_errors()))

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
        if new and self._is_repaired:
            status.measured_peak_bytes = None  # that is of the plan before
            self._is_repaired = False
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
        known.learnt_bytes += aside_when_over(known.name, iteration.peak_bytes, known.predicted_bytes, budget_bytes)
        known.planned = None
        known.to_meter = max(1, known.to_meter)
        status.repairs += 1
        self._is_repaired = True

    def _state_to_come_bytes(self) -> int:
        static = self.session.static
        return max(0, static.state_bytes() - static.state_there_bytes())

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

    def _say(self, text: str, key: str = "") -> None:
        """Warn once."""
        if (key or text) not in self._said:
            self._said.add(key or text)
            log.warning("%s", text)


def _without_frames(error: BudgetError) -> BudgetError:
    """The error without tracebacks, whose frames hold what the forward pass has made."""
    error.__context__ = None
    return error.with_traceback(None)
