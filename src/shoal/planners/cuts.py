"""Where the forward pass can be cut: what crosses a position, and which positions make good borders of blocks.

Position p lies before the forward op p. A storage crosses it when an earlier op writes it and a later forward op reads
it: it must be there to go on from p. In a plain chain one storage crosses, beside a skip connection two or more.
"""

from __future__ import annotations

from shoal.core.step import StepGraph

WORTH_A_CUT = 0.05  # of the saved bytes of an average op


def crossing_sets(graph: StepGraph) -> list[frozenset[int]]:
    """For every position 0..n_forward the activations that cross it."""
    crossing: list[frozenset[int]] = [frozenset()]
    alive: set[int] = set()
    for op in graph.ops[: graph.n_forward]:
        alive.update(s for s in op.writes if graph.storages[s].kind == "activation")
        alive = {s for s in alive if _last_forward_reader(graph, s) > op.id}
        crossing.append(frozenset(alive))
    return crossing


def saved_bytes_per_op(graph: StepGraph) -> list[int]:
    """For every forward op the saved bytes it writes."""
    saved = set(graph.saved)
    return [sum(graph.storages[s].nbytes for s in op.writes if s in saved) for op in graph.ops[: graph.n_forward]]


def choose_cuts(graph: StepGraph, most_blocks: int) -> list[int]:
    """At most `most_blocks - 1` positions at which few bytes cross, spread evenly over the saved bytes.

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
    while len(cuts) > most_blocks - 1:
        borders = [0, *cuts, graph.n_forward]
        worst = min(
            range(1, len(borders) - 1),
            key=lambda i: (reached[borders[i + 1]] - reached[borders[i - 1]]) / (1 + cost[borders[i]]),
        )
        del cuts[worst - 1]
    return cuts


def _last_forward_reader(graph: StepGraph, storage: int) -> int:
    return max((reader for reader in graph.readers[storage] if reader < graph.n_forward), default=-1)
