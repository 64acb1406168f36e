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

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.planners.cuts import evenly_cut, keep_everything
from shoal.planners.infeasible import infeasible


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
