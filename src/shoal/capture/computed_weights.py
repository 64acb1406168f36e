"""What a graph of Dynamo's computes of parameters and buffers only, before any layer runs: the weights of layers.

`weight_norm`, `spectral_norm`, pruning and weight standardisation compute the weight of a convolution in every forward
pass. It is the same for all samples and for all places of an image, so a rewrite that runs the layer several times
computes it once, and its gradient is the sum over these runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.nn import functional as F

from shoal.capture.autocast_regions import autocasts_of
from shoal.transforms.writes import Writes

_DRAW = ("dropout", "attention", "gumbel")  # functions of torch.nn.functional that have no operator of their own


def computed_of_state(graph: fx.Graph, state: Iterable[fx.Node], images: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The calls whose results no image changes, with the calls that switch gradients off and on for them.

    All of them can run before the other calls, in their order: the writes into buffers and the random numbers are then
    those of the model.

    Args:
        graph: of Dynamo's.
        state: its inputs that are parameters or buffers.
        images: its inputs that a call of the model gets.

    Returns:
        Nothing if another order would be noticed, or if other calls run without gradients.

    >>> graph = fx.Graph()
    >>> weight, x = graph.placeholder("weight"), graph.placeholder("x")
    >>> scaled = graph.call_function(torch.mul, (weight, 2.0))
    >>> output = graph.output(graph.call_function(torch.matmul, (x, scaled)))
    >>> computed_of_state(graph, [weight], [x])
    frozenset({mul})
    """
    of_state, of_images = set(state), set(images)
    for node in graph.nodes:
        if not of_images.isdisjoint(node.all_input_nodes):
            of_images.add(node)
        elif not of_state.isdisjoint(node.all_input_nodes):
            of_state.add(node)
    found = {node for node in of_state - of_images if node.op not in ("placeholder", "output")}
    for node in reversed(graph.nodes):  # and what is computed of nothing, such as a vector of ones
        if node.op != "placeholder" and not found.isdisjoint(node.users):
            found.add(node)
    switches = [node for node in graph.nodes if switches_gradients(node)]
    is_enabled = True
    for node in autocasts_of(graph):  # each call, without those that enter and leave autocast
        if node in switches:
            is_enabled = node.args == (True,)
        elif not is_enabled and node not in found and node.op != "placeholder":
            return frozenset()
    return frozenset() if _is_noticed(graph, found) else frozenset(found.union(switches))


def switches_gradients(node: fx.Node) -> bool:
    """Whether it is what `torch.no_grad` or `torch.enable_grad` does where it begins or ends."""
    return node.op == "call_function" and "grad_enabled" in getattr(node.target, "__name__", "")


def _is_noticed(graph: fx.Graph, first: set[fx.Node]) -> bool:
    """Whether it has an effect that these run before all others: one writes what another reads, or both draw."""
    writes, has_drawn = Writes(graph, {}), False
    for node in graph.nodes:
        others = (reader for reader in writes.other_readers(node) if reader.op != "output")
        if node in first:
            if any(reader not in first and writes.is_before(reader, node) for reader in others):
                return True
            if has_drawn and _draws(node):
                return True
        else:
            has_drawn = has_drawn or _draws(node)
            if any(reader in first and writes.is_before(node, reader) for reader in others):
                return True
            if any(not first.isdisjoint(statistics.users) for statistics in _moved_statistics(node)):
                return True
    return False


def _moved_statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm may write into, which `Writes` does not list."""
    if node.target not in (F.batch_norm, F.instance_norm):
        return []
    given = {**dict(zip(("input", "running_mean", "running_var"), node.args, strict=False)), **node.kwargs}
    statistics = (given.get(name) for name in ("running_mean", "running_var"))
    return [one for one in statistics if isinstance(one, fx.Node)]


def _draws(node: fx.Node) -> bool:
    """Whether it may draw random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    is_tagged = any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)
    return is_tagged or any(part in name for part in _DRAW)
