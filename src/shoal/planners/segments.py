"""The evenly cut checkpointing plans of a step, one for each number of segments."""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from shoal.core.residence import Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.cuts import crossing_sets, saved_bytes_per_op
from shoal.planners.just_in_time import just_in_time


class Candidate(NamedTuple):
    """A plan that was found, with its exact cost."""

    peak_bytes: int
    seconds: float
    residences: dict[str, Residence]


def candidate(graph: StepGraph, residences: dict[str, Residence]) -> Candidate:
    """Play `residences` through."""
    return Candidate(*peak_and_seconds(graph, schedule(graph, residences)), residences)


def keep_everything(graph: StepGraph) -> Candidate:
    """What plain PyTorch does."""
    return candidate(graph, just_in_time(graph, range(len(graph.storages))))


def segmentations(graph: StepGraph) -> list[Candidate]:
    """For every number of segments up to about 2 sqrt(n): keep what crosses the cuts, recompute all the rest, or all
    but the last segment, of which everything is read right after the forward pass."""
    crossing = crossing_sets(graph)
    weights = saved_bytes_per_op(graph)
    found = []
    for segments in range(1, min(graph.n_forward, 2 * isqrt(graph.n_forward) + 2) + 1):
        cuts = _even_cuts(weights, segments)
        kept = {s for cut in cuts for s in crossing[cut]}
        last = {s for op in graph.ops[cuts[-1] if cuts else 0 : graph.n_forward] for s in op.writes}
        found += [candidate(graph, just_in_time(graph, kept)), candidate(graph, just_in_time(graph, kept | last))]
    return found


def _even_cuts(weights: list[int], segments: int) -> list[int]:
    """Positions that cut `weights` into segments of about equal sums."""
    whole = max(1, sum(weights))
    cuts = []
    reached, share = 0, 1
    for position, weight in enumerate(weights[:-1], start=1):
        reached += weight
        if share < segments and reached * segments >= share * whole:
            cuts.append(position)
            share = reached * segments // whole + 1
    return cuts
