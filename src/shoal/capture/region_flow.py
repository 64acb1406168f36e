"""Who reads whose results in a joint graph, with views looked through: what regions are chosen by."""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shoal.capture.fx_nodes import is_view


def is_op(node: fx.Node) -> bool:
    """Whether the node computes: it is no input, view, part of a result, or size."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return False
    return any(isinstance(value, torch.Tensor) for value in tree_leaves(node.meta.get("val")))


def source(node: fx.Node) -> fx.Node:
    """The op or input whose result a node is, or is a part or view of."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node)):
        first: Any = node.args[0]
        node = first
    return node


def value_bytes(node: fx.Node) -> int:
    """Bytes of all tensors of a node."""
    tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors)


class Flow:
    """The ops of a joint graph, in order.

    Args:
        graph: the joint graph.
        backward_names: names of its backward nodes.
    """

    def __init__(self, graph: fx.Graph, backward_names: Collection[str]) -> None:
        self.graph = graph
        self.place = {node: number for number, node in enumerate(graph.nodes)}
        self.ops = [node for node in graph.nodes if is_op(node)]
        self.backward = {node for node in self.ops if node.name in backward_names}
        self._backward_names = backward_names

    @cached_property
    def reads(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Op → ops and inputs that it reads."""
        return {
            node: tuple(dict.fromkeys(source(operand) for operand in node.all_input_nodes if is_tensor(operand)))
            for node in self.ops
        }

    @cached_property
    def readers(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """Op or input → ops that read it, in order."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node, operands in self.reads.items():
            for operand in operands:
                found.setdefault(operand, []).append(node)
        return {node: tuple(readers) for node, readers in found.items()}

    @cached_property
    def handed_out(self) -> set[fx.Node]:
        """Ops of which the caller gets a result."""
        return {source(node) for node in self.graph.output_node().all_input_nodes}


def is_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or several."""
    return any(isinstance(value, torch.Tensor) for value in tree_leaves(node.meta.get("val")))
