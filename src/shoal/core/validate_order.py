"""Whether a step may run in another order than it was captured in. Shares no code with what chooses an order."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from shoal.core.step import Op, StepGraph
from shoal.errors import PlanError


def check_order(captured: StepGraph, ordered: StepGraph) -> None:
    """Hold the order of a step's ops against the step as it was captured.

    Args:
        captured: the step as it was captured.
        ordered: the same step in the order in which its ops are to run.

    Raises:
        PlanError: the ops or storages are others; a pass begins before the one before it has ended; an op runs before
            one whose result it reads; two ops that draw random numbers, communicate or write nothing have changed
            places; an op runs before another op that stands for what happens outside the graphs, such as eager code
            between them, and ran after it, or the other way round; the last op of the forward pass has moved.
    """
    before = {op.name: op for op in captured.ops}
    for place, op in enumerate(ordered.ops):
        if op.id != place or op.name not in before or replace(op, id=before[op.name].id) != before[op.name]:
            raise PlanError(f"the order of ops names {op.name!r}, which is not as it was captured; plan it again")
    if len({op.name for op in ordered.ops}) != len(captured.ops) or len(ordered.ops) != len(captured.ops):
        raise PlanError(f"the order has {len(ordered.ops)} ops for {len(captured.ops)}; expected each of them once")
    if ordered.storages != captured.storages:
        raise PlanError("the step in its new order has other storages than as it was captured; plan this step again")
    if [op.phase for op in ordered.ops] != [op.phase for op in captured.ops]:
        raise PlanError("the order mixes ops of the forward pass, the loss and the backward pass; expected one by one")

    there = {s.id for s in captured.storages} - {s for op in captured.ops for s in op.writes}
    for op in ordered.ops:
        for storage in op.reads:
            if storage not in there:
                name = captured.storages[storage].name
                raise PlanError(f"the order runs {op.name!r} before the op that writes {name!r}, which it reads")
        there.update(op.writes)

    for one, other in zip(filter(_acts, captured.ops), filter(_acts, ordered.ops), strict=True):
        if one.name != other.name:
            raise PlanError(
                f"the order runs {other.name!r} before {one.name!r}; both draw random numbers, communicate or write "
                "nothing, and must run as they were captured"
            )
    stretch_of, stretches = _stretches(captured), _stretches(ordered)
    for op in ordered.ops:
        last = op.phase == "forward" and op.id + 1 == captured.n_forward
        if stretches[op.name] != stretch_of[op.name] or (last and op.name != captured.ops[op.id].name):
            raise PlanError(
                f"the order has {op.name!r} in the place of {captured.ops[op.id].name!r}; no op may cross eager code "
                "or what a loop holds, and the last forward op stays"
            )


def _stretches(graph: StepGraph) -> dict[str, int]:
    """Op name → which stretch it belongs to, of those that ops that stand for what happens outside begin."""
    return dict(zip((op.name for op in graph.ops), accumulate(op.is_outside for op in graph.ops), strict=True))


def _acts(op: Op) -> bool:
    """Whether an op does more than write its results."""
    return op.random or not op.writes or "c10d" in op.target
