"""Where a network's convolutions end and its dense layers begin, found in its graph, not by names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from examples.parallel.local_convolution import LocalConv2d
from shoal.errors import InputError
from shoal.transforms.tracing import UntraceableError, trace

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_DENSE = (nn.Linear, LocalConv2d)
# Each value of the result comes from the values of one channel or feature alone, so that each rank does its own.
_BY_FEATURE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Softplus,
    nn.Identity,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
)
_FUNCTIONS = (
    F.relu,
    F.relu_,
    F.relu6,
    F.leaky_relu,
    F.elu,
    F.selu,
    F.gelu,
    F.silu,
    F.max_pool2d,
    F.avg_pool2d,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
)
_METHODS = ("relu", "relu_", "tanh", "sigmoid", "contiguous")
_DROPOUTS = (F.dropout, F.dropout2d, F.alpha_dropout, torch.dropout)


@dataclass(frozen=True)
class Dense:
    """A layer of parameters that is shared out over the ranks.

    Attributes:
        name: of the module in the model.
    """

    name: str


@dataclass(frozen=True)
class Pointwise:
    """What each rank does to its own features.

    Attributes:
        apply: the module or function.
    """

    apply: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Drop:
    """Dropout of features, drawn apart on each rank.

    Attributes:
        module: an `nn.Dropout`, or `nn.Dropout2d` on maps; its mode and p are asked when it runs.
    """

    module: nn.Module


@dataclass(frozen=True)
class Flatten:
    """Maps to features, channel by channel."""


Step = Dense | Pointwise | Drop | Flatten


@dataclass(frozen=True)
class Border:
    """A network in three parts.

    Attributes:
        convolutions: the graph from the images to the input of the first dense layer.
        dense: the steps from there to the result of the last dense layer.
        tail: the graph from there to the network's result; it has no parameters.
    """

    convolutions: fx.Graph
    dense: tuple[Step, ...]
    tail: fx.Graph

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the dense layers."""
        return tuple(step.name for step in self.dense if isinstance(step, Dense))


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, LocalConv2d) or super().is_leaf_module(m, module_qualified_name)


def find_border(model: nn.Module) -> Border:
    """Divide a network before the first linear (or local) layer that follows its last convolution.

    Raises:
        InputError: it has no such layer, cannot be traced, or what follows that layer is not one chain of linear layers
            and of operations on single features.

    >>> from examples.networks import build
    >>> find_border(build("alexnet")).layers
    ('classifier.1', 'classifier.4', 'classifier.6')
    """
    nodes = list(_traced(model).nodes)
    modules = dict(model.named_modules())

    def is_a(node: fx.Node, kinds: tuple[type, ...]) -> bool:
        return node.op == "call_module" and isinstance(modules[str(node.target)], kinds)

    convolutions = [place for place, node in enumerate(nodes) if is_a(node, _CONVOLUTIONS)]
    after = convolutions[-1] if convolutions else len(nodes)
    layers = [place for place, node in enumerate(nodes) if place > after and is_a(node, _DENSE)]
    if not layers:
        lacks = "linear layer after its last convolution" if convolutions else "convolution before its linear layers"
        raise InputError(
            f"got {type(model).__name__} without a {lacks}, expected a network such as AlexNet or VGG; "
            "use DistributedDataParallel with shoal.distributed.compress_gradients"
        )
    if sum(node.op == "placeholder" for node in nodes) != 1:
        raise InputError(f"got {type(model).__name__} with several inputs, expected one batch of images; wrap it")
    _check_unshared(model, [str(nodes[place].target) for place in layers])
    chain = nodes[layers[0] : layers[-1] + 1]
    for before, node in pairwise(chain):
        if node.all_input_nodes != [before]:
            raise _not_a_chain(model, node, "it reads something else than what comes before it")
    tail = nodes[layers[-1] + 1 :]
    for node in tail:
        if any(source is not chain[-1] and source not in tail for source in node.all_input_nodes):
            raise _not_a_chain(model, node, "it reads something else than what comes before it")
        if node.op == "get_attr" or (
            node.op == "call_module" and any(True for _ in modules[str(node.target)].parameters())
        ):
            raise _not_a_chain(model, node, "it has parameters, and is not a linear layer")
    if chain[0].all_input_nodes != list(chain[0].args[:1]):
        raise _not_a_chain(model, chain[0], "it does not read one tensor")
    return Border(
        _graph(nodes[: layers[0]], None, chain[0].args[0]),
        tuple(_step(node, modules, model) for node in chain),
        _graph(tail[:-1], chain[-1], tail[-1].args[0]),
    )


def _check_unshared(model: nn.Module, layers: list[str]) -> None:
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    for name in layers:
        shared = any(len(owners[id(parameter)]) > 1 for parameter in model.get_submodule(name).parameters())
        if shared or layers.count(name) > 1:
            raise InputError(
                f"layer {name} of {type(model).__name__} is used twice or shares parameters; use "
                "DistributedDataParallel with shoal.distributed.compress_gradients"
            )


def _traced(model: nn.Module) -> fx.Graph:
    """The graph, which must be one in training and in eval mode."""
    try:
        graph, in_eval = (trace(model, _Tracer(), training=training) for training in (True, False))
    except UntraceableError as error:
        raise InputError(
            f"got {type(model).__name__}, which torch.fx cannot trace ({error}); expected a network such as AlexNet"
        ) from error
    if [(node.op, str(node.target)) for node in graph.nodes] != [(node.op, str(node.target)) for node in in_eval.nodes]:
        raise InputError(
            f"got {type(model).__name__}, which does something else in eval mode; expected one graph for both modes"
        )
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _DROPOUTS:
            raise InputError(f"got {type(model).__name__}, which calls {node.name} as a function; use nn.Dropout there")
    return graph


def _step(node: fx.Node, modules: dict[str, nn.Module], model: nn.Module) -> Step:
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, _DENSE):
            return Dense(str(node.target))
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return Flatten()
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            return Drop(module)
        if isinstance(module, _BY_FEATURE):
            return Pointwise(module)
        raise _not_a_chain(model, node, f"{type(module).__name__} mixes features that lie on different ranks")
    rest = list(node.args[1:])
    if (
        node.op == "call_function"
        and node.target is torch.flatten
        and (rest, node.kwargs) in (([1], {}), ([1, -1], {}))
    ):
        return Flatten()
    if node.op == "call_method" and node.target == "flatten" and rest in ([1], [1, -1]):
        return Flatten()
    if node.op == "call_function" and node.target in _FUNCTIONS:
        return Pointwise(_with_arguments(node.target, rest, node.kwargs))
    if node.op == "call_method" and node.target in _METHODS:
        return Pointwise(_with_arguments(getattr(torch.Tensor, str(node.target)), rest, node.kwargs))
    raise _not_a_chain(model, node, f"{node.target} is not known to work on single features")


def _with_arguments(function: Callable[..., Any], rest: list[Any], named: dict[str, Any]) -> Callable[..., Any]:
    return lambda x: function(x, *rest, **named)


def _graph(nodes: list[fx.Node], source: fx.Node | None, result: Any) -> fx.Graph:
    """A graph of some nodes, and of an input in the place of `source`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    if source is not None:
        copies[source] = graph.placeholder("x")
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.map_arg(result, copies.__getitem__))
    return graph


def _not_a_chain(model: nn.Module, node: fx.Node, why: str) -> InputError:
    return InputError(
        f"the layers after the last convolution of {type(model).__name__} are no chain; use DistributedDataParallel "
        "with shoal.distributed.compress_gradients",
        details={node.name: why},
    )
