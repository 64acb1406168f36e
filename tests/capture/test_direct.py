"""Which convolutions of a captured step are computed by direct kernels, and the step in which they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import shoal
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.capture.pieces import choose_direct, in_pieces
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.variant import Pieces
from shoal.errors import PlanError
from shoal.kernels import direct_convolution
from tests.joint_graphs import operands, run_joint
from tests.raising import raising

aten = torch.ops.aten

VOLUMES = (1, 2, 8, 8, 8)


class SkipNet(nn.Module):
    """A U-Net's last level: what is upsampled is concatenated with a skip, and only a convolution reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv3d(2, 4, 3, padding=1)
        self.down, self.up = nn.Conv3d(4, 6, 3, stride=2, padding=1), nn.ConvTranspose3d(6, 3, 2, stride=2)
        self.join, self.leave = nn.Conv3d(7, 4, 3, padding=1), nn.Conv3d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.enter(x).tanh()
        above = self.up(self.down(skip).tanh())
        return self.leave(self.join(torch.cat([above, skip], 1)).tanh())


@pytest.fixture
def captured() -> Captured:
    torch.manual_seed(0)
    return capture_step(SkipNet(), torch.randn(VOLUMES), name="skips")[0]


def costed(
    direct_seconds: float, their_seconds: float = 1.0, scratch_bytes: int = 0
) -> Callable[[Captured], StepGraph]:
    def cost(step: Captured) -> StepGraph:
        signatures = {op.signature: op.target for op in step.graph.ops if op.signature}
        ours = {key for key, target in signatures.items() if "direct" in target}
        seconds = {key: direct_seconds if key in ours else their_seconds for key in signatures}
        return step.with_costs(seconds, {key: 0 if key in ours else scratch_bytes for key in signatures})

    return cost


@pytest.mark.skipif(not direct_convolution.applies(), reason="the native library was not built")
def test_what_is_faster_is_chosen(captured: Captured) -> None:
    cost = costed(0.5)
    chosen = choose_direct(captured, cost(captured), cost)
    targets = sorted(captured.graph.op_called[one.op].target for one in chosen)
    assert targets.count("aten.convolution.default") == 5
    assert targets.count("aten.convolution_backward.default") == 5
    assert targets.count("shoal.convolution.input_gradient") == 4  # the input of the step needs none
    assert all(one.direct for one in chosen)


@pytest.mark.skipif(not direct_convolution.applies(), reason="the native library was not built")
def test_what_is_slower_is_chosen_only_for_the_scratch_that_it_saves(captured: Captured) -> None:
    slower = costed(2.0)
    assert choose_direct(captured, slower(captured), slower) == ()
    much = costed(1.2, scratch_bytes=64 << 20)
    assert len(choose_direct(captured, much(captured), much)) == 14
    slow = costed(3.0, scratch_bytes=64 << 20)
    assert choose_direct(captured, slow(captured), slow) == ()


@pytest.mark.skipif(not direct_convolution.applies(), reason="the native library was not built")
def test_a_concatenation_that_they_read_is_not_computed(captured: Captured) -> None:
    cost = costed(0.5)
    direct = in_pieces(captured, choose_direct(captured, cost(captured), cost))
    assert "aten.cat.default" in {op.target for op in captured.graph.ops}
    assert "aten.cat.default" not in {op.target for op in direct.graph.ops}
    parts = [op.name for op in direct.graph.ops if "_of_" in op.name]
    assert [name.rpartition("_")[2] for name in parts] == ["0", "3"]
    assert simulate(direct.graph, {}).peak_bytes < simulate(captured.graph, {}).peak_bytes


@pytest.mark.skipif(not direct_convolution.applies(), reason="the native library was not built")
def test_the_gradient_of_a_weight_keeps_the_strides_of_the_trace() -> None:
    """They follow the input's: channels_last where that is, whatever the weight's own are."""
    net = nn.Sequential(nn.Conv3d(8, 6, 3, padding=2, dilation=2), nn.Tanh())
    x = torch.randn(2, 6, 5, 4, 8).movedim(-1, 1)
    whole = capture_step(net, x, name="volumes")[0]
    direct = in_pieces(whole, [Pieces(node.name, direct=True) for node in able(whole)])
    tensors = operands(direct.joint)
    gradients = run_joint(direct.joint, tensors)[len(direct.forward_outputs) :]
    for ours, node in zip(gradients, direct.backward_outputs, strict=True):
        if ours is not None:
            assert ours.stride() == node.meta["val"].stride()
    assert any(gradient is not None and gradient.dim() == 5 and not gradient.is_contiguous() for gradient in gradients)


def able(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.joint.graph.nodes if node.target is aten.convolution_backward.default]


@pytest.mark.skipif(not direct_convolution.applies(), reason="the native library was not built")
def test_a_plan_of_another_step_is_refused(captured: Captured) -> None:
    with raising(PlanError, "'nothing'"):
        in_pieces(captured, [Pieces("nothing", direct=True)])


@pytest.mark.slow
@pytest.mark.skipif(not direct_convolution.applies(), reason="the native library was not built")
def test_convolutions_over_what_they_read_keep_the_prediction_and_the_gradients() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv3d(8, 8, 3, padding=1), nn.LeakyReLU(0.1))]
    net, x = nn.Sequential(nn.Conv3d(1, 8, 1), *layers, nn.Conv3d(8, 1, 1)), torch.randn(1, 1, 40, 60, 60)
    one = 8 * x.nbytes
    wide = copy.deepcopy(net).double()
    wide(x.double()).square().mean().backward()
    model = shoal.compile(copy.deepcopy(net), budget=int(4.6 * one), allow="recompute, order, direct")
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    over = [op for op in model.shoal.plan.graph.ops if "direct" in op.target and op.overwrites >= 0]
    assert {op.target for op in over} == {
        "shoal.direct_convolution.forward",
        "shoal.direct_convolution.input_gradient",
    }
    assert model.shoal.measured_peak_bytes == pytest.approx(model.shoal.predicted_peak_bytes, rel=0.02)
    assert model.shoal.measured_peak_bytes <= 4.6 * one
    for ours, exact in zip(model.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-3, atol=1e-5 * float(exact.grad.abs().max()))
