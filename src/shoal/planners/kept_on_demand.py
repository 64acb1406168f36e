"""Which storages stay in a plan that recomputes everything else on demand: those with which the peak is low.

No rule is best for every step. What is much smaller than its way should stay; but much of it at once is a lot, and
where batch norms join slices of a batch, one joined tensor is small compared with all slices together, not with each
of them. So sets by several rules are tried, and a schedule says what each takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.step import StepGraph
from shoal.planners.recompute_choice import RecomputeChoice


def kept_sets(choice: RecomputeChoice, narrow_share: float, way_shares: Sequence[float]) -> list[frozenset[int]]:
    """Sets of storages that may stay, each once.

    Args:
        choice: of the step.
        narrow_share: how large a storage may be as a share of the largest on the way to it, for `narrow`.
        way_shares: the same of all that is in use on the way, for `beside_their_way`.
    """
    sets = [narrow(choice, narrow_share), choice.kept_for(())]
    return list(dict.fromkeys([*sets, *(beside_their_way(choice, share) for share in way_shares)]))


def narrow(choice: RecomputeChoice, share: float) -> frozenset[int]:
    """What must stay, and what is much smaller than what its recomputation makes on the way: a pooling's result, say.

    Args:
        choice: of the step.
        share: how large it may be, as a share of the largest storage on the way.
    """
    ops, storages = choice.graph.ops, choice.graph.storages

    def widest_bytes(storage: int) -> int:
        return max(storages[made].nbytes for op in choice.reruns[storage] for made in ops[op].second.writes)

    return choice.kept_for([s for s in choice.candidates if storages[s].nbytes <= share * widest_bytes(s)])


def beside_their_way(choice: RecomputeChoice, share: float) -> frozenset[int]:
    """What must stay, and in the order of the step each storage that is small compared with what its recomputation has
    in use.

    Args:
        choice: of the step.
        share: how large it may be, as a share of the most bytes in use on the way from what stays.
    """
    graph = choice.graph
    kept = set(choice.kept_for(()))
    found = []
    for storage in sorted(choice.candidates, key=graph.producer.__getitem__):
        if graph.storages[storage].nbytes <= share * _way_bytes(graph, storage, kept):
            kept.add(storage)
            found.append(storage)
    return choice.kept_for(found)


def _way_bytes(graph: StepGraph, storage: int, kept: set[int]) -> int:
    """The most bytes in use while a storage is recomputed from what stays."""
    ops, storages = graph.ops, graph.storages
    again: set[int] = set()
    pending = [graph.producer[storage]]
    while pending:
        number = pending.pop()
        if number not in again:
            again.add(number)
            pending += [graph.producer[s] for s in ops[number].second.reads if s in graph.producer and s not in kept]
    in_order = sorted(again)
    last = {s: number for number in in_order for s in ops[number].second.reads}
    made: set[int] = set()
    in_use = highest = 0
    for number in in_order:
        op = ops[number].second
        new = {s for s in op.writes if s in last or s == storage}
        made |= new
        in_use += sum(storages[s].nbytes for s in new)
        highest = max(highest, in_use + op.workspace_bytes)
        gone = {s for s in op.reads if s in made and last[s] == number and s != storage}
        made -= gone
        in_use -= sum(storages[s].nbytes for s in gone)
    return highest
