"""Graphs of a network some of whose layers run part by part: what the builders of slices, slabs and patches share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from torch import fx, nn

from shoal.transforms.live_graph import attribute_at


class PartGraphBuilder:
    """Writes the graph, which calls the layers of the network.

    Attributes:
        graph: of the whole network.
        modules: of the network, by name.
        out: what is written.
        added: modules that `out` calls and the network does not have, by name.

    Args:
        root: the network.
        graph: of it.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.graph, self.modules = graph, dict(root.named_modules())
        self.out = fx.Graph()
        self.added: dict[str, nn.Module] = {}
        self._root = root
        self._layers: dict[str, fx.Node] = {}

    def layer(self, name: str) -> fx.Node:
        """What reads a layer as a value, before all calls."""
        if name not in self._layers:
            first = next(n for n in self.out.nodes if n.op != "placeholder")
            with self.out.inserting_before(first):
                self._layers[name] = self.out.create_node("get_attr", name)
        return self._layers[name]

    def module(self, name: str) -> fx.GraphModule:
        """A module of that class that runs what was written."""
        self.out.lint()
        called = {str(node.target) for node in self.out.nodes if node.op in ("call_module", "get_attr")}
        own = {path: attribute_at(self._root, path) for path in called - self.added.keys()}
        return fx.GraphModule({**own, **self.added}, self.out, name)


def between_batch_norms(nodes: Mapping[fx.Node, str]) -> Iterator[list[fx.Node]]:
    """The nodes of a region, each with what it is, in order: those between two batch norms, and each batch norm."""
    number, keys = 0, {}
    for node, kind in nodes.items():
        number += kind == "batch norm"
        keys[node] = (number, kind == "batch norm")
    for _, group in groupby(nodes, key=keys.__getitem__):
        yield list(group)
