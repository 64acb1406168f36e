"""Calls of a graph that has run, without what each of them would find out again: regions of CUDA, and casts."""

from __future__ import annotations

from typing import Any

from torch import fx

from shoal.capture.fx_nodes import copied_joint
from shoal.kernels.casts import cast_into, cast_together
from shoal.kernels.compiled_region import CompiledRegion
from shoal.lowlevel.torch_state import new_view


def with_direct_calls(module: fx.GraphModule) -> fx.GraphModule:
    """The graph with its regions as the launches of their kernels, and its casts of several without looks at layouts.

    Args:
        module: a graph that has run, whose inputs and results have the layouts of the tensors in `meta["val"]`.

    Returns:
        The graph, or `module` itself where it has no such call.
    """
    if not any(_is_gathered_cast(node) or _launches(node) is not None for node in module.graph.nodes):
        return module
    direct = copied_joint(module)
    for node in list(direct.graph.nodes):
        if _is_gathered_cast(node):
            _cast_directly(direct.graph, node)
        elif (launches := _launches(node)) is not None:
            node.target = launches
    return direct


def _launches(node: fx.Node) -> Any:
    return node.target.launches() if isinstance(node.target, CompiledRegion) and not node.kwargs else None


def _is_gathered_cast(node: fx.Node) -> bool:
    if node.target is not cast_together or node.kwargs:
        return False
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    return all(type(number) is int for value in values for number in (*value.shape, *value.stride()))


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
