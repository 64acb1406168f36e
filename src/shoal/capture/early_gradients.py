"""Gradients that leave the backward graph where they are final, not with all others at its end.

`DistributedDataParallel` sends a bucket as soon as its gradients are there, and an optimizer that steps in a hook of
its parameter frees the gradient at once. For both, the step gets ops that hand gradients over between its other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import fx

from shoal.core.step import Op, StepGraph

HAND_OVER = "hand_over"
HAND_OVER_TO_HOOK = "hand_over_to_hook"
_MOST_GROUPS = 32  # each costs some microseconds a step; a bucket waits for 1/32 of all gradients at most


class Fate(NamedTuple):
    """What becomes of a gradient that is handed over.

    Attributes:
        then: it stays, is freed at once, or a hook decides that.
        hook_bytes: what the hook allocates and frees again.
    """

    then: Literal["stays", "freed", "hook"]
    hook_bytes: int = 0


def hand_over(places: tuple[int, ...], gradients: list[Any]) -> list[Any]:
    """Stands in the backward graph where gradients leave; whoever runs the graph takes the list there.

    Args:
        places: among the outputs of the backward graph, where these gradients would be.
        gradients: what leaves.
    """
    return list(gradients)


def handed_over(graph: fx.Graph) -> tuple[tuple[int, ...], ...]:
    """The places of the gradients that a graph hands over, group by group, in order."""
    return tuple(node.args[0] for node in graph.nodes if node.target is hand_over)


def gradient_order(joint: fx.Graph, gradients: Sequence[Any]) -> list[int]:
    """The places of all gradients in the order in which eager PyTorch finds them, which is that of the trace."""
    traced = {node: number for number, node in enumerate(joint.nodes)}
    there = [place for place, node in enumerate(gradients) if isinstance(node, fx.Node)]
    return sorted(there, key=lambda place: traced[gradients[place]])


def with_early_gradients(
    step: StepGraph,
    order: Sequence[int],
    leaves: Sequence[fx.Node],
    gradients: Sequence[Any],
    storage_of: Mapping[fx.Node, int],
    early: Mapping[int, Fate],
    copied_bytes: Callable[[int], int],
) -> tuple[StepGraph, frozenset[int]]:
    """The step with an op after each group of gradients that are final there; what is final last leaves at the end.

    A gradient is final when nothing reads its parameter any more: an optimizer may change that at once. One that
    something else reads, or that is no result of an op of its own, stays with the others.

    Args:
        step: the step.
        order: places of all gradients in the order in which eager PyTorch finds them.
        leaves: nodes of all inputs, tangents left out.
        gradients: nodes of their gradients, in the same order; None for none.
        storage_of: node → storage id.
        early: place of a gradient → its fate, for those that may leave.
        copied_bytes: place of a gradient → what autograd allocates to copy it.

    Returns:
        The step, and the places of the gradients that leave early.
    """
    places: dict[int, list[int]] = {}
    for place in order:
        if gradients[place] in storage_of:
            places.setdefault(storage_of[gradients[place]], []).append(place)
    final = {
        storage: max((step.producer[storage], *(op for place in its for op in step.readers[storage_of[leaves[place]]])))
        for storage, its in places.items()
        if step.storages[storage].kind == "gradient" and not step.readers[storage] and early.keys() >= set(its)
    }
    groups = _groups(final, {s: step.storages[s].nbytes for s in final})[:-1]
    behind: dict[int, list[Op]] = {}
    freed: set[int] = set()
    for number, group in enumerate(groups):
        its = [place for storage in group for place in places[storage]]
        to_hook = any(early[place].then == "hook" for place in its)
        op = Op(
            0,
            f"{HAND_OVER}_{number}",
            HAND_OVER_TO_HOOK if to_hook else HAND_OVER,
            "backward",
            "",
            tuple(group),
            (),
            workspace_bytes=max(max(copied_bytes(place), early[place].hook_bytes) for place in its),
        )
        behind.setdefault(max(final[s] for s in group), []).append(op)
        freed |= {s for s in group if all(early[place].then == "freed" for place in places[s])}
    ops = [one for op in step.ops for one in (op, *behind.get(op.id, ()))]
    storages = (replace(s, kind="activation_gradient") if s.id in freed else s for s in step.storages)
    changed = replace(step, ops=tuple(replace(op, id=place) for place, op in enumerate(ops)), storages=tuple(storages))
    return changed, frozenset(place for group in groups for storage in group for place in places[storage])


def _groups(storages: Iterable[int], nbytes: Mapping[int, int]) -> list[list[int]]:
    """Storages in order, in groups of about the same bytes."""
    least_bytes = sum(nbytes.values()) / _MOST_GROUPS
    groups: list[list[int]] = []
    open_bytes = least_bytes
    for storage in storages:
        if open_bytes >= least_bytes:
            groups.append([])
            open_bytes = 0
        groups[-1].append(storage)
        open_bytes += nbytes[storage]
    return groups
