"""Use up the room that a plan leaves inside the budget: keep what it recomputes, or keep it between two uses.

Greedy, the most time per byte first, each change played exactly. No optimum is claimed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from shoal.residence import Keep, Recompute, Residence
from shoal.schedule import schedule
from shoal.simulate import peak_and_seconds
from shoal.step import StepGraph


def keep_more(
    graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int, time_limit_seconds: float
) -> dict[str, Residence]:
    """Residences that take no more time than `residences` and, if those do, fit the budget.

    Args:
        graph: the step.
        residences: a plan whose peak fits.
        budget_bytes: most bytes in use at any position.
        time_limit_seconds: after it, the best found so far counts.
    """
    deadline = time.perf_counter() + time_limit_seconds
    best = without_needless_runs(graph, residences)
    _, best_seconds = peak_and_seconds(graph, schedule(graph, best))
    improved = True
    while improved:
        improved = False
        for name, left_out in _changes(graph, best):
            if time.perf_counter() > deadline:
                return best
            now = best[name]
            if not isinstance(now, Recompute) or left_out in now.before[:1]:
                continue  # changed since this round began
            before = tuple(op for op in now.before if op != left_out)
            changed = without_needless_runs(graph, {**best, name: Recompute(before) if left_out else Keep()})
            peak_bytes, seconds = peak_and_seconds(graph, schedule(graph, changed))
            if peak_bytes <= budget_bytes and seconds < best_seconds:
                best, best_seconds, improved = changed, seconds, True
    return best


def without_needless_runs(graph: StepGraph, residences: Mapping[str, Residence]) -> dict[str, Residence]:
    """`residences` less the recomputations that nothing reads."""
    changed = dict(residences)
    read_later: set[int] = set()
    served = ""
    for run in reversed(schedule(graph, residences)):
        if not run.again:
            served = graph.ops[run.op].name
            read_later.difference_update(run.writes)
            read_later.update(run.of(graph).reads)
            continue
        for storage in run.writes:
            if storage not in read_later:
                name = graph.storages[storage].name
                residence = changed[name]
                assert isinstance(residence, Recompute)
                changed[name] = Recompute(tuple(before for before in residence.before if before != served))
        if not read_later.isdisjoint(run.writes):
            read_later.difference_update(run.writes)
            read_later.update(run.of(graph).reads)
    return changed


def _changes(graph: StepGraph, residences: Mapping[str, Residence]) -> Iterator[tuple[str, str]]:
    """(name of a recomputed storage, name of the op before which it need not come back; "" to keep it throughout)."""

    def worth(storage: int) -> float:
        return graph.ops[graph.producer[storage]].second.seconds / max(graph.storages[storage].nbytes, 1)

    recomputed = [s.id for s in graph.storages if isinstance(residences.get(s.name), Recompute)]
    for storage in sorted(recomputed, key=worth, reverse=True):
        name = graph.storages[storage].name
        residence = residences[name]
        if isinstance(residence, Recompute) and residence.before:
            for left_out in ("", *residence.before[1:]):
                yield name, left_out
