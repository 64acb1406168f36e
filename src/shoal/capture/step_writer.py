"""A captured step that is rewritten: new nodes among those of a copy, which is read as a step again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from shoal.capture.captured import Captured
from shoal.capture.fx_nodes import copied_joint, describe_as
from shoal.capture.step_reader import read_joint


class StepWriter:
    """Writes into a copy of a step's joint graph; the step stays as it is.

    Attributes:
        graph: the copy.
        backward: those of its nodes that belong to the backward pass, views included.
    """

    def __init__(self, captured: Captured) -> None:
        self._joint = copied_joint(captured.joint)
        self._read_with = captured.read_with
        self.graph: fx.Graph = self._joint.graph
        self.backward: set[fx.Node] = set()
        for node in self.graph.nodes:
            is_op = node.name in captured.node_of
            if node.name in captured.backward_names or not (is_op or self.backward.isdisjoint(node.all_input_nodes)):
                self.backward.add(node)

    def called(self) -> dict[str, fx.Node]:
        """Its nodes by their names."""
        return {node.name: node for node in self.graph.nodes}

    def call(
        self,
        before: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        value: Any,
        like: fx.Node,
        name: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """A new node.

        Args:
            before: what it stands before.
            target, args, kwargs: the call.
            value: what it returns, as fake tensors.
            like: whose place in the model it has, and in whose pass of the step it runs.
            name: of it.
        """
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, dict(kwargs or {}), name)
        describe_as(node, value, like)
        if like in self.backward:
            self.backward.add(node)
        return node

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let another node stand for one."""
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def read(self) -> Captured:
        """The step that the copy is now."""
        self.graph.lint()
        return read_joint(self._joint, {node.name for node in self.backward}, self._read_with)
