"""Calls that find nothing out again give the values and layouts of those that they are in place of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from shoal.engine.direct_calls import with_direct_calls
from shoal.kernels import batch_norm, convolution
from shoal.kernels.casts import cast_into, cast_together
from shoal.lowlevel.dispatch import VARIABLE
from shoal.lowlevel.native import cpu_features, levels

aten = torch.ops.aten


def casting(tensors: list[torch.Tensor], strides: list[tuple[int, ...]]) -> fx.GraphModule:
    """A graph that casts its inputs, with the tensors in its notes, as a trace has them."""
    graph = fx.Graph()
    operands = [graph.placeholder(f"x_{place}") for place in range(len(tensors))]
    together = graph.call_function(cast_together, (operands, torch.bfloat16, strides))
    graph.output([graph.call_function(operator.getitem, (together, place)) for place in range(len(tensors))])
    for node, tensor in zip(operands, tensors, strict=True):
        node.meta["val"] = tensor
    return fx.GraphModule({}, graph)


def test_casts_have_their_strides_also_where_an_axis_of_one_element_has_others() -> None:
    weights = [torch.randn(4, 3, 1, 1), torch.randn(4, 3, 2, 2), torch.randn(5)]
    strides = [(3, 1, 3, 3), (12, 4, 2, 1), (1,)]
    module = casting(weights, strides)
    direct = with_direct_calls(module)
    assert cast_into in {node.target for node in direct.graph.nodes}
    assert cast_together in {node.target for node in module.graph.nodes}  # which stays as it is
    found = direct(*weights)
    for ours, theirs, wanted, x in zip(found, module(*weights), strides, weights, strict=True):
        assert torch.equal(ours, x.to(torch.bfloat16)) and torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride() == wanted


def test_a_graph_without_such_calls_is_itself() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.relu.default, (x,)))
    module = fx.GraphModule({}, graph)
    assert with_direct_calls(module) is module


def calling(target: Callable[..., Any], tensors: list[torch.Tensor], *others: Any) -> fx.GraphModule:
    """A graph that calls a kernel of its inputs, with the tensors in its notes."""
    graph = fx.Graph()
    operands = [graph.placeholder(f"x_{place}") for place in range(len(tensors))]
    for node, tensor in zip(operands, tensors, strict=True):
        node.meta["val"] = tensor
    graph.output(graph.call_function(target, (*operands, *others)))
    return fx.GraphModule({}, graph)


def directly(module: fx.GraphModule) -> fx.GraphModule:
    direct = with_direct_calls(module)
    direct.recompile()
    return direct


def of_a_norm(dtype: torch.dtype) -> list[torch.Tensor]:
    """What the gradient of a batch norm reads, channels_last: of its result, input, weight, mean, inverse deviation."""
    grad, x = (torch.randn(3, 8, 7, 5).to(memory_format=torch.channels_last, dtype=dtype) for _ in range(2))
    weight = torch.randn(8)
    _, mean, deviation = aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0.1, 1e-5)
    return [grad, x, weight, mean, deviation]


@pytest.mark.skipif("fma" not in cpu_features() or not levels(), reason="no native kernels, or of another arithmetic")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_the_kernel_of_a_batch_norms_gradient_is_chosen_once(
    dtype: torch.dtype, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = of_a_norm(dtype)
    target = batch_norm.backward_ if in_place else batch_norm.backward
    direct = directly(calling(target, tensors))
    monkeypatch.setenv(VARIABLE, "no such kernels")  # nothing is chosen any more
    whole = aten.native_batch_norm_backward(
        *tensors[:3], None, None, *tensors[3:], True, 0.0, [True, True, True]
    )  # before its gradient is written over
    found = direct(*tensors)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, whole, strict=True))
    assert found[0].stride() == whole[0].stride() and (found[0] is tensors[0]) == in_place


def test_where_no_native_kernel_runs_a_batch_norms_gradient_is_chosen_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    module = calling(batch_norm.backward, of_a_norm(torch.float32))
    assert with_direct_calls(module) is module


def test_what_stands_in_for_a_convolutions_input_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad, weight = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 4, 4), torch.randn(4, 3, 3, 3)
    options = [2, 2], [1, 1], [1, 1], False, [0, 0], 1
    module = calling(convolution.input_gradient, [grad, weight], list(x.shape), list(x.stride()), *options)
    direct = directly(module)
    monkeypatch.setattr(convolution, "_unread", None)
    whole = aten.convolution_backward(grad, x, weight, None, *options, [True, False, False])[0]
    assert torch.equal(direct(grad, weight), whole)
