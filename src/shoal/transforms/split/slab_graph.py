"""The graph of a network whose large layers run on slabs along the first spatial dimension, one after another.

What is near the largest tensor, at the resolution of the images as a rule, is made slab by slab: the first layers of a
U-Net, and its last. A convolution reads its slab of the input with the rows around it, from the neighbouring slabs;
nothing is computed twice. Batch and instance norms have the statistics of all slabs. What is smaller runs whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from shoal.kernels.batch_norm_vectors import measures
from shoal.transforms.split.part_graph import PartGraphBuilder
from shoal.transforms.split.slice_graph import activation_behind, ones_of_channels
from shoal.transforms.split.sliced_batch_norm import measure, measure_samples, slab_instance_norm, sliced_batch_norm
from shoal.transforms.split.spatial_ops import is_feature_dropout, is_pointwise, is_transposed, windows_of
from shoal.transforms.writes import Writes, is_told_in_place, write_to_new_memory

_ROWS = 2  # the dimension that is cut
_LARGE = 1 / 6  # of the largest map
_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_INSTANCE_NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


@dataclass(frozen=True)
class SlabRegion:
    """What runs slab by slab.

    Attributes:
        kinds: each node with what it is, in the order in which they run.
        slabs: how many.
    """

    kinds: Mapping[fx.Node, str]
    slabs: int


def choose_slabs(graph: fx.Graph, modules: Mapping[str, nn.Module], slabs: int) -> SlabRegion | None:
    """The large layers of a network of images or volumes; None where none of them is a convolution.

    Args:
        graph: of the whole network, its nodes with `example_value`.
        modules: by name.
        slabs: into how many parts their rows are cut, which differ by one row at most.
    """
    able = {node: kind for node in graph.nodes if _is_map(node) and (kind := _kind(node, modules))}
    elems = {node: _elems(node) for node in able}
    large = {node for node, count in elems.items() if count >= max(1.0, _LARGE * max(elems.values()))}
    writes, kinds = Writes(graph, modules), dict[fx.Node, str]()
    for node, kind in able.items():
        is_near = node in large or any(operand in large and operand in kinds for operand in node.all_input_nodes)
        if not is_near or node.meta["example_value"].shape[_ROWS] < slabs or not writes.is_unnoticed(node):
            continue
        if all(_can_be_read(operand, node, kind) for operand in node.all_input_nodes):
            kinds[node] = kind
    return SlabRegion(kinds, slabs) if "convolution" in kinds.values() else None


def slab_graph(root: nn.Module, graph: fx.Graph, region: SlabRegion, *, twice: bool = False) -> fx.GraphModule:
    """Build it.

    Args:
        root: the network, whose layers the result calls.
        graph: of the whole network.
        region: of `choose_slabs`.
        twice: whether what only a norm reads is computed once to be measured, and again to be normalised, so that all
            its slabs are never there together.
    """
    return _SlabGraphBuilder(root, graph, region, twice).build()


def convolve_rows(x: torch.Tensor, layer: _ConvNd, before: int, after: int) -> torch.Tensor:
    """The rows of a convolution's result that some rows of its input make, with some rows of zeros around these."""
    if before or after:
        x = F.pad(x, (*[0, 0] * (x.dim() - _ROWS - 1), before, after))
    padding = (0, *(window.begin for window in windows_of(layer, x.dim() - 2)[1:]))
    run: Any = _CONVOLUTIONS[x.dim()]
    result: torch.Tensor = run(x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)
    return result


def _is_map(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() >= 4 and isinstance(value.shape[_ROWS], int)


def _kind(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """What an op is to slabs; "" where it cannot run on them."""
    layer = modules.get(str(node.target)) if node.op == "call_module" else None
    if isinstance(layer, _ConvNd):
        even = all(window.begin == window.end for window in windows_of(layer, _dims(node)))
        plain = not isinstance(layer, _ConvTransposeNd) and layer.padding_mode == "zeros"
        return "convolution" if plain and even else ""
    if isinstance(layer, _BatchNorm):
        return "batch norm" if measures(layer) else "pointwise"
    if layer is not None:
        return ""
    if is_transposed(node):
        return "transposed" if _given(node, _TRANSPOSED) is not None else ""
    if node.target is F.instance_norm:
        given = _given(node, _INSTANCE_NORM)
        plain = given is not None and given.get("running_mean") is None and given.get("use_input_stats", True) is True
        return "instance norm" if plain else ""
    if node.target in (torch.cat, torch.concat, torch.concatenate):
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        return "pointwise" if dim == 1 else ""
    if is_feature_dropout(node):
        return "feature dropout"
    if node.op == "call_method" and node.target == "repeat":
        times: Any = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
        same_dims = len(times) == _dims(node) + 2 and isinstance(node.args[0], fx.Node)
        return "pointwise" if same_dims and all(one == 1 for one in list(times)[_ROWS:]) else ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "pointwise" if is_pointwise(node) and not name.endswith("_") else ""


def _can_be_read(operand: fx.Node, node: fx.Node, kind: str) -> bool:
    """Whether a slab of the result needs some rows of an operand, or the same of it as every other."""
    value, result = operand.meta.get("example_value"), node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return operand.op in ("placeholder", "get_attr")
    if kind in ("convolution", "batch norm", "transposed", "instance norm") or isinstance(value, nn.Parameter):
        return value.dim() == result.dim() or isinstance(value, nn.Parameter)
    return value.dim() == 0 or (value.dim() == result.dim() and value.shape[_ROWS] in (1, result.shape[_ROWS]))


def _given(node: fx.Node, names: Sequence[str]) -> dict[str, Any] | None:
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given if given.keys() <= set(names) else None


def _dims(node: fx.Node) -> int:
    return int(node.meta["example_value"].dim()) - 2


def _elems(node: fx.Node) -> int:
    value = node.meta.get("example_value")
    return int(value.numel()) if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) else 0


def _each(value: Any, dims: int, default: int) -> list[int]:
    if value is None:
        value = default
    return [value] * dims if isinstance(value, int) else list(value)


class _SlabGraphBuilder(PartGraphBuilder):
    def __init__(self, root: nn.Module, graph: fx.Graph, region: SlabRegion, twice: bool) -> None:
        super().__init__(root, graph)
        self.kinds, self.slabs, self.twice = region.kinds, region.slabs, twice
        self.whole_of: dict[fx.Node, fx.Node] = {}
        self.slab_of: dict[tuple[fx.Node, int], fx.Node] = {}
        self.rows_of: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.masks: dict[fx.Node, fx.Node] = {}
        self.done: dict[fx.Node, fx.Node] = {}  # activations that a norm does

    def build(self) -> fx.GraphModule:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.whole_of[node] = self.out.node_copy(node)
        for node in self.graph.nodes:
            kind = self.kinds.get(node, "")
            if kind.endswith(" norm"):
                self._normalise(node, kind)
            elif kind == "feature dropout":
                self._draw(node)
            elif not kind and node not in self.whole_of:
                self.whole_of[node] = self.out.node_copy(node, self._whole)
        return self.module("SlabGraph")

    def _whole(self, node: fx.Node) -> fx.Node:
        if node not in self.whole_of:
            slabs = [self._slab(node, number) for number in range(self.slabs)]
            self.whole_of[node] = self.out.call_function(torch.cat, (slabs, _ROWS))
        return self.whole_of[node]

    def _bounds(self, node: fx.Node) -> list[tuple[int, int]]:
        rows = int(node.meta["example_value"].shape[_ROWS])
        return list(pairwise(number * rows // self.slabs for number in range(self.slabs + 1)))

    def _rows(self, node: fx.Node, begin: int, end: int) -> fx.Node:
        """Some rows of what a node makes."""
        key = node, begin, end
        if key not in self.rows_of:
            if node not in self.kinds:
                self.rows_of[key] = self._narrowed(self._whole(node), begin, end - begin)
            else:
                bounds = enumerate(self._bounds(node))
                near = [(n, max(begin, b), min(end, e), b, e) for n, (b, e) in bounds if b < end and e > begin]
                parts = []
                for n, first, last, b, e in near:
                    slab = self._slab(node, n)
                    parts.append(slab if (b, e) == (first, last) else self._narrowed(slab, first - b, last - first))
                one = len(parts) == 1
                self.rows_of[key] = parts[0] if one else self.out.call_function(torch.cat, (parts, _ROWS))
        return self.rows_of[key]

    def _narrowed(self, node: fx.Node, begin: int, rows: int) -> fx.Node:
        return self.out.call_function(torch.narrow, (node, _ROWS, begin, rows))

    def _slab(self, node: fx.Node, number: int) -> fx.Node:
        key = node, number
        if key not in self.slab_of:
            self.slab_of[key] = self._made(node, number)
        return self.slab_of[key]

    def _made(self, node: fx.Node, number: int) -> fx.Node:
        kind, (begin, end) = self.kinds[node], self._bounds(node)[number]
        if node in self.done:
            return self._slab(self.done[node], number)
        if kind == "convolution":
            return self._convolved(node, begin, end)
        if kind == "transposed":
            return self._upsampled(node, begin, end)
        if kind == "feature dropout":
            x: Any = node.args[0]
            factors = self._operand(node, begin, end)(x), self.masks[node]
            return self.out.call_function(operator.mul, factors)
        made = self.out.node_copy(node, self._operand(node, begin, end))
        if is_told_in_place(node):  # which has no visible effect
            write_to_new_memory(made)
        return made

    def _made_once_more(self, node: fx.Node, number: int) -> fx.Node:
        """A slab for one reader, from rows that are joined for it: none of them waits for another reader."""
        kept, self.rows_of = self.rows_of, {}
        made = self._made(node, number)
        self.rows_of = kept
        return made

    def _operand(self, node: fx.Node, begin: int, end: int) -> Any:
        rows = int(node.meta["example_value"].shape[_ROWS])

        def of(operand: fx.Node) -> fx.Node:
            value = operand.meta.get("example_value")
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or value.dim() <= _ROWS:
                return self._whole(operand)
            return self._rows(operand, begin, end) if value.shape[_ROWS] == rows else self._whole(operand)

        return of

    def _convolved(self, node: fx.Node, begin: int, end: int) -> fx.Node:
        layer: Any = self.modules[str(node.target)]
        source = node.all_input_nodes[0]
        length, window = int(source.meta["example_value"].shape[_ROWS]), windows_of(layer, _dims(node))[0]
        first, last = window.reads((begin, end), length)
        before, after = window.padding((first, last), (begin, end))
        x = self._rows(source, first, last)
        return self.out.call_function(convolve_rows, (x, self.layer(str(node.target)), before, max(0, after)))

    def _upsampled(self, node: fx.Node, begin: int, end: int) -> fx.Node:
        given = _given(node, _TRANSPOSED)
        assert given is not None
        dims, source = _dims(node), given["input"]
        kernel = given["weight"].meta["example_value"].shape[2]
        stride, padding = _each(given.get("stride"), dims, 1), _each(given.get("padding"), dims, 0)
        extra, dilation = _each(given.get("output_padding"), dims, 0), _each(given.get("dilation"), dims, 1)
        step, pad, reach = stride[0], padding[0], (kernel - 1) * dilation[0]
        length = int(source.meta["example_value"].shape[_ROWS])
        first, last = max(0, -(-(begin + pad - reach) // step)), min(length, (end - 1 + pad) // step + 1)
        made_first, made_last = first * step - pad, (last - 1) * step - pad + reach + 1
        own = [max(0, end - made_last), *extra[1:]]
        layer = [self._whole(one) if isinstance(one, fx.Node) else one for one in (given["weight"], given.get("bias"))]
        options = (stride, [0, *padding[1:]], own, given.get("groups", 1), dilation)
        run: Any = node.target
        made = self.out.call_function(run, (self._rows(source, first, last), *layer, *options))
        begin, rows = begin - made_first, end - begin
        is_all = (begin, rows) == (0, made_last + own[0] - made_first)
        return made if is_all else self._narrowed(made, begin, rows)

    def _normalise(self, node: fx.Node, kind: str) -> None:
        source = node.all_input_nodes[0]
        again = self.twice and len(source.users) == 1 and self.kinds.get(source) in ("convolution", "transposed")
        measured = []
        for number, (begin, end) in enumerate(self._bounds(node)):
            x = self._made_once_more(source, number) if again else self._rows(source, begin, end)
            measured.append(self.out.call_function(measure if kind == "batch norm" else measure_samples, (x,)))
        slabs = [self._rows(source, begin, end) for begin, end in self._bounds(node)]
        reader, activation = activation_behind(node)
        if reader is None or reader not in self.kinds:
            activation = ""
        if activation and reader is not None:
            self.done[reader] = node
        if kind == "batch norm":
            results = self.out.call_function(
                sliced_batch_norm, (slabs, self.layer(str(node.target)), activation, measured)
            )
        else:
            given = _given(node, _INSTANCE_NORM)
            assert given is not None
            vectors = [None if given.get(name) is None else self._whole(given[name]) for name in ("weight", "bias")]
            results = self.out.call_function(
                slab_instance_norm, (slabs, *vectors, given.get("eps", 1e-5), activation, measured)
            )
        for number in range(self.slabs):
            self.slab_of[node, number] = self.out.call_function(operator.getitem, (results, number))

    def _draw(self, node: fx.Node) -> None:
        """What a dropout of whole channels multiplies them with, drawn as it does."""
        source: Any = node.args[0]
        begin, end = self._bounds(node)[0]
        x = self._rows(source, begin, end)
        ones = self.out.call_function(ones_of_channels, (x, int(source.meta["example_value"].shape[0])))
        probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        dropout: Any = node.target
        self.masks[node] = self.out.call_function(dropout, (ones, probability, True))
