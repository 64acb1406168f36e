"""From a set of storages to keep, the residences that recompute everything else as late as the backward pass allows."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.core.residence import Keep, Recompute, Residence
from shoal.core.step import StepGraph


def just_in_time(
    graph: StepGraph, kept: Collection[int], again: Mapping[int, Collection[int]] | None = None
) -> dict[str, Residence]:
    """Recompute each given-up storage right before the first backward op that needs it.

    It is needed by a backward op that reads it, and by the recomputation of another storage. Once back it stays until
    its last reader, whoever that is, unless `again` asks for another recomputation.

    Args:
        graph: the step.
        kept: ids of storages that stay from the forward pass on. Storages whose producer must not run twice, and those
            that the caller holds, are kept whether named or not.
        again: storage id → ids of backward ops before which it is computed once more if the op needs it: what it
            occupied since the reader before that is free in between.
    """
    again = again or {}
    given_up = graph.can_be_recomputed.difference(kept)
    before: dict[int, list[str]] = {}
    for op in graph.ops[graph.n_forward :]:
        wanted = [s for s in op.reads if s in given_up]
        visited: set[int] = set()
        while wanted:
            storage = wanted.pop()
            if storage in visited:
                continue
            visited.add(storage)
            if storage in before and op.id not in again.get(storage, ()):
                continue
            before.setdefault(storage, []).append(op.name)
            wanted.extend(s for s in graph.ops[graph.producer[storage]].second.reads if s in given_up)
    residences: dict[str, Residence] = {}
    saved = set(graph.saved)
    for s in graph.storages:
        if s.id in given_up and (s.id in before or s.id in saved):
            residences[s.name] = Recompute(tuple(before.get(s.id, ())))
        elif s.id in saved:
            residences[s.name] = Keep()
    return residences
