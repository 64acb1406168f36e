"""Use up the slack that a plan leaves inside the budget: keep what it recomputes, or keep it between two uses.

Where the step has a link, what is recomputed may go to the host instead, and what is in use may be kept.

Greedy, the most time per byte first, each change played exactly. No optimum is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from shoal.core.hardware import Link
from shoal.core.residence import Keep, Offload, Recompute, Residence
from shoal.core.schedule import Run, schedule
from shoal.core.simulate import bytes_and_seconds, peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.limits import DEFAULT, Effort, Guard
from shoal.planners.transfer_places import TransferPlaces, last_forward_reader, placed_residences


def fill_slack(
    graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int, effort: Effort | None = None
) -> dict[str, Residence]:
    """Residences that take no more time than `residences` and, if those do, fit the budget.

    Args:
        graph: the step.
        residences: a plan whose peak fits.
        budget_bytes: most bytes in use at any position.
        effort: what it may cost, after which the best found so far counts; None for what `Limits` says.
    """
    effort = effort or Effort("fill slack", DEFAULT.fill_slack_ops, Guard(DEFAULT.guard_seconds))
    best = without_needless_runs(graph, residences)
    if graph.link is not None:
        return _keep_or_send_more(graph, graph.link, best, budget_bytes, effort)
    runs = schedule(graph, best)
    _, best_seconds = peak_and_seconds(graph, runs)
    highest_bytes = _highest_until_reruns(graph, runs)
    improved = True
    while improved:
        improved = False
        for name, left_out in _changes(graph, best):
            if effort.is_spent:
                return best
            now = best[name]
            if not isinstance(now, Recompute) or left_out in now.before[:1]:
                continue  # changed since this pass began
            if not left_out and _is_too_large(graph, name, highest_bytes, budget_bytes):
                continue
            before = tuple(op for op in now.before if op != left_out)
            changed, runs = _pruned(graph, {**best, name: Recompute(before) if left_out else Keep()})
            effort.spend(len(runs))
            peak_bytes, seconds = peak_and_seconds(graph, runs)
            if peak_bytes <= budget_bytes and seconds < best_seconds:
                best, best_seconds, improved = changed, seconds, True
                highest_bytes = _highest_until_reruns(graph, runs)
    return best


def _highest_until_reruns(graph: StepGraph, runs: Sequence[Run]) -> list[int]:
    """Place in the schedule → most bytes in use from there until the first recomputation; one place more, with 0."""
    totals, _ = bytes_and_seconds(graph, runs)
    end = next((place for place, run in enumerate(runs) if run.again), len(runs))
    return [*accumulate(reversed(totals[:end]), max, initial=0)][::-1]


def _is_too_large(graph: StepGraph, name: str, highest_bytes: Sequence[int], budget_bytes: int) -> bool:
    """Whether there is no room to keep a storage before any op runs again, where nothing else is given up for it."""
    storage = graph.storage_called[name]
    return highest_bytes[last_forward_reader(graph, storage.id) + 1] + storage.nbytes > budget_bytes


def _keep_or_send_more(
    graph: StepGraph, link: Link, start: dict[str, Residence], budget_bytes: int, effort: Effort
) -> dict[str, Residence]:
    """The same with Offload as a third residence. Every change places all transfers again."""
    best = start
    _, best_seconds = peak_and_seconds(graph, schedule(graph, best))
    kept: dict[str, Residence] = {name: Keep() if isinstance(r, Offload) else r for name, r in start.items()}
    away = frozenset(s.id for s in graph.storages if isinstance(start.get(s.name), Offload))
    by_name = {s.name: s.id for s in graph.storages}
    improved = True
    while improved:
        improved = False
        changes: list[tuple[dict[str, Residence], frozenset[int]]] = [
            (kept, away - {storage}) for storage in sorted(away)
        ]
        for name, left_out in _changes(graph, kept):
            now = kept[name]
            assert isinstance(now, Recompute)
            rest = Recompute(tuple(op for op in now.before if op != left_out))
            changed = without_needless_runs(graph, {**kept, name: rest if left_out else Keep()})
            changes += [(changed, away)] if left_out else [(changed, away), (changed, away | {by_name[name]})]
        for changed, leaving in changes:
            if effort.is_spent:
                return best
            effort.spend(len(graph.ops))
            placed = TransferPlaces(graph, changed, budget_bytes).place(leaving)
            there_is_room = not link.host_bytes or placed.host_bytes <= link.host_bytes
            if placed.excess_bytes == 0 and there_is_room and placed.seconds < best_seconds:
                kept, away, improved = changed, leaving, True
                best, best_seconds = placed_residences(graph, kept, placed), placed.seconds
                break
    return best


def without_needless_runs(graph: StepGraph, residences: Mapping[str, Residence]) -> dict[str, Residence]:
    """`residences` less the recomputations that nothing reads."""
    return _pruned(graph, residences)[0]


def _pruned(graph: StepGraph, residences: Mapping[str, Residence]) -> tuple[dict[str, Residence], tuple[Run, ...]]:
    """`without_needless_runs`, and the schedule of what it returns."""
    changed = dict(residences)
    runs = schedule(graph, residences)
    read_later: set[int] = set()
    served = -1
    needless = False
    for run in reversed(runs[graph.n_forward :]):
        op_id, again, writes = run[:3]
        if not again:
            served = op_id
            read_later.difference_update(writes)
            read_later.update(graph.ops[op_id].reads)
            continue
        for storage in writes:
            if storage not in read_later:
                name = graph.storages[storage].name
                residence = changed[name]
                assert isinstance(residence, Recompute)
                left_out = graph.ops[served].name
                changed[name] = Recompute(tuple(before for before in residence.before if before != left_out))
                needless = True
        if not read_later.isdisjoint(writes):
            read_later.difference_update(writes)
            read_later.update(graph.ops[op_id].second.reads)
    return changed, schedule(graph, changed) if needless else runs


def _changes(graph: StepGraph, residences: Mapping[str, Residence]) -> Iterator[tuple[str, str]]:
    """(name of a recomputed storage, name of the op before which it need not come back; "" to keep it throughout)."""

    def worth(storage: int) -> float:
        return graph.ops[graph.producer[storage]].second.longer_seconds / max(graph.storages[storage].nbytes, 1)

    recomputed = [s.id for s in graph.storages if isinstance(residences.get(s.name), Recompute)]
    for storage in sorted(recomputed, key=worth, reverse=True):
        name = graph.storages[storage].name
        residence = residences[name]
        if isinstance(residence, Recompute) and residence.before:
            for left_out in ("", *residence.before[1:]):
                yield name, left_out
