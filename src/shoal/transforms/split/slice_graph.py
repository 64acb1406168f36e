"""The graph of a network whose first layers run on slices of the batch, joined where that ends.

Samples meet in batch norms only, which have the statistics of all slices; instance and group norms are each sample's
own. In between a slice is through before the next begins, so that what it needs comes and goes with it. A convolution
of a concatenation, as after the skips of a U-Net, is the sum of convolutions of its parts, so that nothing is
concatenated, and neither is a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.transforms.split.one_sample import with_strides
from shoal.transforms.split.part_graph import PartGraphBuilder, between_batch_norms
from shoal.transforms.split.sliced_batch_norm import sliced_batch_norm
from shoal.transforms.split.split_region import SplitRegion

_NORMS = (F.batch_norm, F.instance_norm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_NUMBERED: dict[Any, tuple[str, str, float]] = {
    F.elu: ("elu", "alpha", 1.0),
    F.leaky_relu: ("leaky_relu", "negative_slope", 0.01),
}


def slice_graph(root: nn.Module, graph: fx.Graph, region: SplitRegion, samples: int, slices: int) -> fx.GraphModule:
    """Build it.

    Args:
        root: the network, whose layers the result calls.
        graph: of the whole network.
        region: what runs slice by slice.
        samples: in the batch.
        slices: into how many parts it is cut, which differ by one sample at most.
    """
    cuts = [number * samples // slices for number in range(slices + 1)]
    return _SliceGraphBuilder(root, graph, region, list(pairwise(cuts))).build()


def convolve_parts(parts: Sequence[torch.Tensor], layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> torch.Tensor:
    """Replaces `layer(torch.cat(parts, 1))`; equal to rounding.

    >>> layer = nn.Conv1d(2, 1, 1, bias=False)
    >>> _ = nn.init.ones_(layer.weight)
    >>> convolve_parts([torch.ones(1, 1, 2), torch.ones(1, 1, 2)], layer).detach()
    tensor([[[2., 2.]]])
    """
    total, begin = None, 0
    for x in parts:
        weight = layer.weight.narrow(1, begin, x.shape[1])
        y = layer._conv_forward(x, weight, layer.bias if begin == 0 else None)
        total, begin = y if total is None else total + y, begin + x.shape[1]
    assert total is not None
    return total


def activation_behind(node: fx.Node) -> tuple[fx.Node | None, str]:
    """The only reader of a norm that can be done with it, and its name for `sliced_batch_norm`; "" for nothing."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    if reader is None:
        return None, ""
    if reader.target in _RELUS:
        return reader, "relu"
    if reader.target not in _NUMBERED:
        return None, ""
    name, keyword, default = _NUMBERED[reader.target]
    number: Any = reader.args[1] if len(reader.args) > 1 else reader.kwargs.get(keyword, default)
    positive = isinstance(number, (int, float)) and number > 0
    return (reader, f"{name} {float(number)}") if positive else (None, "")


def ones_of_channels(x: torch.Tensor, samples: int) -> torch.Tensor:
    """Ones of (samples, C, 1, ...), as `x` is, which has that many samples or some of them."""
    return x.new_ones((samples, x.shape[1], *[1] * (x.dim() - 2)))


class _SliceGraphBuilder(PartGraphBuilder):
    def __init__(self, root: nn.Module, graph: fx.Graph, region: SplitRegion, spans: list[tuple[int, int]]) -> None:
        super().__init__(root, graph)
        self.region, self.spans = region, spans
        self.outside: dict[fx.Node, fx.Node] = {}
        self.slice_of: dict[tuple[fx.Node, int], fx.Node] = {}
        self.factors: dict[fx.Node, fx.Node] = {}  # of dropouts
        self.done: set[fx.Node] = set()  # ReLUs that a batch norm does
        self.in_parts = {node for node in region.nodes if self._is_convolved_in_parts(node)}

    def build(self) -> fx.GraphModule:
        order = list(self.graph.nodes)
        read_by_all = self._read_by_all()
        for node in order:
            if node.op in ("placeholder", "get_attr") or node in read_by_all:
                self.outside[node] = self.out.node_copy(node, self.outside.__getitem__)
        source = self.outside[self.region.source]
        for number, (begin, end) in enumerate(self.spans):
            some = self.out.call_function(torch.narrow, (source, 0, begin, end - begin))
            self.slice_of[self.region.source, number] = some
        for stretch in between_batch_norms(self.region.nodes):
            if self.region.nodes[stretch[0]] == "batch norm":
                self._normalise(stretch[0])
                continue
            for number in range(len(self.spans)):
                for node in stretch:
                    self._copy(node, number)
        for node in self.region.leaving:
            parts = [self.slice_of[node, number] for number in range(len(self.spans))]
            self.outside[node] = self.out.call_function(torch.cat, (parts, 0))
        for node in order:
            if node not in self.outside and node not in self.region.nodes:
                self.outside[node] = self.out.node_copy(node, self.outside.__getitem__)
        return self.module("SliceGraph")

    def _read_by_all(self) -> set[fx.Node]:
        """What is computed only of parameters for all slices, once, before the first of them."""
        found: set[fx.Node] = set()
        ahead = [operand for node in self.region.nodes for operand in node.all_input_nodes]
        while ahead:
            node = ahead.pop()
            if node.op not in ("placeholder", "get_attr") and node not in self.region.nodes and node not in found:
                found.add(node)
                ahead += node.all_input_nodes
        return found

    def _copy(self, node: fx.Node, number: int) -> None:
        def operand(needed: fx.Node) -> fx.Node:
            return self.slice_of.get((needed, number)) or self.outside[needed]

        if node in self.in_parts:
            return
        source = node.all_input_nodes[0]
        if source in self.in_parts:
            arguments = [operand(part) for part in source.all_input_nodes], self.layer(str(node.target))
            self.slice_of[node, number] = self.out.call_function(convolve_parts, arguments)
        elif node in self.done:
            self.slice_of[node, number] = operand(node.all_input_nodes[0])
        elif self.region.nodes[node] == "feature dropout":
            begin, end = (
                at * int(node.meta["example_value"].shape[0]) // self.spans[-1][1] for at in self.spans[number]
            )
            if number == 0:
                self.factors[node] = self._drawn(node, operand(source))
            factors = self.out.call_function(torch.narrow, (self.factors[node], 0, begin, end - begin))
            self.slice_of[node, number] = self.out.call_function(operator.mul, (operand(source), factors))
        elif self.region.nodes[node] == "reshape":
            begin, end = self.spans[number]
            rows, *others = node.meta["example_value"].shape
            sizes = rows * (end - begin) // self.spans[-1][1], *others
            self.slice_of[node, number] = self.out.call_method("reshape", (operand(source), sizes))
        elif self.spans[number][1] - self.spans[number][0] == 1 and self._is_norm(node):
            read = operand(node.all_input_nodes[0])
            strided = self.out.call_function(with_strides, (read,))
            norm = self.out.node_copy(node, lambda needed: strided if operand(needed) is read else operand(needed))
            by_sample = node.target is F.instance_norm
            self.slice_of[node, number] = self.out.call_function(with_strides, (norm, by_sample))
        else:
            self.slice_of[node, number] = self.out.node_copy(node, operand)

    def _drawn(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """What a dropout multiplies the channels of all samples with, drawn as it does."""
        ones = self.out.call_function(ones_of_channels, (like, int(node.meta["example_value"].shape[0])))
        return self.out.node_copy(node, lambda _: ones)

    def _is_norm(self, node: fx.Node) -> bool:
        called = self.modules.get(str(node.target)) if node.op == "call_module" else node.target
        return isinstance(called, _BatchNorm) or called in _NORMS

    def _is_convolved_in_parts(self, node: fx.Node) -> bool:
        """Whether it is a concatenation of different tensors that only convolutions read, none of them in groups."""
        if self.region.nodes[node] != "concatenation" or len(node.all_input_nodes) != len(node.args[0]):  # type: ignore[arg-type]
            return False
        readers = [self.modules.get(str(user.target)) if user.op == "call_module" else None for user in node.users]
        inside = all(user in self.region.nodes for user in node.users)
        return inside and all(type(one) in _CONVOLUTIONS and one.groups == 1 for one in readers)  # type: ignore[union-attr]

    def _normalise(self, node: fx.Node) -> None:
        slices = [self.slice_of[node.all_input_nodes[0], number] for number in range(len(self.spans))]
        reader, activation = activation_behind(node)
        if reader not in self.region.nodes:
            activation = ""
        if activation and reader is not None:
            self.done.add(reader)
        results = self.out.call_function(sliced_batch_norm, (slices, self.layer(str(node.target)), activation))
        for number in range(len(self.spans)):
            self.slice_of[node, number] = self.out.call_function(operator.getitem, (results, number))
