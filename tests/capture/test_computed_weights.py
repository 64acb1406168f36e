"""Weights are computed once, in their order, and none of them long before it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from shoal.capture.computed_weights import computed_of_state
from shoal.core.variant import Variant
from shoal.engine.search.variants import Variants


def captured(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(x)
    return found[0]


def inside(variant: fx.GraphModule) -> list[fx.Node]:
    """The calls of a rewritten graph."""
    (rewritten,) = variant.get_submodule("shoal_variant")._rewritten  # type: ignore[misc,union-attr]
    return [node for node in rewritten.graph.nodes if node.op.startswith("call_")]


def test_each_weight_is_computed_once_and_after_the_slices_of_earlier_layers() -> None:
    layers = [parametrizations.weight_norm(nn.Conv2d(3, 3, 3)) for _ in range(3)]
    graph = captured(nn.Sequential(*layers), torch.ones(4, 3, 9, 9))
    calls = [
        str(node.target)
        for node in inside(Variants(graph, frozenset({"exact_split"})).graph(Variant(slices=4, depth=1.0)))
    ]
    norms = [place for place, name in enumerate(calls) if "weight_norm" in name]
    firsts = [calls.index(name) for name in ("0", "1", "2")]
    assert len(norms) == 3 and all(calls.count(name) == 4 for name in ("0", "1", "2"))
    assert norms[0] < firsts[0] < norms[1] < firsts[1] < norms[2] < firsts[2]


def test_gradients_are_on_again_for_what_follows_a_power_iteration() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), parametrizations.spectral_norm(nn.Conv2d(3, 3, 3)))
    nodes = inside(
        Variants(captured(model, torch.ones(4, 3, 9, 9)), frozenset({"exact_split"})).graph(
            Variant(slices=2, depth=1.0)
        )
    )
    is_on, layers_run = True, []
    for node in nodes:
        if "grad_enabled" in str(node.target):
            is_on = node.args[0]
        elif node.op == "call_module":
            layers_run.append((node.target, is_on))
    assert layers_run == [("0", True), ("1", True)] * 2 and is_on


def graph_of(write: Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], Any]) -> tuple[fx.Graph, fx.Node, fx.Node]:
    """Of a convolution with a weight of a scale, and what else is done with the scale and the images."""
    graph = fx.Graph()
    weight, scale, x = (graph.placeholder(name) for name in ("weight", "scale", "x"))
    scaled = graph.call_function(torch.mul, (weight, scale))
    graph.output((graph.call_function(torch.conv2d, (x, scaled)), write(graph, scale, scaled, x)))
    return graph, weight, scale


def found(write: Callable[[fx.Graph, fx.Node, fx.Node, fx.Node], Any]) -> set[str]:
    graph, weight, scale = graph_of(write)
    x = graph.find_nodes(op="placeholder")[2]
    return {node.name for node in computed_of_state(graph, [weight, scale], [x])}


def test_what_another_time_would_change_is_not_moved() -> None:
    assert found(lambda graph, scale, scaled, x: None) == {"mul"}
    assert found(lambda graph, scale, scaled, x: graph.call_method("add_", (scale, 1.0))) == {"mul", "add_"}
    assert not found(lambda graph, scale, scaled, x: graph.call_method("copy_", (scale, x)))
    assert not found(lambda graph, scale, scaled, x: graph.call_function(F.batch_norm, (x, scale, scale)))
    assert not found(lambda graph, scale, scaled, x: _both_draw(graph, scaled, x))


def _both_draw(graph: fx.Graph, scaled: fx.Node, x: fx.Node) -> fx.Node:
    return graph.call_function(
        F.linear, (graph.call_function(F.dropout, (x,)), graph.call_function(F.dropout, (scaled,)))
    )
