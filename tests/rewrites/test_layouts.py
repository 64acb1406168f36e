"""Once it is known how a kernel lays its result out, the trace of all that follows has it, where that can be."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.capture.capture_step import capture_step
from shoal.graph.joint import Joint
from shoal.rewrites.layouts import lay_out_as_kernel_does
from shoal.rewrites.table import TABLE
from tests.joint_graphs import operands, run_joint

CHANNELS_LAST = (32, 1, 8, 2)


def traced(follows: Any) -> fx.GraphModule:
    """The exponential of an image, in which the kernel in question is the first op, and what follows."""
    return make_fx(lambda x: follows(x.exp()), tracing_mode="fake")(torch.zeros(3, 2, 4, 4))


def after(module: fx.GraphModule, backward: bool) -> dict[str, tuple[int, ...]]:
    """The strides in the trace, once the exponential is in channels_last."""
    first = next(node for node in module.graph.nodes if node.target is torch.ops.aten.exp.default)
    value = torch.empty_like(first.meta["val"], memory_format=torch.channels_last)
    lay_out_as_kernel_does(Joint(module, set(module.graph.nodes) if backward else set()), (first, value))
    return {
        node.target.__name__.split(".")[0]: node.meta["val"].stride()
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    }


def test_what_is_computed_of_it_has_the_layout_that_follows() -> None:
    found = after(traced(lambda y: (y + 1).mean((2, 3))), backward=True)
    assert found == {"exp": CHANNELS_LAST, "add": CHANNELS_LAST, "mean": (2, 1)}


def test_a_view_that_the_layout_does_not_have_leaves_all_as_it_was() -> None:
    found = after(traced(lambda y: (y + 1).view(3, -1)), backward=True)
    assert found["exp"] == found["add"] == (32, 16, 4, 1)


@pytest.mark.parametrize("backward", [False, True])
def test_results_that_the_caller_gets_stay_as_traced_but_gradients_do_not(backward: bool) -> None:
    found = after(traced(lambda y: y + 1), backward=backward)
    assert found["exp"] == found["add"] == (CHANNELS_LAST if backward else (32, 16, 4, 1))


class Normalised(nn.Module):
    """Under autocast around it: the norm's input is bfloat16, its weights are float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv1d(2, 8, 3), nn.GroupNorm(4, 8), nn.Conv1d(8, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())


def test_a_group_norms_gradient_under_autocast_has_the_precision_that_kernels_return() -> None:
    torch.manual_seed(0)
    net, x = Normalised(), torch.randn(2, 2, 24)
    with torch.autocast("cpu", torch.bfloat16):
        captured, as_traced = (capture_step(net, x, name="net", rewrites=rewrites)[0] for rewrites in (TABLE, ()))
    (node,) = captured.joint.graph.find_nodes(
        op="call_function", target=torch.ops.aten.native_group_norm_backward.default
    )
    assert node.meta["val"][0].dtype is torch.bfloat16
    arguments = [torch.empty_like(one.meta["val"], device="cpu") for one in node.args[:5]]
    found = torch.ops.aten.native_group_norm_backward(
        *(torch.ones(one.shape, dtype=one.dtype) for one in arguments), *node.args[5:]
    )
    assert [one.dtype for one in found] == [one.dtype for one in node.meta["val"]]
    theirs = run_joint(as_traced.joint, operands(as_traced.joint))
    for ours, plain in zip(run_joint(captured.joint, operands(captured.joint)), theirs, strict=True):
        assert (ours is None) == (plain is None)
        assert ours is None or torch.equal(ours, plain)
