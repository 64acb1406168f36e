"""Where the forward pass can be cut: what crosses a position, good borders of blocks, and evenly cut plans.

Position p lies before the forward op p. A storage crosses it when an earlier op writes it and a later forward op reads
it: it must be there to go on from p. In a plain chain one storage crosses, with a skip connection two or more.
"""

from __future__ import annotations

from math import isqrt

from shoal.core.step import StepGraph
from shoal.planners.just_in_time import just_in_time
from shoal.planners.simulated import Simulated, simulated
from shoal.planners.transfer_places import last_forward_reader

WORTH_A_CUT = 0.05  # of the saved bytes of an average op
_MOST_NUMBERS = 16  # of segments that are tried


def crossing_sets(graph: StepGraph) -> list[frozenset[int]]:
    """For every position 0..n_forward the activations that cross it."""
    crossing: list[frozenset[int]] = [frozenset()]
    alive: set[int] = set()
    for op in graph.ops[: graph.n_forward]:
        alive.update(s for s in op.writes if graph.storages[s].kind == "activation")
        alive = {s for s in alive if last_forward_reader(graph, s) > op.id}
        crossing.append(frozenset(alive))
    return crossing


def saved_bytes_per_op(graph: StepGraph) -> list[int]:
    """For every forward op the saved bytes it writes."""
    saved = set(graph.saved)
    return [sum(graph.storages[s].nbytes for s in op.writes if s in saved) for op in graph.ops[: graph.n_forward]]


def choose_cuts(graph: StepGraph, max_blocks: int) -> list[int]:
    """At most `max_blocks - 1` positions at which few bytes cross, spread evenly over the saved bytes.

    From all positions the worst is dropped until few enough are left: the one whose two neighbouring blocks save the
    fewest bytes together for the bytes that cross it. What crosses without being saved counts twice, as no backward op
    reads it.
    """
    saved = set(graph.saved)
    crossing = crossing_sets(graph)
    cost = [sum(graph.storages[s].nbytes * (1 if s in saved else 2) for s in across) for across in crossing]
    reached = [0]
    for nbytes in saved_bytes_per_op(graph):
        reached.append(reached[-1] + nbytes)
    # Only right after something worth holding; a batch norm's statistics are not.
    worth = WORTH_A_CUT * reached[-1] / graph.n_forward
    cuts = [p for p in range(1, graph.n_forward) if reached[p] - reached[p - 1] > worth]
    while len(cuts) > max_blocks - 1:
        borders = [0, *cuts, graph.n_forward]
        worst = min(
            range(1, len(borders) - 1),
            key=lambda i: (reached[borders[i + 1]] - reached[borders[i - 1]]) / (1 + cost[borders[i]]),
        )
        del cuts[worst - 1]
    return cuts


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
