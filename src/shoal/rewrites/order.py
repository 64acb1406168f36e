"""What is computed early but read late moves to just before its first reader."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from shoal.graph.fx_nodes import is_view, reaches_output
from shoal.graph.joint import Joint
from shoal.kernels.norm import joined_statistics

_aten = torch.ops.aten
_registered = joined_statistics
_OF_SLICES = (torch.ops.shoal.sliced_norm.default, torch.ops.shoal.sliced_norm_gradient.default)
_WITH_SLICES = (_aten.convolution.default, _aten.constant_pad_nd.default, _aten.cat.default)
Move = tuple[fx.Node, fx.Node]  # a node, and what it is to stand before


def made_of_forward(joint: Joint) -> Iterator[Move]:
    """What the backward pass makes of forward tensors only."""
    graph, backward = joint.graph, joint.backward
    fed: set[fx.Node] = {n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")}
    last = len(graph.nodes)
    place: dict[fx.Node, tuple[int, ...]] = {}  # compares as the order in the graph does
    for number, node in enumerate(graph.nodes):
        place[node] = (number, last)
        if node in backward and any(operand in fed for operand in node.all_input_nodes):
            fed.add(node)
    for turn, node in enumerate(reversed(list(graph.nodes))):
        if node in backward and node not in fed and node.users:
            first = min(node.users, key=place.__getitem__)
            yield node, first
            place[node] = (*place[first][:-1], turn, last)  # after what was moved there earlier


def slices(joint: Joint) -> Iterator[Move]:
    """The pass over each slice or slab of a norm, within its pass of the step.

    What only it reads there comes with it, but for what is drawn.
    """
    backward = joint.backward
    if not any(joint.find(target) for target in _OF_SLICES):
        return
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    moved: set[fx.Node] = set()
    for node in reversed(list(joint.graph.nodes)):
        readers = [user for user in node.users if (user in backward) == (node in backward) and user in order]
        sinks = node.target in _OF_SLICES or (
            node.op == "call_function"
            and node not in backward
            and len(readers) == 1
            and readers[0] in moved
            and (is_view(node) or node.target in _WITH_SLICES)
        )
        if sinks and readers and not reaches_output(node):
            first = min(readers, key=order.__getitem__)
            yield node, first
            order[node] = order[first]
            moved.add(node)


def move(joint: Joint, site: Move) -> None:
    """Move it there."""
    node, first = site
    first.prepend(node)
