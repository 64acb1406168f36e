"""A planned step as a layout problem: every block that its allocator would give out, and how long it is in use.

`three_pools` gives first-fit addresses in the three pools of HMMS (Jin, Hong, "Split-CNN", ASPLOS'19, section 4.4):
host, device parameters, device general. Each is one contiguous block. Parameters and their gradients, many of them tiny
and all in use for long, have a pool of their own, so that they do not fragment the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from examples.minimalloc import first_fit
from shoal.core.residence import Offload, Residence, exact_residence
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.memory.layout.problem import Block, Layout, Problem


def step_blocks(graph: StepGraph, residences: Mapping[str, Residence]) -> Problem:
    """The blocks of one step, timed by the number of the run that allocates and of the one after the last reader.

    A storage that is recomputed, or fetched from the host, is a block each time. An op that writes over its operand
    takes over the operand's block. Workspaces and what a recomputation writes for nothing last for one run; gradients
    and outputs last until the step ends. What is there before the step (parameters, buffers, the batch) has no block.

    Args:
        graph: the step.
        residences: by storage name; an absent storage is kept.

    Returns:
        A problem whose `highest_live_bytes` is the plan's predicted peak less the resident bytes.
    """
    runs = schedule(graph, residences)
    storages = graph.storages
    blocks: list[Block] = []
    begun: dict[int, tuple[str, int, int]] = {}  # storage → name of its block, first run, bytes

    def end(storage: int, upper: int) -> None:
        name, lower, size_bytes = begun.pop(storage)
        blocks.append(Block(name, lower, upper, size_bytes))

    for number, run in enumerate(runs):
        op = run.of(graph)
        for storage in (*run.fetches, *run.writes):
            begun[storage] = (f"{number}:{storages[storage].name}", number, storages[storage].nbytes)
        if run.takes_over >= 0:
            written = run.writes[0]
            name, lower, size_bytes = begun.pop(run.takes_over)
            begun[written] = (name, lower, max(size_bytes, storages[written].nbytes))
        if run.again:
            for storage in set(op.writes) - set(run.writes):
                blocks.append(
                    Block(f"{number}:{storages[storage].name} unasked", number, number + 1, storages[storage].nbytes)
                )
        if op.workspace_bytes:
            blocks.append(Block(f"{number}:workspace", number, number + 1, op.workspace_bytes))
        for storage in run.frees:
            if storage != run.takes_over:
                end(storage, number + 1)
        for storage in run.releases:
            end(storage, number + 1)
    for storage in sorted(begun):
        end(storage, len(runs))
    return Problem(tuple(sorted(blocks, key=lambda block: (block.lower, block.upper, block.name))))


@dataclass(frozen=True)
class Pools:
    """The layout of each pool; times are numbers of runs, as in `step_blocks`.

    Attributes:
        host: what is offloaded, from its first copy to the end of its last.
        parameters: parameters, buffers and gradients, all step long.
        general: every other block of the step: activations, error terms, workspaces, what is fetched.
    """

    host: Layout
    parameters: Layout
    general: Layout


def three_pools(graph: StepGraph, residences: Mapping[str, Residence]) -> Pools:
    """Lay a planned step out.

    Args:
        graph: the step.
        residences: by storage name; an absent storage is kept.
    """
    runs = schedule(graph, residences)
    leaves = {storage: number for number, run in enumerate(runs) for storage in run.offloads}
    returns = {storage: number for number, run in enumerate(runs) for storage in run.awaits}
    host = [
        Block(s.name, leaves[s.id], max(returns[s.id], leaves[s.id] + 1), s.nbytes)
        for s in graph.storages
        if isinstance(exact_residence(residences.get(s.name)), Offload)
    ]
    long_lived = [
        Block(s.name, 0, len(runs), s.nbytes) for s in graph.storages if s.kind in ("parameter", "buffer", "gradient")
    ]
    gradients = {s.name for s in graph.storages if s.kind == "gradient"}
    general = [b for b in step_blocks(graph, residences).blocks if b.name.split(":", 1)[1] not in gradients]
    return Pools(*(first_fit(Problem(tuple(blocks))) for blocks in (host, long_lived, general)))
