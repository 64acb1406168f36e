"""Layer by layer: each layer's input leaves while the layer runs, and the device waits for it before the next layer.

The eager synchronisation of vDNN (Rhu et al., MICRO'16), which the HMMS paper compares with (section 2.3, figure 8);
its bytes are held to the same theoretical limit. A baseline: `hmms` moves the same bytes and waits for less.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from examples.planners.hmms import link_of, offload_plan, within_limit
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.planners.infeasible import infeasible
from shoal.planners.transfer_places import last_forward_reader


def layerwise(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The plan that waits after every layer.

    Args:
        graph: the step, with seconds, workspaces and a link.
        hardware: named in the plan; the step's times and its link already are for it.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit.

    Raises:
        BudgetError: what the link carries is not enough for the budget.
        InputError: the step has no link to the host.
    """
    started = time.perf_counter()
    leaving = within_limit(graph, link_of(graph, "layerwise"))
    ends = {s: last_of_next_layer(graph, s) for s in leaving}
    residences = offload_plan(graph, ends, one_layer_ahead(graph, leaving))
    plan = Plan(graph, residences, "layerwise", hardware.name, budget_bytes, 0.0, time.perf_counter() - started)
    if budget_bytes and plan.predicted_peak_bytes > budget_bytes:
        raise infeasible(plan, budget_bytes)
    return plan


def last_of_next_layer(graph: StepGraph, storage: int) -> int:
    """The last op of the layer that consumes the storage next, or its last forward reader where that is later."""
    producer = graph.producer[storage]
    consumer = next((r for r in graph.readers[storage] if r > producer), producer)
    if consumer >= graph.n_forward:
        consumer = min(producer + 1, graph.n_forward - 1)
    layer = graph.ops[consumer].layer
    end = consumer
    while end + 1 < graph.n_forward and layer and graph.ops[end + 1].layer == layer:
        end += 1
    return max(end, last_forward_reader(graph, storage))


def one_layer_ahead(graph: StepGraph, leaving: Collection[int]) -> dict[int, int]:
    """Storage → the op of the backward pass with which the layer before that of its first reader begins."""
    backward = [op for op in graph.ops if op.phase == "backward"]
    begins: list[int] = []  # first op of each stretch of one layer
    stretch_of: dict[int, int] = {}
    for place, op in enumerate(backward):
        if place == 0 or not op.layer or op.layer != backward[place - 1].layer:
            begins.append(op.id)
        stretch_of[op.id] = len(begins) - 1
    starts = {}
    for storage in leaving:
        reader = next(r for r in graph.readers[storage] if graph.ops[r].phase == "backward")
        starts[storage] = begins[max(0, stretch_of[reader] - 1)]
    return starts
