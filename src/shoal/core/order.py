"""The order in which a step's ops run, where it is another than the one in which they were captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from shoal.core.step import Op, StepGraph
from shoal.errors import PlanError, brief


def op_names(graph: StepGraph) -> tuple[str, ...]:
    """The names of a step's ops in the order in which they run."""
    return tuple(op.name for op in graph.ops)


def reordered(graph: StepGraph, names: Sequence[str]) -> StepGraph:
    """The same step with its ops in another order. Storages keep their ids; `check_order` says whether it can run.

    Args:
        graph: the step.
        names: of all its ops, in the order in which they are to run.

    Raises:
        PlanError: these are not the names of its ops, each once.
    """
    op_called = graph.op_called
    if len(names) != len(graph.ops) or op_called.keys() != set(names):
        odd = next(iter({*names}.symmetric_difference(op_called)), None) or Counter(names).most_common(1)[0][0]
        raise PlanError(
            f"the order of ops has {len(names)} names for {len(graph.ops)} ops, and they differ at {brief(odd)}; "
            "expected each op once; plan this step again"
        )
    return replace(graph, ops=tuple(replace(op_called[name], id=place) for place, name in enumerate(names)))


def in_order_of(graph: StepGraph, names: Sequence[str]) -> StepGraph:
    """The step with its ops in the order that they have in another step.

    What the other step lacks stands for memory that a training loop holds: it stays first in the forward pass and last
    in the backward pass.

    Args:
        graph: the step.
        names: of the ops of the other step, in order.
    """
    place = {name: number for number, name in enumerate(names)}

    def key(op: Op) -> tuple[int, int]:
        passes = ("forward", "loss", "backward").index(op.phase)
        return passes, place.get(op.name, -1 if op.phase == "forward" else len(names))

    return reordered(graph, [op.name for op in sorted(graph.ops, key=key)])
