"""Checkpoints at evenly spaced cuts of the forward pass; everything between two of them is computed again.

Other names: gradient checkpointing, sublinear-memory training, `torch.utils.checkpoint.checkpoint_sequential`.
Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.

For a chain of n equal layers it needs about 2 sqrt(n) layers' bytes for at most one extra forward pass, and no strategy
that computes each layer at most twice needs less by more than a constant. Here the segments are balanced by the bytes
they save, every number of segments is tried, and within a segment each storage comes back as late as possible.

Not yet good: it keeps nothing inside a segment, though some storages are dear to compute and small, and it never
computes a storage more than twice, so its least peak is far above that of `chain`.
"""

from __future__ import annotations

import time
from math import isqrt

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.planners.chain_blocks import crossing_sets, saved_bytes_per_op
from shoal.planners.infeasible import infeasible
from shoal.planners.just_in_time import just_in_time
from shoal.planners.simulated import Simulated, simulated

_MOST_NUMBERS = 16  # of segments that are tried


def sqrt(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The fastest of the evenly cut checkpointing plans that fit.

    Args:
        graph: the step, with seconds and workspaces.
        hardware: named in the plan; the step's times already are for it.
        budget_bytes: the most device bytes in use at any moment.

    Raises:
        BudgetError: none fits; other planners may find one that does.
    """
    started = time.perf_counter()
    found = [keep_everything(graph), *evenly_cut(graph)]
    fitting = [candidate for candidate in found if candidate.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(found, key=lambda candidate: candidate.peak_bytes)
        raise infeasible(Plan(graph, least.residences, "sqrt", hardware.name), budget_bytes)
    best = min(fitting, key=lambda candidate: candidate.seconds)
    planning_seconds = time.perf_counter() - started
    return Plan(graph, best.residences, "sqrt", hardware.name, budget_bytes, planning_seconds=planning_seconds)


def keep_everything(graph: StepGraph) -> Simulated:
    """What plain PyTorch does."""
    return simulated(graph, just_in_time(graph, range(len(graph.storages))))


def evenly_cut(graph: StepGraph) -> list[Simulated]:
    """For numbers of segments up to about 2 sqrt(n): keep what crosses the cuts, recompute all the rest, or all but
    the last segment, of which everything is read right after the forward pass."""
    crossing = crossing_sets(graph)
    weights = saved_bytes_per_op(graph)
    found = []
    for n_segments in numbers_of_segments(min(graph.n_forward, 2 * isqrt(graph.n_forward) + 2)):
        cuts = _even_cuts(weights, n_segments)
        kept = {s for cut in cuts for s in crossing[cut]}
        last = {s for op in graph.ops[cuts[-1] if cuts else 0 : graph.n_forward] for s in op.writes}
        found += [simulated(graph, just_in_time(graph, stays)) for stays in (kept, kept | last)]
    return found


def numbers_of_segments(most: int) -> list[int]:
    """From 1 to `most`; where these are many, as many at equal ratios: each takes two schedules of the step."""
    if most <= _MOST_NUMBERS:
        return list(range(1, most + 1))
    ratio = most ** (1 / (_MOST_NUMBERS - 1))
    return sorted({round(ratio**n) for n in range(_MOST_NUMBERS)})


def _even_cuts(weights: list[int], n_segments: int) -> list[int]:
    """Positions that cut `weights` into segments of about equal sums."""
    whole = max(1, sum(weights))
    cuts = []
    reached, share = 0, 1
    for position, weight in enumerate(weights[:-1], start=1):
        reached += weight
        if share < n_segments and reached * n_segments >= share * whole:
            cuts.append(position)
            share = reached * n_segments // whole + 1
    return cuts
