"""Dynamo's graph as calls of layers: what `transforms` rewrite, without tracing the model a second time.

Dynamo has followed the model's own code, its hooks and its state, and guards all of it; a rewrite of its graph needs no
guards of its own. Its graph calls functions (`F.batch_norm`) with parameters that are inputs of the graph, or that it
computes of them, as `weight_norm` does. Here each convolution and each batch norm becomes a layer, whose parameters are
those values while the rewritten graph is traced. What computes them runs once, before the layer.

Where the model enters autocast, everything runs under what most layers run under. An op under another one stays a call
that enters it by itself, which no rewrite takes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from shoal.capture.autocast_regions import (
    Autocasts,
    InterpreterUnder,
    autocasts_of,
    is_affected,
    most_frequent,
    run_under,
)
from shoal.capture.computed_weights import computed_of_state, insert_weights, switches_gradients
from shoal.graph.fx_nodes import layer_path, module_path
from shoal.transforms.split.spatial_ops import is_transposed
from shoal.transforms.split.split_region import OF_PARAMETERS
from shoal.transforms.tracing import add_to_new_memory
from shoal.transforms.writes import is_in_place

_CONVOLUTIONS: dict[Any, Callable[..., _ConvNd]] = {
    torch.conv1d: nn.Conv1d,
    torch.conv2d: nn.Conv2d,
    torch.conv3d: nn.Conv3d,
}
_BATCH_NORMS: dict[int, type[_BatchNorm]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONVOLUTION_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_BATCH_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_VARIANT = "shoal_variant"


class Refused(Exception):
    """A graph is left as it is; its text is the reason, in one line."""


@dataclass(frozen=True)
class _Bound:
    """An attribute of a layer that is one of the values that a layered graph is run with."""

    layer: nn.Module
    attribute: str
    place: int


@dataclass(frozen=True)
class LayeredGraph:
    """A graph of Dynamo's whose convolutions and batch norms are calls of layers.

    Attributes:
        root: has the layers, under the names that they have in the model.
        graph: what is called; its inputs are those that no layer has. The images come first.
        bound: which values the layers have: the inputs of Dynamo's graph, then the results of `weights`.
        places: which of these values its inputs are.
        autocasts: what the graph runs under in addition to what its caller has entered.
        weights: computes the weights of layers, of the inputs of Dynamo's graph; None if all of them are inputs.
    """

    root: nn.Module
    graph: fx.Graph
    bound: tuple[_Bound, ...]
    places: tuple[int, ...]
    autocasts: Autocasts = ()
    weights: fx.GraphModule | None = None

    def layers(self, kind: type[nn.Module]) -> list[nn.Module]:
        """The layers of a kind, each once."""
        return [layer for layer in self.root.modules() if isinstance(layer, kind)]


def layered(gm: fx.GraphModule) -> LayeredGraph:
    """Read the layers out of a graph of Dynamo's.

    Raises:
        Refused: a part of it runs without gradients or as a graph of its own, which rewrites would take its layers out
            of, or writes in place under an autocast of its own.

    >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> def show(gm, inputs):
    ...     print([node.target for node in layered(gm).graph.find_nodes(op="call_module")])
    ...     return gm
    >>> _ = torch.compile(network, backend=show)(torch.ones(2, 3, 8, 8))
    ['0', '1']
    """
    return _LayeredReader(gm).read()


class _LayeredReader:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.value: dict[fx.Node, fx.Node] = {}
        self.inputs = list(gm.graph.find_nodes(op="placeholder"))
        self.place = {node: place for place, node in enumerate(self.inputs)}
        self.bound: list[_Bound] = []
        self.names: set[str] = set()
        self.known: dict[Any, str] = {}  # layers that are called more than once
        self.computed = frozenset[fx.Node]()  # what computes weights

    def read(self) -> LayeredGraph:
        autocasts = autocasts_of(self.gm.graph)
        self.computed = self._computed()
        most = most_frequent(under for node, under in autocasts.items() if self._may_be_layer(node))
        results = [node for node in autocasts if node in self.computed and not self.computed.issuperset(node.users)]
        self.place |= {node: place for place, node in enumerate(results, len(self.inputs))}
        weights = self._weights(autocasts, most, results) if self.computed else None
        layer_calls = {
            node: found
            for node, under in autocasts.items()
            if under == most and self._may_be_layer(node) and (found := self._layer(node)) is not None
        }
        needed = [node for node in self.place if self._is_read(node, layer_calls)]
        images = next((node for node in needed if node.op == "placeholder" and not is_of_a_module(node)), None)
        if images is not None:
            needed.remove(images)
            needed.insert(0, images)
        for node in needed:
            self.value[node] = self._copied(node) if node.op == "placeholder" else self._result(node)
        for node, under in autocasts.items():
            if node.op == "placeholder" or node in self.computed:
                continue
            if node in layer_calls:
                name, source = layer_calls[node]
                self.value[node] = self.graph.call_module(name, (self.value[source],))
                self.value[node].meta.update(node.meta)
            else:
                self.value[node] = self._call(node, under, most)
        add_to_new_memory(self.root, self.graph)
        places = tuple(self.place[node] for node in needed)
        return LayeredGraph(self.root, self.graph, tuple(self.bound), places, most, weights)

    def _computed(self) -> frozenset[fx.Node]:
        """What computes weights, if a convolution or a batch norm has one of these, or gradients are off for some."""
        nodes = self.gm.graph.nodes
        readers = [node for node in nodes if _is_layer(node) or is_transposed(node)]
        weights = {one for node in readers for one in node.all_input_nodes[1:] if one.op != "placeholder"}
        if not weights and not any(map(switches_gradients, nodes)):
            return frozenset()
        tensors = [node for node in self.inputs if isinstance(node.meta.get("example_value"), torch.Tensor)]
        state = [node for node in tensors if is_of_a_module(node)]
        return computed_of_state(self.gm.graph, state, [node for node in tensors if node not in state])

    def _weights(
        self, autocasts: Mapping[fx.Node, Autocasts], most: Autocasts, results: Sequence[fx.Node]
    ) -> fx.GraphModule:
        for node in self.inputs:
            self.value[node] = self._copied(node)
        for node, under in autocasts.items():
            if node in self.computed:
                self.value[node] = self._call(node, under, most)
        self.graph.output(tuple(self.value[node] for node in results))
        weights = fx.GraphModule(self.root, self.graph, "Weights")
        self.value, self.graph = {}, fx.Graph()
        return weights

    def _call(self, node: fx.Node, under: Autocasts, most: Autocasts) -> fx.Node:
        """A copy of what is no call of a layer."""
        if node in self.computed and switches_gradients(node):
            return self._copied(node)
        _check(node, self.gm)
        if node.op == "get_attr":
            setattr(self.root, str(node.target), getattr(self.gm, str(node.target)))
        is_own = under != most and is_affected(node)
        if is_own and is_in_place(node) and node not in self.computed:
            raise Refused(f"{node.name} writes in place under an autocast of its own")
        return run_under(node, under, self.value, self.graph) if is_own else self._copied(node)

    def _copied(self, node: fx.Node) -> fx.Node:
        return self.graph.node_copy(node, self.value.__getitem__)

    def _result(self, node: fx.Node) -> fx.Node:
        """The input of the graph that a computed value replaces."""
        result = self.graph.placeholder(node.name)
        result.meta = {**node.meta, OF_PARAMETERS: True}
        return result

    def _is_read(self, node: fx.Node, layer_calls: Mapping[fx.Node, tuple[str, fx.Node]]) -> bool:
        """Whether anything but layers reads an input, or a layer reads it as what it is called with."""
        readers = [user for user in node.users if user not in self.computed]
        return not node.users or any(user not in layer_calls or layer_calls[user][1] is node for user in readers)

    def _may_be_layer(self, node: fx.Node) -> bool:
        return _is_layer(node) and node not in self.computed

    def _layer(self, node: fx.Node) -> tuple[str, fx.Node] | None:
        """The name of the layer that a node calls, and what it is called with."""
        return self._convolution(node) if node.target in _CONVOLUTIONS else self._batch_norm(node)

    def _convolution(self, node: fx.Node) -> tuple[str, fx.Node] | None:
        given = _arguments(node, _CONVOLUTION_ARGUMENTS, _CONVOLUTION_DEFAULTS)
        if given is None or not self._are_known(given, "weight", "bias"):
            return None
        settings = [given[name] for name in ("stride", "padding", "dilation", "groups")]
        if any(isinstance(leaf, fx.Node) for leaf in _leaves(settings)):
            return None
        weight = given["weight"].meta["example_value"]
        kind = _CONVOLUTIONS[node.target]
        dims = weight.dim() - 2
        groups = given["groups"]

        def make() -> nn.Module:
            stride, padding, dilation = (
                value if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else (value,) * dims
                for value in settings[:3]
            )
            channels = weight.shape[1] * groups, weight.shape[0]
            return kind(
                *channels, tuple(weight.shape[2:]), stride, padding, dilation, groups, given["bias"] is not None,
                device="meta",
            )  # fmt: skip

        return self._called(node, given, ("weight", "bias"), make, (kind, *map(str, settings)))

    def _batch_norm(self, node: fx.Node) -> tuple[str, fx.Node] | None:
        defaults = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
        given = _arguments(node, _BATCH_NORM_ARGUMENTS, defaults)
        names = ("running_mean", "running_var", "weight", "bias")
        if given is None or not self._are_known(given, *names):
            return None
        training, momentum, eps = given["training"], given["momentum"], given["eps"]
        dims = given["input"].meta["example_value"].dim()
        if not isinstance(training, bool) or not isinstance(momentum, float) or dims not in _BATCH_NORMS:
            return None
        channels = given["input"].meta["example_value"].shape[1]

        def make() -> nn.Module:
            affine, tracks = given["weight"] is not None, given["running_mean"] is not None
            layer = _BATCH_NORMS[dims](channels, eps, momentum, affine, tracks, device="meta")
            layer.num_batches_tracked = None  # the graph adds to it by itself
            return layer.train(training)

        return self._called(node, given, names, make, (dims, training, momentum, eps))

    def _called(
        self,
        node: fx.Node,
        given: Mapping[str, Any],
        names: Sequence[str],
        make: Callable[[], nn.Module],
        settings: tuple[Any, ...],
    ) -> tuple[str, fx.Node]:
        key = (*settings, *(given[name] for name in names))
        known = self.known.get(key)
        if known is None or all(given[name] is None for name in names):
            layer = make()
            source = next((given[name] for name in names if given[name] is not None), None)
            known = self.known[key] = self._add(layer, source, node)
            for name in names:
                layer._parameters.pop(name, None)
                layer._buffers.pop(name, None)
                # A plain attribute: the layer owns no tensor. Outside of a run it is the example of the graph's input,
                # so that a rewrite that asks for it when it is built is answered as when it runs.
                example = None if given[name] is None else given[name].meta["example_value"]
                object.__setattr__(layer, name, example)
                if given[name] is not None:
                    self.bound.append(_Bound(layer, name, self.place[given[name]]))
        return known, given["input"]

    def _add(self, layer: nn.Module, source: fx.Node | None, node: fx.Node) -> str:
        """The layer's name in the model, where its parameters tell."""
        path = module_path(str(getattr(getattr(source, "_dynamo_source", None), "name", "")))
        path = path or (layer_path(node) if source in self.computed else "") or node.name
        # A layer that a function holds has no path only of modules: `__dict__` may be on it.
        path = ".".join(f"{part}_" if hasattr(nn.Module, part) else part for part in path.split("."))
        name, number = path, 1
        while name in self.names or any(other.startswith(f"{name}.") for other in self.names):
            number += 1
            name = f"{path}_{number}"
        self.names.add(name)
        *within, last = name.split(".")
        module = self.root
        for part in within:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            child = module._modules[part]
            assert child is not None
            module = child
        module.add_module(last, layer)
        return name

    def _are_known(self, given: Mapping[str, Any], *names: str) -> bool:
        """Whether these are inputs of the graph, computed of these only, or None."""
        return all(given[name] is None or given[name] in self.place for name in names)


def _is_layer(node: fx.Node) -> bool:
    """Whether it calls what may become a layer."""
    return node.op == "call_function" and (node.target in _CONVOLUTIONS or node.target is F.batch_norm)


def _arguments(node: fx.Node, names: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given if given.keys() == set(names) and isinstance(given["input"], fx.Node) else None


def _leaves(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield from _leaves(value)
        else:
            yield value


def is_of_a_module(node: fx.Node) -> bool:
    """Whether an input of a graph of Dynamo's is a parameter, a buffer or a number, not a tensor that a call gets."""
    name = str(getattr(getattr(node, "_dynamo_source", None), "name", ""))
    value = node.meta.get("example_value")
    return not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or "_buffers" in name


def _check(node: fx.Node, gm: fx.GraphModule) -> None:
    """Refuse what changes how the ops after it run."""
    if node.op == "get_attr" and not isinstance(getattr(gm, str(node.target), None), torch.Tensor):
        raise Refused(f"{node.target} is a graph of its own, such as a checkpointed part")
    name = getattr(node.target, "__name__", "")
    if node.op == "call_function" and any(part in name for part in ("grad_enabled", "inference_mode")):
        raise Refused("a part of it runs without gradients")


def as_dynamo_graph(
    gm: fx.GraphModule, source: LayeredGraph, rewritten: fx.GraphModule, first: Sequence[Any] = ()
) -> fx.GraphModule:
    """A rewritten graph, called as Dynamo's is: what is handed to AOTAutograd in its place.

    Args:
        gm: Dynamo's graph.
        source: what was read out of it.
        rewritten: a graph of the same layers.
        first: values that `rewritten` takes before its inputs.
    """
    if source.weights is not None:
        results: Any = source.weights.graph.find_nodes(op="output")[0].args[0]
        n_inputs = len(source.weights.graph.find_nodes(op="placeholder"))
        given = rewritten.graph.find_nodes(op="placeholder")[len(first) :]
        read = {
            node: results[place - n_inputs]
            for node, place in zip(given, source.places, strict=True)
            if place >= n_inputs
        }
        bound = [
            (one.layer, one.attribute, results[one.place - n_inputs]) for one in source.bound if one.place >= n_inputs
        ]
        insert_weights(rewritten, source.weights, read, bound)
    for node in rewritten.graph.find_nodes(op="call_module"):
        node.meta.setdefault("nn_module_stack", {"": (str(node.target), nn.Module)})  # for the layers' names
    graph = fx.Graph()
    inputs = []
    for node in gm.graph.find_nodes(op="placeholder"):
        copy = graph.node_copy(node)
        copy._dynamo_source = getattr(node, "_dynamo_source", None)
        inputs.append(copy)
    graph.output(graph.call_module(_VARIANT, tuple(inputs)))
    outer = fx.GraphModule({_VARIANT: _Variant(source, rewritten, tuple(first))}, graph, "Variant")
    outer.meta.update(gm.meta)
    outer._param_name_to_source = {}  # type: ignore[assignment]
    return outer


class _Variant(nn.Module):
    """Runs a rewritten graph with the inputs of Dynamo's; only to be traced."""

    def __init__(self, source: LayeredGraph, rewritten: fx.GraphModule, first: tuple[Any, ...]) -> None:
        super().__init__()
        self._source, self._rewritten, self._first = source, (rewritten,), first  # in a tuple, so that it is no child

    def forward(self, *inputs: Any) -> Any:
        source = self._source
        known = [inputs[place] for place in source.places if place < len(inputs)]
        with _binding(source.bound, inputs):
            given = *self._first, *known, *(inputs if source.weights is not None else ())
            return InterpreterUnder(self._rewritten[0], source.autocasts).run(*given)


@contextmanager
def _binding(bound: Sequence[_Bound], inputs: Sequence[Any]) -> Iterator[None]:
    examples = [getattr(one.layer, one.attribute) for one in bound]
    for one in bound:
        if one.place < len(inputs):  # what is computed is bound when it is
            object.__setattr__(one.layer, one.attribute, inputs[one.place])
    try:
        yield
    finally:
        for one, example in zip(bound, examples, strict=True):
            object.__setattr__(one.layer, one.attribute, example)
