"""A split network trained at its smallest peak: the bytes are as planned, the gradients as they should be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.core.hardware import Hardware
from shoal.core.order import op_names
from shoal.core.plan import Plan
from shoal.core.residence import Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.hold_longer import hold_longer
from shoal.planners.limits import DEFAULT, Effort, Guard
from shoal.planners.on_demand import plans_on_demand
from tests.engine.training_laws import conv_bn_relu, images, mean_square


def network() -> nn.Module:
    """Wide where it is split, and with a head whose weight is large."""
    torch.manual_seed(0)
    wide = [conv_bn_relu(3, 16), conv_bn_relu(16, 16), nn.MaxPool2d(4)]
    return nn.Sequential(*wide, nn.Flatten(), nn.Linear(16 * 256, 32))


def gradients(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    mean_square(model(batch)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def least(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """A planner: the smallest peak, whatever the budget, with held longer what fits in addition to it."""
    found = plans_on_demand(graph, DEFAULT)[0][0]
    effort = Effort("hold longer", DEFAULT.hold_longer_ops, Guard(1e9))
    held = hold_longer(found.graph, found.residences, found.peak_bytes, effort)
    return Plan(found.graph, held, "least", hardware.name, budget_bytes, captured_order=op_names(graph))


@pytest.mark.slow
def test_at_its_least_a_split_network_has_the_planned_peak_and_right_gradients() -> None:
    (batch,) = images(1, 4, 3, 64, 64)
    split = shoal.split(network(), 1.0, (2, 1), halo="exact")
    compiled = shoal.compile(
        split, budget="1GiB", offload_to=None, allow="bitwise", options=shoal.Options(planner=least)
    )
    for _ in range(2):
        found = gradients(compiled, batch)
    status = compiled.shoal
    assert op_names(status.plan.graph) != status.plan.captured_order
    assert any(isinstance(r, Recompute) and len(r.before) > 1 for r in status.plan.residences.values())
    everything_kept, _ = peak_and_seconds(status.plan.graph, schedule(status.plan.graph, {}))
    assert status.measured_peak_bytes < 0.65 * everything_kept
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, abs=2048)
    exact, plain = gradients(network().double(), batch.double()), gradients(network(), batch)
    scale = max(gradient.norm() for gradient in exact.values())  # biases before a batch norm have none
    for name, gradient in found.items():
        ours, theirs = ((g.double() - exact[name]).norm() for g in (gradient, plain[name]))
        assert ours <= 2 * theirs + 1e-6 * scale, name
