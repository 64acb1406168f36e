"""Calls of a graph that has run, without what each would find out again: CUDA's regions, casts, kernels of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import copied_joint
from shoal.kernels import batch_norm, convolution
from shoal.kernels.casts import cast_into, cast_together
from shoal.kernels.compiled_region import CompiledRegion
from shoal.kernels.pieces import are_sizes_known
from shoal.lowlevel.torch_state import new_view


def with_direct_calls(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with its regions as the launches of their kernels, its casts of several without looks at layouts, and
    the kernel of a batch norm's gradient, and what stands in for a convolution's input, chosen once.

    Args:
        module: a graph that has run, whose inputs and results have the layouts of the tensors in `meta["val"]`.

    Returns:
        The graph, or `module` itself where it has no such call.
    """
    changed = {node.name: call for node in module.graph.nodes if (call := _direct(node)) is not None}
    if not changed:
        return module
    direct = copied_joint(module)
    for node in list(direct.graph.nodes):
        if node.target is cast_together and node.name in changed:
            _cast_directly(direct.graph, node)
        elif node.name in changed:
            node.target = changed[node.name]
    return direct


def _direct(node: fx.Node) -> Any:
    """What a node calls instead, given the same arguments; None: what it calls."""
    if node.kwargs:
        return None
    if node.target is cast_together:
        return cast_into if _has_fixed_sizes(node) else None
    if isinstance(node.target, CompiledRegion):
        return node.target.launches()
    resolve = _RESOLVED.get(node.target) if node.op == "call_function" else None
    if resolve is None or not _has_fixed_sizes(node):
        return None
    return resolve(*fx.node.map_arg(node.args, lambda operand: operand.meta["val"]))


# Kernels that look at layouts before they run → how what they would run is found once.
_RESOLVED: dict[Any, Callable[..., Callable[..., Any] | None]] = {
    batch_norm.backward: lambda grad, x, weight, *_: batch_norm.resolved_backward(grad, x, weight),
    batch_norm.backward_: lambda grad, x, weight, *_: batch_norm.resolved_backward(grad, x, weight, overwrite=True),
    convolution.input_gradient: convolution.resolved_input_gradient,
}


def _has_fixed_sizes(node: fx.Node) -> bool:
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    return all(isinstance(value, torch.Tensor) for value in values) and are_sizes_known(*values)


def _cast_directly(graph: fx.Graph, node: fx.Node) -> None:
    operands: Any
    strides: Any
    operands, dtype, strides = node.args
    read: list[fx.Node] = []
    for operand, wanted in zip(operands, strides, strict=True):
        value = operand.meta["val"]
        if value.stride() != tuple(wanted):  # along an axis of one element
            with graph.inserting_before(node):
                operand = graph.call_function(new_view, (operand, tuple(value.shape), tuple(wanted), 0))
            operand.meta["val"] = value
        read.append(operand)
    layouts = [(tuple(x.meta["val"].shape), tuple(each), dtype) for x, each in zip(read, strides, strict=True)]
    node.target, node.args = cast_into, (read, layouts)
