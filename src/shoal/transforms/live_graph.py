"""A graph as a module that calls a network's layers and reads its parameters as they are at every call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn


def live_graph(network: nn.Module, graph: fx.Graph, added: Mapping[str, nn.Module], name: str) -> fx.GraphModule:
    """Replaces `torch.fx.GraphModule(network, graph)`, which keeps the parameters and buffers that it finds.

    A buffer that is moved to another dtype or device is another tensor; so is a parameter that is loaded by
    `load_state_dict(assign=True)` or that `torch.func.functional_call` stands another in for.

    Args:
        network: whose layers, parameters and buffers the graph names.
        graph: it is changed: parameters and buffers that it reads itself become calls of modules.
        added: modules that the network does not have, by the names under which the graph calls them.
        name: of the class.

    >>> scaled = nn.Module()
    >>> scaled.factor = nn.Buffer(torch.ones(1))
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.get_attr("factor"))
    >>> live = live_graph(scaled, graph, {}, "Live")
    >>> scaled.factor = torch.zeros(1)
    >>> live()
    tensor([0.])
    """
    called: dict[str, object] = dict(added)
    named = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    reads: dict[str, str] = {}  # names of ours by path
    for node in list(graph.nodes):
        node.type = None  # annotations that are strings would keep it from being saved
        target = str(node.target)
        if node.op not in ("call_module", "get_attr") or target in added:
            continue
        value = attribute_at(network, target)
        if node.op == "call_module" or not isinstance(value, torch.Tensor):
            called[target] = value
            continue
        if target not in reads:
            free = f"read_{target.replace('.', '_')}"  # `_graph`, `_code` and others have a meaning in a graph module
            while free in called or free in named:
                free += "_"
            reads[target], called[free] = free, _Attribute(network, target)
        with graph.inserting_before(node):
            read = graph.call_module(reads[target])
        read.meta.update(node.meta)
        node.replace_all_uses_with(read)
        graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(called, graph, name)


class _Attribute(nn.Module):
    """A parameter or a buffer, read when it is wanted."""

    def __init__(self, network: nn.Module, path: str) -> None:
        super().__init__()
        self._network, self._path = (network,), path  # in a tuple, so that it is not a child

    def forward(self) -> object:
        return attribute_at(self._network[0], self._path)


def attribute_at(network: nn.Module, path: str) -> object:
    """`operator.attrgetter(path)(network)`, in a form that every compiler follows.

    >>> attribute_at(nn.Sequential(nn.ReLU()), "0.training")
    True
    """
    value: object = network
    for part in path.split("."):
        value = getattr(value, part)
    return value
