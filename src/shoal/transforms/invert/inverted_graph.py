"""Norms that an invertible activation follows: found in a graph, and the graph rewritten."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.kernels.invertible_norm.inverted_norms import run
from shoal.lowlevel.torch_state import has_hooks
from shoal.transforms.stand_in import Left
from shoal.transforms.writes import Writes

NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_LAYERS = (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.GroupNorm)
_NORM_FUNCTIONS = (F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm)
_PRODUCERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_WORDS = {"BatchNorm": "batch norm", "InstanceNorm": "instance norm", "GroupNorm": "group norm"}
_STACK = "nn_module_stack"  # the modules that a node is part of; torch.fx writes it
_RELU_FUNCTIONS = (F.relu, torch.relu, F.relu_, torch.relu_)


@dataclass(frozen=True)
class Inverted:
    """One norm that is converted.

    Attributes:
        layer: module path.
        kind: its class, such as "InstanceNorm3d".
        was: the activation it had, such as "ReLU".
        activation, slope: what it has now, as for `shoal.kernels.invertible_norm.inverted_norms`.
    """

    layer: str
    kind: str
    was: str
    activation: str
    slope: float


def find(
    graphs: Sequence[fx.Graph], modules: Mapping[str, nn.Module], slope: float | None
) -> tuple[dict[str, Inverted], list[Left]]:
    """Sites by module path, and what is left; a layer is converted everywhere it is called or nowhere."""
    sites: dict[str, Inverted] = {}
    reasons: dict[str, str] = {}
    paths: dict[str, list[str]] = {}
    for node, writes in (
        (node, writes) for graph in graphs for writes in [Writes(graph, modules)] for node in graph.nodes
    ):
        if node.op == "call_function" and node.target in _NORM_FUNCTIONS:
            reasons.setdefault(node.name, f"it is a call of F.{node.target.__name__}, not a module")
        if node.op != "call_module" or not isinstance(modules[node.target], NORMS):
            continue
        path = str(node.target)
        paths.setdefault(path, [name for name, module in modules.items() if module is modules[path]])
        site = _site(node, modules, writes, slope)
        if isinstance(site, Left):
            reasons.setdefault(path, site.reason)
        elif path in sites and sites[path] != site:
            reasons.setdefault(path, "it is called with different activations after it")
        else:
            sites[path] = site
    for path, others in paths.items():
        refused = next((other for other in others if other in reasons), None)
        if refused is not None and path not in reasons:
            reasons[path] = reasons[refused]
    kept = {path: site for path, site in sites.items() if path not in reasons}
    return kept, [Left(path, reason) for path, reason in reasons.items()]


def _site(node: fx.Node, modules: Mapping[str, nn.Module], writes: Writes, slope: float | None) -> Inverted | Left:
    path = str(node.target)
    layer = modules[path]
    if isinstance(layer, nn.SyncBatchNorm):
        return Left(path, "it is a SyncBatchNorm, whose statistics are of all ranks")
    if isinstance(layer, nn.LayerNorm):
        return Left(path, f"it is a {type(layer).__name__}, which has no inverted form")
    if type(layer) not in _LAYERS:
        usual = next(base for base in NORMS if isinstance(layer, base)).__name__.removeprefix("_")
        return Left(path, f"it is a {type(layer).__name__}, which may do more than {_WORDS[usual]}")
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return Left(path, "it keeps running statistics, by which it normalises in eval mode")
    if has_hooks(layer):
        return Left(path, "it has hooks, which would not run")
    (reader, *others) = node.users or (None,)
    if reader is None:
        return Left(path, "nothing reads its result")
    if others:
        named = ", ".join(_name(user, modules) for user in node.users)
        return Left(path, f"its result has other readers: {named}")
    if reader.op == "output":
        return Left(path, "its result is the network's, there is no activation after it")
    was = _activation_of(reader, modules)
    if was is None:
        return Left(path, f"there is no ReLU, LeakyReLU or ELU after it but {_name(reader, modules)}")
    if reader.op == "call_module" and has_hooks(modules[str(reader.target)]):
        return Left(path, f"{reader.target} after it has hooks, which would not run")
    if (writer := writes.over(reader)) is not None:
        return Left(
            path, f"the result of {_name(reader, modules)} after it is written over by {_name(writer, modules)}"
        )
    kind, own_slope = was
    norm = type(layer).__name__
    if kind == "ReLU" and slope is None:
        return Left(path, "the ReLU after it has no inverse")
    if kind == "ReLU":
        return Inverted(path, norm, kind, "leaky_relu", float(slope or 0))
    if not 0 < own_slope < math.inf:
        return Left(path, f"the {kind}({own_slope:g}) after it has no inverse")
    return Inverted(path, norm, kind, "elu" if kind == "ELU" else "leaky_relu", own_slope)


def _activation_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> tuple[str, float] | None:
    """Name and slope of an activation that can be converted."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if type(module) is nn.ReLU:
            return "ReLU", 0.0
        if type(module) is nn.LeakyReLU:
            return "LeakyReLU", float(module.negative_slope)
        return ("ELU", float(module.alpha)) if type(module) is nn.ELU else None
    if (node.op == "call_function" and node.target in _RELU_FUNCTIONS) or (
        node.op == "call_method" and node.target in ("relu", "relu_")
    ):
        return "ReLU", 0.0
    if node.op == "call_function" and node.target in (F.leaky_relu, F.elu):
        kind, name, usual = ("ELU", "alpha", 1.0) if node.target is F.elu else ("LeakyReLU", "negative_slope", 0.01)
        value = node.args[1] if len(node.args) > 1 else node.kwargs.get(name, usual)
        return (kind, float(value)) if isinstance(value, (int, float)) else None
    return None


def inverted_graph(model: nn.Module, trace: fx.Graph, sites: Mapping[str, Inverted]) -> fx.Graph:
    modules = dict(model.named_modules(remove_duplicate=False))
    graph, calls = _copied(trace, sites)
    for node in calls:
        site = sites[str(node.target)]
        (reader,) = node.users
        source = node.all_input_nodes[0]
        with graph.inserting_before(node):
            layer = graph.create_node("get_attr", site.layer)
            alone = source.op == "call_module" and type(modules[str(source.target)]) in _PRODUCERS
            alone = alone and len(source.users) == 1
            producer = graph.create_node("get_attr", str(source.target)) if alone else None
            call = graph.call_function(inverted, (source, layer, producer, site.activation, site.slope))
        call.meta[_STACK] = node.meta.get(_STACK, {}) | reader.meta.get(_STACK, {})
        reader.replace_all_uses_with(call)
        graph.erase_node(reader)
        graph.erase_node(node)
    return graph


def leaky_graph(trace: fx.Graph, sites: Mapping[str, Inverted]) -> fx.Graph:
    graph, calls = _copied(trace, sites)
    for node in calls:
        site = sites[str(node.target)]
        (reader,) = node.users
        if site.was == "ReLU":
            with graph.inserting_before(reader):
                leaky = graph.call_function(F.leaky_relu, (node, site.slope, True))
            leaky.meta[_STACK] = reader.meta.get(_STACK, {})
            reader.replace_all_uses_with(leaky)
            graph.erase_node(reader)
    return graph


def _copied(trace: fx.Graph, sites: Mapping[str, Inverted]) -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    result = graph.graph_copy(trace, {})
    graph.output(result)
    return graph, [node for node in graph.nodes if node.op == "call_module" and node.target in sites]


def inverted(x: torch.Tensor, layer: Any, producer: nn.Module | None, activation: str, slope: float) -> torch.Tensor:
    """One converted call: its kernel's `run`, over the result of `producer`, a convolution whose result nothing
    inspects.

    torch.fx, which traces what it makes once more where it is loaded from a file, records the call.
    """
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", inverted, (x, layer, producer, activation, slope), {})
    overwrite = producer is not None and not torch.compiler.is_compiling() and not has_hooks(producer)
    return run(layer, x, activation, slope, overwrite)


def inverted_layers(graph: fx.Graph) -> dict[fx.Node, str]:
    """The nodes that call `inverted`, each with the path of its norm."""
    return {
        node: str(node.args[1].target)
        for node in graph.nodes
        if node.target is inverted and isinstance(node.args[1], fx.Node)
    }


def _name(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(modules[str(node.target)]).__name__})"
    return "the output" if node.op == "output" else getattr(node.target, "__name__", str(node.target))
