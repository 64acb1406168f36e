"""Dynamo's graph with instance and group norms and the activations after them in the inverted form.

An op that saves its result only, `shoal::inverted_norm`, in place of two that save an input each; the function is the
same, to rounding. Dynamo has followed hooks and modes, so what follows a norm in its graph is all that does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from shoal.capture.layered import Refused
from shoal.kernels.invertible_norm.inverted_norms import inverted_norm_in

_NORMS: dict[
    Any, tuple[str, tuple[str, ...], dict[str, Any]]
] = {  # what it is called, its arguments and their defaults
    F.instance_norm: (
        "instance norm",
        ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
        {"running_mean": None, "running_var": None, "weight": None, "bias": None, "use_input_stats": True, "eps": 1e-5},
    ),
    F.group_norm: (
        "group norm",
        ("input", "num_groups", "weight", "bias", "eps"),
        {"weight": None, "bias": None, "eps": 1e-5},
    ),
}
_ACTIVATIONS: dict[Any, tuple[str, str, float]] = {
    F.leaky_relu: ("leaky_relu", "negative_slope", 0.01),
    F.elu: ("elu", "alpha", 1.0),
}


@dataclass(frozen=True)
class _Pair:
    norm: fx.Node
    reader: fx.Node
    given: dict[str, Any]
    groups: int
    activation: str
    slope: float


def with_inverted_norms(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with every such pair as one op; `gm` stays as it is.

    Raises:
        Refused: there is none; what is in the way, and how often.
    """
    found = [_pair(node) for node in gm.graph.nodes if node.target in _NORMS]
    pairs = [one for one in found if isinstance(one, _Pair)]
    if not pairs:
        reasons = Counter(one for one in found if isinstance(one, str))
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
        raise Refused(f"no norm can be inverted: {listed or 'there is no instance or group norm'}")
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    of_reader = {pair.reader: pair for pair in pairs}
    norms = {pair.norm for pair in pairs}
    for node in gm.graph.nodes:
        if node in norms:
            continue
        if node in of_reader:
            copies[node] = _one_call(graph, of_reader[node], copies)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if hasattr(node, "_dynamo_source"):
                copies[node]._dynamo_source = node._dynamo_source
    inverted = fx.GraphModule(gm, graph, "InvertedNorms")
    inverted.meta.update(gm.meta)
    inverted._param_name_to_source = {}  # type: ignore[assignment]
    return inverted


def _one_call(graph: fx.Graph, pair: _Pair, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    x, weight, bias = (
        copies[value] if isinstance(value, fx.Node) else value
        for value in (pair.given[name] for name in ("input", "weight", "bias"))
    )
    dtype = pair.norm.meta["example_value"].dtype
    eps = pair.given["eps"]
    call = graph.call_function(
        inverted_norm_in, (x, weight, bias, pair.groups, eps, pair.activation, pair.slope, dtype)
    )
    call.meta.update(pair.norm.meta)
    call.meta["example_value"] = pair.reader.meta.get("example_value")
    return call


def _pair(node: fx.Node) -> _Pair | str:
    """A norm with its activation; else what is in the way."""
    kind, names, defaults = _NORMS[node.target]
    given = {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    x, result = (one.meta.get("example_value") if isinstance(one, fx.Node) else None for one in (given["input"], node))
    if not isinstance(x, torch.Tensor) or not isinstance(result, torch.Tensor) or x.dim() < 3:
        return f"{kind} of what is no batch of images"
    if given.get("running_mean") is not None or given.get("use_input_stats", True) is not True:
        return f"{kind} with running statistics"
    groups = given.get("num_groups", x.shape[1])
    if type(groups) is not int or not isinstance(given["eps"], float) or x.shape[1] % groups:
        return f"{kind} of that many groups"
    (reader, *others) = node.users or (None,)
    if reader is None or others:
        return f"{kind} with {len(node.users)} readers"
    if reader.target not in _ACTIVATIONS or reader.args[:1] != (node,):
        behind = "the network's result" if reader.op == "output" else getattr(reader.target, "__name__", reader.target)
        return f"{kind} with {behind} after it"
    activation, keyword, usual = _ACTIVATIONS[reader.target]
    slope = reader.args[1] if len(reader.args) > 1 else reader.kwargs.get(keyword, usual)
    if not isinstance(slope, (int, float)) or not 0 < slope < float("inf"):
        return f"{kind} with a {activation} of slope {slope}, which has no inverse"
    return _Pair(node, reader, given, groups, activation, float(slope))
