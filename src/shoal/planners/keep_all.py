"""Keep everything: what plain PyTorch does."""

from __future__ import annotations

from shoal.hardware import Hardware
from shoal.plan import Plan
from shoal.planners.just_in_time import just_in_time
from shoal.step import StepGraph


def keep_all(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The plan that gives nothing up. It is the fastest where it fits."""
    every = range(len(graph.storages))
    return Plan(graph, just_in_time(graph, every), "keep_all", hardware.name, budget_bytes)
