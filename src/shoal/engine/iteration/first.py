"""How a graph runs in the first iteration, before what follows it is known: everything kept, or the minimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from shoal.core.over_budget import over_budget
from shoal.core.plan import Plan
from shoal.core.residence import Keep, Residence
from shoal.core.simulate import simulate
from shoal.core.step import Op, StepGraph, StorageKind
from shoal.cost.measure import measure
from shoal.engine.calls import Calls
from shoal.engine.generator_states import counting_states, repeated
from shoal.engine.loop_memory import most_waiting_bytes, waiting_bytes
from shoal.errors import BudgetError, CaptureError
from shoal.kernels.generator import state_bytes
from shoal.planners.joint import joint
from shoal.planners.limits import DEFAULT
from shoal.planners.smallest_plan import smallest_plan

_ROOMY = 0.5  # of the budget: so much may be in use before the whole iteration is known, and everything be kept
_GIVEN = "given"  # the op that makes what a graph is given
_ROUNDS = 4  # of bisection, for what a graph is to leave to later ones


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
    if graph.link is None or not any(op.recomputable for op in graph.ops):
        return _little_share(graph, device, in_use_bytes, budget_bytes, who)
    try:  # to take memory of the host takes long, and the plan may not need it
        return _little_share(replace(graph, link=None), device, in_use_bytes, budget_bytes, who)
    except BudgetError:
        return _little_share(graph, device, in_use_bytes, budget_bytes, who)


def _little_share(
    graph: StepGraph, device: torch.device, in_use_bytes: int, budget_bytes: int, who: str
) -> Mapping[str, Residence]:
    least = minimum_share(graph, device)
    graph = _with_loss(graph, 0)  # what comes between the passes of a graph is not known yet
    limits, hardware = replace(DEFAULT, order=False), measure(device)
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


def minimum_share(graph: StepGraph, device: torch.device) -> Mapping[str, Residence]:
    """Under which residences a graph leaves later ones most room while they run.

    What it is given counts as made by it: to recompute a result from an input that nobody else keeps, as a ReLU's whose
    result the next layer saves in any case, would keep both.
    """
    everything_bytes = 4 * sum(s.nbytes for s in graph.storages)
    graph = _with_loss(graph, everything_bytes)
    given = [s.id for s in graph.storages if s.kind == "input"]
    storages = tuple(replace(s, kind="crossing") if s.kind == "input" else s for s in graph.storages)
    first = Op(0, _GIVEN, _GIVEN, "forward", "", (), tuple(given), recomputable=False)
    ops = (first, *(replace(op, id=op.id + 1) for op in graph.ops))
    graph = replace(graph, ops=ops, storages=storages)
    share = smallest_plan(graph, measure(device), 1, replace(DEFAULT, order=False)).residences
    names = {storages[s].name for s in given}
    return {name: residence for name, residence in share.items() if name not in names}


def least_bytes(graph: StepGraph, device: torch.device, in_use_bytes: int) -> int:
    """The smallest budget in which a graph runs before its iteration is planned, in addition to what is in use then."""
    return _peak_bytes(_with_loss(graph, 0), minimum_share(graph, device), device, in_use_bytes)


def in_first_run(graph: StepGraph, in_use_bytes: int) -> StepGraph:
    """The step of a graph before its iteration is known, in addition to what is in use then."""
    graph = _with_loss(graph, 0)
    return replace(graph, static_bytes=max(0, in_use_bytes - graph.resident_bytes))


def waits_bytes(graph: StepGraph, residences: Mapping[str, Residence]) -> int:
    """What is in use between the two passes of a graph, other than results that only later graphs read."""
    moments = simulate(_with_loss(graph, 0), residences).moments
    kept = {s for s in graph.saved if isinstance(residences.get(graph.storages[s].name, Keep()), Keep)}
    handed_on_bytes = sum(s.nbytes for s in graph.storages if s.kind == "output" and s.id not in kept)
    return next(moment.total_bytes for moment in moments if moment.phase == "loss") - handed_on_bytes


def _peak_bytes(graph: StepGraph, residences: Mapping[str, Residence], device: torch.device, in_use_bytes: int) -> int:
    states_bytes = repeated(graph, residences) * state_bytes(device)
    return in_use_bytes + states_bytes + simulate(graph, residences).peak_bytes - graph.resident_bytes


def _with_loss(graph: StepGraph, workspace_bytes: int) -> StepGraph:
    """While later graphs run, what this one saved waits: it is to leave them that many bytes.

    Autograd frees its results, and their gradients, with the last that reads them.
    """
    ops = (replace(op, workspace_bytes=workspace_bytes) if op.phase == "loss" else op for op in graph.ops)
    kinds: dict[StorageKind, StorageKind] = {"tangent": "activation_gradient", "output": "crossing"}
    storages = (replace(s, kind=kinds.get(s.kind, s.kind)) for s in graph.storages)
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


class CallsBefore(NamedTuple):
    """Calls that are under way, of a model that was one graph up to here.

    Attributes:
        calls: of the model.
        plans: that they may run by.
        n_calls: the number that waits. last: the number of the last of them.
    """

    calls: Calls
    plans: tuple[Plan, ...]
    n_calls: int
    last: int

    @property
    def waits_bytes(self) -> int:
        """What they hold until their backward passes."""
        return self.n_calls * max(map(waiting_bytes, self.plans), default=0)

    @property
    def most_bytes(self) -> int:
        """The same at most, under a larger budget."""
        return self.n_calls * max(map(most_waiting_bytes, self.plans), default=0)

    @property
    def host_bytes(self) -> int:
        """What they offload."""
        return self.n_calls * max((plan.host_bytes for plan in self.plans), default=0)

    def least_bytes(self, device: torch.device) -> int:
        """The same with the minimum kept, as when all calls are planned together."""
        least = (waiting_bytes(replace(plan, residences=minimum_share(plan.graph, device))) for plan in self.plans)
        return self.n_calls * max(least, default=0)


def no_graph(name: str, broken: str, *, is_sharded: bool) -> CaptureError:
    """The refusal of a model of which nothing that trains can be captured.

    Args:
        name: the model's.
        broken: where Dynamo could not go on, and why.
        is_sharded: whether its parameters are.
    """
    if "sparse Tensor" in broken:  # so Dynamo words it
        return CaptureError(
            f"{name or 'the model'} reads a sparse tensor in compiled code; read it in a method with "
            "@torch.compiler.disable, or use budget=None",
            details={"graph break": broken},
        )
    way_out = f"it breaks at {broken}; take that line out of the model"
    if is_sharded:
        way_out = (
            "fully_shard is applied to single layers of torch.nn; apply it to modules with a forward of their own, "
            "such as a block of layers"
        )
    return CaptureError(
        f"no graph of {name or 'the model'} that trains can be captured, so no step can be planned: {way_out}, "
        "or give budget=None"
    )
