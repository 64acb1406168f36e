"""Calls that find nothing out again give the values and layouts of those that they are in place of."""

from __future__ import annotations

import operator

import torch
from torch import fx

from shoal.engine.direct_calls import with_direct_calls
from shoal.kernels.casts import cast_into, cast_together


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
