"""Dense blocks in a fused network's graph: layers that read all before them become one op over one buffer.

Found by structure: a layer is a chain of fused convolutions whose first reads the channels of all earlier layers and
whose last is what later layers read as well.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from shoal.transforms.fuse.fused_layers import Affine, Convolve, DenseBlock, Measure, Moments
from shoal.transforms.fuse.fusion_size import FusionSize


@dataclass(frozen=True)
class _Link:
    """One fused convolution with its batch norm, in the graph."""

    norm: fx.Node
    conv: fx.Node
    y: fx.Node
    moments: fx.Node
    affine: Affine
    convolve: Convolve

    def reads(self) -> list[fx.Node]:
        return _nodes(self.norm.args[0])

    def reads_moments(self) -> list[fx.Node]:
        return _nodes(self.norm.args[1])


def join_dense_blocks(graph: fx.Graph, added: dict[str, nn.Module], size: FusionSize) -> list[tuple[str, str]]:
    """Replace every dense block of the graph by one call.

    Args:
        graph: of fused layers; it is changed.
        added: the modules that it calls by name; the blocks come to them.
        size: decides which maps are too small.

    Returns:
        The names of the first and the last convolution of each block.
    """
    links = [link for node in graph.nodes if (link := _link(node, added)) is not None]
    by_conv = {link.conv: link for link in links}
    by_reads = {tuple(link.reads()): link for link in links}
    taken: set[fx.Node] = set()
    names = []
    for link in links:
        layers = [] if link.conv in taken else list(_layers(link, by_conv, by_reads))
        if len(layers) < 2:
            continue
        taken.update(one.conv for layer in layers for one in layer)
        names.append((str(link.conv.target), str(layers[-1][-1].conv.target)))
        _replace(graph, added, layers, size, f"dense_block_{len(names)}")
    return names


def _link(conv: fx.Node, added: dict[str, nn.Module]) -> _Link | None:
    """The step of a dense block that `conv` may be."""
    convolve = added.get(str(conv.target)) if conv.op == "call_module" else None
    norm = conv.args[1] if len(conv.args) > 1 else None
    if not isinstance(convolve, Convolve) or not isinstance(norm, fx.Node) or list(norm.users) != [conv]:
        return None
    affine, layer, window = added.get(str(norm.target)), convolve.layer, convolve.window
    if not isinstance(affine, Affine) or affine.layer.weight is None or affine.layer.bias is None:
        return None
    if layer.bias is not None or window.groups != 1:
        return None
    centred = all(side % 2 and side // 2 == pad for side, pad in zip(layer.kernel_size, window.padding, strict=True))
    parts = {user.args[1]: user for user in conv.users}
    if not centred or set(window.stride) | set(window.dilation) != {1} or set(parts) != {0, 1}:
        return None
    link = _Link(norm, conv, parts[0], parts[1], affine, convolve)
    return link if link.reads() == _nodes(conv.args[0]) else None


def _layers(
    link: _Link, by_conv: dict[fx.Node, _Link], by_reads: dict[tuple[fx.Node, ...], _Link]
) -> Iterator[list[_Link]]:
    """The layers of the block that begins with `link`."""
    following: _Link | None = link
    steps = 0
    while following is not None:
        layer = _layer(following, by_conv)
        if not layer or (steps and len(layer) != steps):
            return
        yield layer
        steps = len(layer)
        moments = [*following.reads_moments(), layer[-1].moments]
        following = by_reads.get((*following.reads(), layer[-1].y))
        if following is not None and following.reads_moments() != moments:
            return


def _layer(link: _Link, by_conv: dict[fx.Node, _Link]) -> list[_Link]:
    """The chain that begins with `link`: each reads only what the one before made, and nothing else does."""
    chain = [link]
    while True:
        following = next((by_conv[user] for user in link.y.users if user in by_conv), None)
        if following is None or following.reads() != [link.y] or following.reads_moments() != [link.moments]:
            return chain
        if set(link.y.users) != {following.norm, following.conv} or set(link.moments.users) != {following.norm}:
            return chain
        chain.append(following)
        link = following


def _replace(
    graph: fx.Graph, added: dict[str, nn.Module], layers: list[list[_Link]], size: FusionSize, name: str
) -> None:
    first = layers[0][0]
    added[name] = DenseBlock([[(link.affine, link.convolve) for link in layer] for layer in layers], size)
    xs, moments = first.reads(), first.reads_moments()
    with graph.inserting_before(first.norm):
        both = graph.call_module(name, (xs, moments))
        features = graph.call_function(operator.getitem, (both, 0))
        measured = graph.call_function(operator.getitem, (both, 1))
    inside = {node for layer in layers for link in layer for node in (link.norm, link.conv, link.y, link.moments)}
    _read_whole(graph, inside, [*xs, *(layer[-1].y for layer in layers)], features)
    _read_whole(graph, inside, [*moments, *(layer[-1].moments for layer in layers)], measured)
    sweep, *others = moments
    if not others and isinstance(added.get(str(sweep.target)), Measure) and set(sweep.users) - inside == {both}:
        both.args = (xs, [None])  # nothing else wants them: the block measures what it reads
        inside.add(sweep)
    for layer in layers:
        start, end = layer[0].affine.layer.num_features, layer[-1]
        for whole, part, take in ((features, end.y, _channels), (measured, end.moments, _moments)):
            if set(part.users) - inside:
                with graph.inserting_after(measured):
                    taken = graph.call_function(take, (whole, start, end.convolve.layer.out_channels))
                part.replace_all_uses_with(taken, lambda user: user not in inside)
    for node in reversed([node for node in graph.nodes if node in inside]):
        graph.erase_node(node)


def _nodes(argument: Any) -> list[fx.Node]:
    return list(argument)


def _read_whole(graph: fx.Graph, inside: set[fx.Node], parts: list[fx.Node], whole: fx.Node) -> None:
    """Wherever all parts are read side by side from outside, read the whole."""
    for reader in graph.nodes:
        if reader not in inside and reader.op == "call_module":
            reader.args = tuple(_whole_in(argument, parts, whole) for argument in reader.args)


def _whole_in(argument: Any, parts: list[fx.Node], whole: fx.Node) -> Any:
    if not isinstance(argument, (list, tuple)):
        return argument
    found = list(argument)
    for at in range(len(found) - len(parts) + 1):
        if found[at : at + len(parts)] == parts:
            return [*found[:at], whole, *found[at + len(parts) :]]
    return argument


def _channels(features: torch.Tensor, start: int, width: int) -> torch.Tensor:
    return features.narrow(1, start, width)


def _moments(moments: Moments | None, start: int, width: int) -> Moments | None:
    if moments is None:
        return None
    mean, variance = moments
    return mean[start : start + width], variance[start : start + width]
