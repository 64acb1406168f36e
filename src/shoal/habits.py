"""What the training loop around a model does with memory, learnt from its metered steps, and a step as it is under that.

Data, and a function over data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shoal.plan import Plan
from shoal.step import Op, StepGraph, Storage

HELD_OVER = "held_over"


@dataclass(frozen=True)
class Habits:
    """What is known of the loop.

    Attributes:
        learnt: whether a step has been metered; before that, all is taken for the worst.
        calls_at_once: how many calls come before a backward pass.
        held_over_bytes: what is in use from the step before until the loss is known: its outputs, as long as the loop's
            names still hold them, and its gradients, where they are dropped after the forward pass.
        drops_late: whether gradients that the optimizer has used are dropped after the next forward pass, not kept.
        released: places, among the forward graph's outputs, of those that nobody holds when the backward pass begins.
        loss_share: scratch of the loss, as a multiple of the outputs' gradients. 2 is log-softmax and its gradient.
    """

    learnt: bool = False
    calls_at_once: int = 1
    held_over_bytes: int = 0
    drops_late: bool = True
    released: frozenset[int] = frozenset()
    loss_share: float = 2.0


@dataclass(frozen=True)
class Basis:
    """The step that a plan was made for, by itself.

    Attributes:
        graph, exact_graph: as of `Plan`, with costs.
        outputs: names of the storages that are outputs, by their places.
        others_bytes: of other calls of the model, in use while one runs.
        fingerprint: of the step as it was captured.
    """

    graph: StepGraph
    exact_graph: StepGraph | None
    outputs: Mapping[int, str]
    others_bytes: int
    fingerprint: str

    def of(self, plan: Plan, habits: Habits) -> Plan:
        """The plan's residences in a loop with these habits."""

        def now(graph: StepGraph) -> StepGraph:
            graph = under_habits(graph, habits, self.outputs)
            return replace(graph, standing_bytes=graph.standing_bytes + self.others_bytes)

        return replace(plan, graph=now(self.graph), exact_graph=self.exact_graph and now(self.exact_graph))

    def with_standing(self, more_bytes: int) -> Basis:
        """With so many bytes more in use all step."""

        def more(graph: StepGraph) -> StepGraph:
            return replace(graph, standing_bytes=graph.standing_bytes + more_bytes)

        return replace(self, graph=more(self.graph), exact_graph=self.exact_graph and more(self.exact_graph))


def hopeful(habits: Habits, places: Collection[int]) -> Habits:
    """As much as the loop may turn out to save: it drops every output when the loss is known, as
    `F.cross_entropy(model(x), y).backward()` does, and the loss takes no more than those outputs and their gradients."""
    return replace(habits, released=frozenset(places), loss_share=0.0)


def under_habits(graph: StepGraph, habits: Habits, outputs: Mapping[int, str]) -> StepGraph:
    """The step as it is in such a loop.

    Args:
        graph: the step by itself.
        habits: what the loop does.
        outputs: names of the storages that are outputs, by their places.
    """
    released = {outputs[place] for place in habits.released if place in outputs}
    saved = {graph.storages[storage].name for storage in graph.saved}
    storages = [
        replace(s, kind="activation") if s.kind == "output" and s.name in released - saved else s
        for s in graph.storages
    ]
    tangent_bytes = sum(s.nbytes for s in storages if s.kind == "tangent")
    scratch_bytes = math.ceil(habits.loss_share * tangent_bytes)
    ops = [replace(op, workspace_bytes=scratch_bytes) if op.phase == "loss" else op for op in graph.ops]
    if habits.held_over_bytes:
        ops, storages = _with_held_over(ops, storages, habits.held_over_bytes)
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


def _with_held_over(ops: list[Op], storages: list[Storage], nbytes: int) -> tuple[list[Op], list[Storage]]:
    """An op before all others "writes" what is held over, and the loss is the last to read it."""
    held = Storage(len(storages), HELD_OVER, nbytes, "activation", "", (nbytes,), "uint8", (HELD_OVER,))
    first = Op(0, HELD_OVER, HELD_OVER, "forward", "", (), (held.id,), recomputable=False)
    later = [
        replace(op, id=op.id + 1, reads=(*op.reads, held.id) if op.phase == "loss" else op.reads) for op in ops
    ]
    return [first, *later], [*storages, held]
