from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from shoal.transforms.live_graph import live_graph


def _scaled_by(network: nn.Module, *paths: str) -> fx.Graph:
    """x times what the paths name."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for path in paths:
        value = graph.call_function(torch.mul, (value, graph.get_attr(path)))
    graph.output(value)
    return graph


@pytest.mark.parametrize("name", ["graph", "code", "version", "modules_", "read_graph"])
def test_any_name_will_do(name: str) -> None:
    network = nn.Module()
    network.register_buffer(name, torch.tensor(3.0))
    live = live_graph(network, _scaled_by(network, name, name), {}, "Live")
    assert live(torch.tensor(2.0)) == 18
    setattr(network, name, torch.tensor(1.0))
    assert live(torch.tensor(2.0)) == 2
    assert len(list(live.children())) == 1  # one, however often it is read


def test_names_that_read_alike_stay_apart() -> None:
    network = nn.ParameterDict({"a_b": torch.tensor(5.0)})
    network.a = nn.ParameterDict({"b": torch.tensor(7.0)})
    network.read_a_b = nn.Threshold(0, 0)
    graph = _scaled_by(network, "a.b", "a_b")
    (last,) = graph.find_nodes(op="output")
    with graph.inserting_before(last):
        last.args = (graph.call_module("read_a_b", (last.args[0],)),)
    live = live_graph(network, graph, {"read_a_b_": nn.Identity()}, "Live")
    assert live(torch.tensor(1.0)) == 35 and live(torch.tensor(-1.0)) == 0
