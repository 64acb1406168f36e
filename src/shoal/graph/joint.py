"""The joint graph of a step's forward and backward pass, as it is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from shoal.graph.fx_nodes import describe_as


class Joint:
    """A joint graph that is edited in place.

    Args:
        module: the graph.
        backward: its nodes that belong to the backward pass.
        runs_here: whether the step will run on the device that it is captured on.

    Attributes:
        graph: of `module`.
        backward: as given; new nodes are added.
        runs_here: as given.
    """

    def __init__(self, module: fx.GraphModule, backward: set[fx.Node], *, runs_here: bool = True) -> None:
        self.module = module
        self.graph: fx.Graph = module.graph
        self.backward = backward
        self.runs_here = runs_here

    def find(self, target: Callable[..., Any]) -> list[fx.Node]:
        """The nodes that call a function, in order."""
        return list(self.graph.find_nodes(op="call_function", target=target))

    def called(self) -> dict[str, fx.Node]:
        """The nodes by their names."""
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

    def erase_unread(self, *nodes: Any) -> None:
        """Erase those of the nodes that nothing reads, one after the other."""
        for node in dict.fromkeys(nodes):
            if isinstance(node, fx.Node) and not node.users:
                self.graph.erase_node(node)

    def stand_for_slice(self, taken: fx.Node, part: fx.Node) -> None:
        """Put `part`, dense, in place of a slice, and of the copies that made it dense if nothing else reads it."""
        copies = [user for user in taken.users if user.target is torch.ops.aten.clone.default]
        for copy in copies if len(copies) == len(taken.users) else ():
            self.replace(copy, part)
        self.replace(taken, part)
