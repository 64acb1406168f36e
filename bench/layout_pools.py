"""First-fit addresses in the three pools of HMMS: host, device parameters, device general.

Jin, Hong, "Split-CNN", ASPLOS'19, section 4.4. Each pool is one contiguous block. Parameters and their gradients, many
of them tiny and all in use for long, have one of their own, so that they do not fragment the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.layout_step_blocks import step_blocks
from shoal.core.residence import Offload, Residence, exact_residence
from shoal.core.schedule import schedule
from shoal.core.step import StepGraph
from shoal.memory.layout.fit import first_fit
from shoal.memory.layout.problem import Block, Layout, Problem


@dataclass(frozen=True)
class Pools:
    """The layout of each pool; times are numbers of runs, as in `step_blocks`.

    Attributes:
        host: what is offloaded, from its first copy to the end of its last.
        parameters: parameters, buffers and gradients, all step long.
        general: every other block of the step: activations and their gradients, workspaces, what is fetched.
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
