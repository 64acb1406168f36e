"""HMMS with batch norms' results recomputed: what they normalise leaves for the host, what they return is made again.

Jin, Hong, "Split-CNN", ASPLOS'19, section 6.3: ResNet computes little for the bytes that it saves, so the link carries
too small a share of them. A batch norm saves its input, and the convolution after it saves its result once more,
rectified. The result is given up after the forward pass and made again from the input, elementwise and bit for bit, so
that fewer bytes are left for the same link.

What leaves is chosen as by `hmms`. When each copy ends is known, so a storage is freed when its own has (see
`transfer_places`), not at the next balance of Algorithm 1: while the link lags, as it is in ResNet's first layers,
the balance comes late, and all waits for it. Where the budget asks for it the device waits for copies.
"""

from __future__ import annotations

import time

from examples.planners.hmms import link_of, within_limit
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.planners.infeasible import infeasible
from shoal.planners.just_in_time import just_in_time
from shoal.planners.transfer_places import with_offloads


def hmms_recompute(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The plan of the paper's memory-efficient ResNet.

    Args:
        graph: the step, with seconds, workspaces and a link.
        hardware: named in the plan; the step's times and its link already are for it.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit.

    Raises:
        BudgetError: what the link carries is not enough for the budget.
        InputError: the step has no link to the host.
    """
    started = time.perf_counter()
    link = link_of(graph, "hmms_recompute")
    results = normalised(graph)
    residences = just_in_time(graph, frozenset(range(len(graph.storages))) - results)
    residences = with_offloads(graph, residences, within_limit(graph, link, results), budget_bytes)
    plan = Plan(graph, residences, "hmms_recompute", hardware.name, budget_bytes, 0.0, time.perf_counter() - started)
    if budget_bytes and plan.predicted_peak_bytes > budget_bytes:
        raise infeasible(plan, budget_bytes)
    return plan


def normalised(graph: StepGraph) -> frozenset[int]:
    """Results of batch norms, and what only elementwise activations make of them, as far as they can be recomputed."""
    found: set[int] = set()
    for op in graph.ops[: graph.n_forward]:
        if not op.recomputable or not op.writes:
            continue
        of_activation = any(op.target.startswith(f"aten.{name}.") for name in _ACTIVATIONS)
        if op.target in _BATCH_NORMS or (of_activation and set(op.reads) <= found):
            found.add(op.writes[0])
    return frozenset(found - graph.never_given_up)


_BATCH_NORMS = (  # by the batch's statistics with running ones in addition, without, and by running ones
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_no_training.default",
    "aten.cudnn_batch_norm.default",
)
_ACTIVATIONS = ("relu", "leaky_relu", "hardtanh", "elu", "silu", "hardswish", "gelu")
