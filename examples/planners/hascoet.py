"""The simple half of CPU offloading: inputs of convolutions and poolings leave when they are made, and come back one
layer ahead.

Hascoet et al., "Reducing the Memory Cost of Training Convolutional Neural Networks by CPU Offloading", section 4: a
buffer is freed when both its copy and the next layer are done, and the input of a layer is brought back while the layer
after it runs backward. What batch norms and activations save stays; the paper's invertible batch norm removes it.

Its ablations are properties of the link, not of the plan: pageable memory is a slower link, and without parallel
streams `Link.overlaps` is False. A baseline: it neither looks at the budget nor at what the link can carry.
"""

from __future__ import annotations

import time

from examples.planners.hmms import link_of, offload_plan, offloadable
from examples.planners.layerwise import last_of_next_layer, one_layer_ahead
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.planners.infeasible import infeasible

_LAYERS = ("conv", "pool")


def hascoet(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The plan of the paper.

    Args:
        graph: the step, with seconds, workspaces and a link.
        hardware: named in the plan; the step's times and its link already are for it.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit.

    Raises:
        BudgetError: offloading these inputs is not enough for the budget.
        InputError: the step has no link to the host.
    """
    started = time.perf_counter()
    link = link_of(graph, "hascoet")
    leaving = []
    host_bytes = 0
    for storage in inputs_of_layers(graph):
        host_bytes += graph.storages[storage].host_bytes
        if link.host_bytes and host_bytes > link.host_bytes:
            break
        leaving.append(storage)
    ends = {storage: last_of_next_layer(graph, storage) for storage in leaving}
    residences = offload_plan(graph, ends, one_layer_ahead(graph, leaving))
    plan = Plan(graph, residences, "hascoet", hardware.name, budget_bytes, 0.0, time.perf_counter() - started)
    if budget_bytes and plan.predicted_peak_bytes > budget_bytes:
        raise infeasible(plan, budget_bytes)
    return plan


def inputs_of_layers(graph: StepGraph) -> tuple[int, ...]:
    """The offloadable storages that a convolution or a pooling reads in the forward pass, in forward order."""
    read = {
        storage
        for op in graph.ops[: graph.n_forward]
        if any(layer in op.target.lower() for layer in _LAYERS)
        for storage in op.reads
    }
    return tuple(storage for storage in offloadable(graph) if storage in read)
