"""A network whose large layers run on slabs computes what it computes on the whole, its norms' statistics included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from shoal.transforms.split.slab_graph import SlabRegion, choose_slabs, slab_graph
from tests.transforms.split.drawing import DRAWING


class Network(nn.Module):
    """A small V-Net: skips, residuals, norms of batches and of samples, strides, transposed convolutions, dropout."""

    def __init__(self, kernel: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 4, 5, padding=2), nn.Conv3d(8, 8, 3, padding=2, dilation=2)
        self.norm, self.inner = nn.BatchNorm3d(4), nn.BatchNorm3d(8)
        self.down, self.deep, self.head = nn.Conv3d(4, 8, 2, 2), nn.Conv3d(8, 8, 3, padding=1), nn.Conv3d(8, 2, 3)
        self.up = nn.Parameter(torch.randn(8, 4, *[kernel] * 3) / 4)
        self.scale, self.shift = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.randn(8))
        self.slope = nn.Parameter(torch.full((1,), 0.2))
        self.kernel, self.dropout = kernel, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.elu(self.norm(self.first(x)) + x.repeat([1, 4, 1, 1, 1]))
        low = F.relu(self.deep(F.leaky_relu(self.down(skip), 0.1)))
        up = F.conv_transpose3d(low, self.up, None, 2, (self.kernel - 1) // 2, (self.kernel - 1) // 2)
        up = F.prelu(up, self.slope)
        joined = torch.cat([F.dropout3d(skip, self.dropout, True), up], 1)
        inner = F.elu(self.inner(self.second(joined)), 1.0)
        normed = F.leaky_relu(F.instance_norm(joined, weight=self.scale, bias=self.shift), 0.1)
        return self.head(inner + normed.sigmoid() * joined.mean((2, 3, 4), keepdim=True))


def slabs_of(network: nn.Module, x: torch.Tensor, slabs: int, twice: bool = False) -> tuple[nn.Module, SlabRegion]:
    graph = fx.Tracer().trace(network)
    module = fx.GraphModule(network, graph)
    ShapeProp(module).propagate(x)
    for node in graph.nodes:
        made: Any = node.meta.get("tensor_meta")
        if hasattr(made, "shape"):
            node.meta["example_value"] = torch.empty(made.shape, device="meta")
        if node.op == "get_attr":
            node.meta["example_value"] = getattr(network, str(node.target))
    region = choose_slabs(graph, dict(network.named_modules()), slabs)
    assert region is not None
    return slab_graph(network, graph, region, twice=twice), region


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(("kernel", "slabs"), [(2, 2), (2, 5), (3, 3), (3, 6)])
def test_function_gradients_and_statistics_are_those_of_the_whole(kernel: int, slabs: int, twice: bool) -> None:
    torch.manual_seed(0)
    network = Network(kernel).double()
    whole = copy.deepcopy(network)
    x = torch.randn(2, 1, 12, 6, 4, dtype=torch.float64)
    sliced, region = slabs_of(network, x, slabs, twice)
    names = {node.name for node in region.kinds}
    assert {"first", "second", "norm", "inner", "down", "head", "conv_transpose3d", "instance_norm", "cat"} <= names
    assert "deep" not in names
    found: list[Any] = []
    for one in (sliced, whole):
        torch.manual_seed(3)  # of the dropout
        result = one(x)
        weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
        (result * weights).sum().backward()
        found.append(result.detach())
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    mine = {name: parameter.grad for name, parameter in sliced.named_parameters()}
    for name, reference in whole.named_parameters():
        torch.testing.assert_close(mine[name], reference.grad, rtol=0, atol=1e-10, msg=name)


def test_running_statistics_move_once_and_as_the_layers_own() -> None:
    torch.manual_seed(0)
    network = Network()
    x = torch.randn(1, 1, 8, 6, 4)
    sliced, _ = slabs_of(copy.deepcopy(network), x, 4)
    before = copy.deepcopy(network)
    torch.manual_seed(3)
    expected = before(x)
    torch.manual_seed(3)
    for name, buffer in sliced.named_buffers():
        buffer.fill_(float("var" in name))
    torch.testing.assert_close(sliced(x), expected, rtol=1e-4, atol=1e-5)
    ours = dict(sliced.named_buffers())
    for name, theirs in before.named_buffers():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_what_needs_all_rows_runs_whole() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv3d(1, 4, 1), nn.Conv3d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.second(F.dropout(y, 0.5, True) + y.flip(2) + F.softmax(y, 2) + torch.cumsum(y, 2))

    network = Mixing()
    sliced, region = slabs_of(network, torch.randn(1, 1, 8, 4, 4), 4)
    names = {node.name for node in region.kinds}
    assert {"first", "second", "add"} <= names and names.isdisjoint({"dropout", "flip", "softmax", "cumsum"})
    x = torch.randn(1, 1, 8, 4, 4)
    torch.manual_seed(1)
    expected = network(x)
    torch.manual_seed(1)
    torch.testing.assert_close(sliced(x), expected)


@pytest.mark.parametrize("name", [name for name in DRAWING if name != "FractionalMaxPool2d"])
def test_what_draws_does_so_once_for_all_rows(name: str) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.draw = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 1), DRAWING[name]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.draw(self.first(x)) + 1)

    network, x = Drawing(), torch.randn(2, 1, 12, 12)
    divided, _ = slabs_of(network, x, 4)
    found = []
    for one in (network, divided):
        torch.manual_seed(1)
        found.append((one(x), torch.get_rng_state()))
    torch.testing.assert_close(found[1], found[0])


def test_small_networks_and_those_with_few_rows_have_none() -> None:
    network = nn.Sequential(nn.Conv3d(1, 4, 1))
    graph = fx.Tracer().trace(network)
    for node in graph.nodes:
        node.meta["example_value"] = torch.empty(1, 4, 4, 4, 4, device="meta")
    modules = dict(network.named_modules())
    assert choose_slabs(graph, modules, 8) is None and choose_slabs(graph, modules, 2) is not None
