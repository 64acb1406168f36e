"""Who reads whose results in a joint graph, with views looked through: what regions are chosen by."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from torch import fx

from shoal.graph.fx_nodes import is_op, is_tensor, source


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
