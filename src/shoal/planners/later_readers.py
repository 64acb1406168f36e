"""Run the ops that need no copy while the device would wait for one: what reads an offloaded storage runs later.

A copy back takes as long as it takes, and begins where there is room for its bytes. Where the backward pass reads the
storage sooner, the device waits, although an op further on may need nothing of it: a convolution's weight gradient
reads what the forward pass saved; its input gradient does not, and takes as long. So ops are taken from after the
reader that waits to before it, the nearest first, until they last as long as the wait. The copies are placed again in
that order. The longest waits are tried first. Greedy, no optimum is claimed.

In an order for the fewest bytes (`order`) nothing tells how long a copy takes; this is the part of the order that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.core.order import reordered
from shoal.core.residence import Offload, Recompute, Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import Effort
from shoal.planners.pass_tasks import pass_tasks
from shoal.planners.simulated import Simulated, simulated
from shoal.planners.transfer_places import with_offloads

_MAX_WAITS = 8  # tried for one change of the order
_MAX_EARLIER_OPS = 32  # taken to before one reader
_ROUNDING = 1e-9  # of the step's seconds: a gain below it is none


def with_later_readers(
    found: Simulated, budget_bytes: int, effort: Effort, least_wait_seconds: float = 0.0
) -> Simulated:
    """The plan in an order of ops in which the device waits less for copies back; the plan itself where none is known.

    The same storages are kept, offloaded and recomputed.

    Args:
        found: a plan that fits.
        budget_bytes: most device bytes in use at any position.
        effort: what it may cost, after which the best found so far counts.
        least_wait_seconds: shorter waits are left.
    """
    graph = found.graph
    offloads = any(isinstance(residence, Offload) for residence in found.residences.values())
    if not offloads or graph.link is None or not graph.link.overlaps:
        return found
    best = found
    while (better := _with_one_later(best, budget_bytes, effort, least_wait_seconds)) is not None:
        best = better
    return best


def _with_one_later(found: Simulated, budget_bytes: int, effort: Effort, least_wait_seconds: float) -> Simulated | None:
    """The fastest plan with one reader later, of the longest wait for which there is one; None where there is none."""
    longest = sorted(_waits(found, effort).items(), key=lambda wait: -wait[1])
    for reader, wait_seconds in longest[:_MAX_WAITS]:
        if wait_seconds < least_wait_seconds:
            break
        best: Simulated | None = None
        for order in _later(found.graph, reader, wait_seconds):
            if effort.is_spent:
                return best
            effort.spend(2 * len(order))
            names = [found.graph.ops[op].name for op in order]
            changed = _placed(reordered(found.graph, names), found.residences, budget_bytes)
            enough_seconds = (1 - _ROUNDING) * (best or found).seconds
            if changed.peak_bytes <= budget_bytes and changed.seconds < enough_seconds:
                best = changed
        if best is not None:
            return best
    return None


def _waits(found: Simulated, effort: Effort) -> dict[int, float]:
    """Backward op → how long the device waits for copies that it, or a recomputation for it, reads."""
    effort.spend(len(found.graph.ops))
    waits: dict[int, float] = {}
    seconds = 0.0
    for moment in simulate(found.graph, found.residences).moments:
        if moment.phase == "stall":
            seconds += moment.seconds
        elif moment.phase == "backward":
            if seconds:
                waits[found.graph.op_called[moment.op].id] = seconds
            seconds = 0.0
        elif moment.phase != "recompute" and moment.phase != "launch":
            seconds = 0.0  # it waited in the forward pass, for room
    return waits


def _later(graph: StepGraph, reader: int, wait_seconds: float) -> Iterator[list[int]]:
    """Orders of the ops' ids with some of those after `reader` before it: one, two, four, and so on, and the last."""
    runs = schedule(graph, {})
    begin = next(op.id for op in graph.ops if op.phase == "backward")
    after = pass_tasks(graph, runs, begin, len(runs)).after
    held_back, earlier = {reader - begin}, list[int]()
    seconds, tried = 0.0, 0
    for op in range(reader + 1, len(graph.ops)):
        if not after[op - begin].isdisjoint(held_back):
            held_back.add(op - begin)
            continue
        earlier.append(op)
        seconds += graph.ops[op].seconds
        is_last = seconds >= wait_seconds or len(earlier) == _MAX_EARLIER_OPS
        if is_last or len(earlier) == max(1, 2 * tried):
            tried = len(earlier)
            yield _moved(graph, reader, earlier)
        if is_last:
            return
    if len(earlier) > tried:
        yield _moved(graph, reader, earlier)


def _moved(graph: StepGraph, reader: int, earlier: list[int]) -> list[int]:
    others = [op for op in range(reader, len(graph.ops)) if op not in earlier]
    return [*range(reader), *earlier, *others]


def _placed(graph: StepGraph, residences: Mapping[str, Residence], budget_bytes: int) -> Simulated:
    """The same storages kept, offloaded and recomputed in another order, their copies placed again."""
    of_storage = {s.id: residences.get(s.name) for s in graph.storages}
    stays = [s for s, residence in of_storage.items() if not isinstance(residence, Recompute)]
    offloaded = [s for s, residence in of_storage.items() if isinstance(residence, Offload)]
    return simulated(graph, with_offloads(graph, just_in_time(graph, stays), offloaded, budget_bytes))
