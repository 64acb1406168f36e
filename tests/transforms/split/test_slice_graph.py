"""A network on slices of its batch computes what it computes on the whole, its batch norms' statistics included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from shoal.errors import InputError
from shoal.kernels.norm.joined_statistics import (
    sliced_norm,
    sliced_norm_,
    sliced_norm_gradient,
    sliced_norm_gradient_,
)
from shoal.transforms.split.slice_graph import slice_graph
from shoal.transforms.split.sliced_batch_norm import sliced_batch_norm
from shoal.transforms.split.split_region import SplitRegion, choose_region
from tests.transforms.split.drawing import DRAWING


class Network(nn.Module):
    """A residual block, a skip by concatenation, a transposed convolution, batch norms with and without a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.inner, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(8, affine=False)
        self.frozen = nn.BatchNorm2d(8, momentum=None).eval()
        self.down, self.head = nn.Conv2d(4, 8, 2, stride=2), nn.Conv2d(12, 5, 1)
        self.up = nn.Parameter(torch.randn(8, 8, 2, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.inner(self.second(x)) + x)
        low = self.frozen(self.plain(self.down(F.max_pool2d(x, 3, 2, 1)))).sigmoid()
        up = F.interpolate(F.conv_transpose2d(low, self.up, stride=2), scale_factor=2.0)
        return self.head(torch.cat([x, up], 1)).mean((2, 3))


def region_of(graph: fx.Graph, network: nn.Module, depth: float) -> SplitRegion:
    region = choose_region(graph, dict(network.named_modules()), dims=None, depth=depth, join="auto")
    assert region is not None
    return region


@pytest.mark.parametrize(("depth", "slices"), [(0.25, 2), (0.75, 3), (1.0, 7)])
def test_function_gradients_and_statistics_are_those_of_the_whole(depth: float, slices: int) -> None:
    torch.manual_seed(0)
    network = Network().double()
    network.frozen.running_mean.normal_()  # type: ignore[union-attr,operator]
    whole = copy.deepcopy(network)
    graph = fx.Tracer().trace(network)
    sliced = slice_graph(network, graph, region_of(graph, network, depth), 7, slices)
    x = torch.randn(7, 3, 8, 8, dtype=torch.float64)
    weights = torch.randn(7, 5, dtype=torch.float64)
    ours, theirs = sliced(x), whole(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, mine), reference in zip(network.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=0, atol=1e-11, msg=name)
    for (name, buffer), reference in zip(network.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(buffer, reference, rtol=0, atol=1e-12, msg=name)


class Segmenting(nn.Module):
    """The norms and activations of networks for volumes: instance and group norm, PReLU, a dropout of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv3d(1, 4, 3), nn.Conv3d(4, 4, 1), nn.Conv3d(8, 2, 1)
        self.scale, self.shift, self.slope = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.instance_norm(self.first(x), weight=self.scale, bias=self.shift), 0.0, True, False)
        x = F.prelu(x, self.slope)
        y = F.leaky_relu(F.group_norm(self.second(x), 2, self.scale, self.shift), 0.01)
        return self.head(torch.cat([x, y], 1))


def test_norms_of_each_sample_run_on_slices() -> None:
    torch.manual_seed(0)
    network = Segmenting().double()
    graph = fx.Tracer().trace(network)
    region = region_of(graph, network, 1.0)
    assert [node.name for node in region.leaving] == ["head"]
    sliced, x = slice_graph(network, graph, region, 3, 2), torch.randn(3, 1, 6, 5, 4, dtype=torch.float64)
    weights = torch.randn(3, 2, 4, 3, 2, dtype=torch.float64)
    torch.testing.assert_close(sliced(x), network(x), rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad((one(x) * weights).sum(), network.parameters()) for one in (sliced, network))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


class ChannelsBehind(nn.Module):
    """A block of ConvNeXt: pixels' channels are normalised and go through linear layers, and are scaled at its end.

    Linear layers and layer norms are called as functions, as in Dynamo's graphs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)
        self.norm, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.weight, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = F.layer_norm(self.second(x).permute(0, 2, 3, 1), (4,), self.norm.weight, self.norm.bias)
        y = F.layer_norm(F.gelu(F.linear(y, self.wide.weight, self.wide.bias)), (8,))
        y = F.linear(F.linear(y, self.weight), self.narrow.weight, self.narrow.bias).permute((0, 3, 1, 2))
        return self.head(x + y * (2 * self.scale).reshape(1, -1, 1, 1))


class Frames(nn.Module):
    """Of five videos; channels are shuffled, scaled by what all frames have, and a head reads each sample's means."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.gate, self.head, self.weight = nn.Conv2d(4, 4, 1), nn.Conv1d(4, 2, 1), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.view(15, 3, 8, 8))
        x = F.relu(self.norm(x.view(15, 2, 2, 6, 6).transpose(1, 2).reshape((15, 4, 6, 6))))
        x = self.second(x) * self.gate(x.mean((2, 3), keepdim=True)).softmax(1)
        y = self.head(x.reshape(5, 3, 4, -1).mean(3).transpose(1, 2))
        return F.linear(torch.flatten(y, 1).unflatten(1, (2, -1)).sum(2), self.weight)


def test_frames_of_a_sample_stay_together() -> None:
    torch.manual_seed(0)
    network, x = Frames().double(), torch.randn(5, 3, 3, 8, 8, dtype=torch.float64)
    graph = traced(network, x)
    region = region_of(graph, network, 1.0)
    assert {"reshape", "batch norm"} < set(region.nodes.values()) and [node.name for node in region.leaving] == [
        "linear"
    ]
    sliced = slice_graph(network, graph, region, 5, 3)
    whole = copy.deepcopy(network)
    weights = torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(sliced(x), whole(x), rtol=0, atol=1e-12)
    ours, theirs = (
        torch.autograd.grad((one(x) * weights).sum(), of.parameters())
        for one, of in ((sliced, network), (whole, whole))
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    torch.testing.assert_close(dict(network.named_buffers()), dict(whole.named_buffers()), rtol=0, atol=1e-12)


class Dropping(nn.Module):
    """Drops channels twice, once in place, and single elements elsewhere: before that, or after."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        self.before, self.first, self.norm = before, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = F.dropout(x, 0.5) if self.before else x
        x = F.relu(self.norm(F.dropout2d(self.first(x), 0.3)))
        x = F.dropout2d(self.second(x), 0.5, True, True)
        return self.head(x).mean((2, 3)) + F.dropout(other, 0.5).mean((1, 2, 3)).unsqueeze(1)


@pytest.mark.parametrize("before", [False, True])
def test_channels_are_dropped_as_those_of_the_whole_batch(before: bool) -> None:
    torch.manual_seed(0)
    network, x = Dropping(before).double(), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    whole = copy.deepcopy(network)
    graph = traced(copy.deepcopy(network), x)
    region = region_of(graph, network, 0.34 if before else 1.0)
    assert ("feature dropout" in region.nodes.values()) != before
    sliced = slice_graph(network, graph, region, 5, 3)
    results = []
    for run, of in ((sliced, network), (whole, whole)):
        torch.manual_seed(1)
        y = run(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), of.parameters()), *of.buffers()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-11)


class SamplesMeet(nn.Module):
    """Of as many samples as channels: axes of a sum meet others, or a reshape, a mean or a softmax mixes samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "fewer axes":
            x = x * x.sum(1)
        elif self.kind == "first axis":
            x = x - x.mean((0, 2), keepdim=True)
        elif self.kind == "softmax":
            x = x.softmax(-4)
        elif self.kind == "swapped":
            x = x.transpose(0, 1)
        elif self.kind == "another first axis":
            x = x.reshape(2, 8, 4, 4)[:, :4]
        elif self.kind == "written through a view":
            y = x.view(4, 4, 16)
            y.mul_(2)
        return self.second(x)


@pytest.mark.parametrize(
    "kind", ["fewer axes", "first axis", "softmax", "swapped", "another first axis", "written through a view"]
)
def test_what_mixes_samples_ends_the_slices(kind: str) -> None:
    torch.manual_seed(0)
    network, x = SamplesMeet(kind).double(), torch.randn(4, 3, 4, 4, dtype=torch.float64)
    graph = traced(network, x)
    expected = network(x)
    region = choose_region(graph, dict(network.named_modules()), dims=None, depth=1.0, join="auto")
    assert region is None or [node.name for node in region.leaving] == ["first"]
    if region is not None:
        torch.testing.assert_close(slice_graph(network, graph, region, 4, 2)(x), expected, rtol=0, atol=1e-12)


def traced(network: nn.Module, x: torch.Tensor) -> fx.Graph:
    """Its graph, with the values of a run in its notes, as Dynamo has them."""
    graph = fx.Tracer().trace(network)

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            n.meta["example_value"] = super().run_node(n)
            return n.meta["example_value"]

    Noting(fx.GraphModule(network, graph)).run(x)
    return graph


def test_linear_layers_and_layer_norms_of_each_pixel_run_on_slices() -> None:
    torch.manual_seed(0)
    network, x = ChannelsBehind().double(), torch.randn(5, 3, 6, 5, dtype=torch.float64)
    graph = traced(network, x)
    region = region_of(graph, network, 1.0)
    assert [node.name for node in region.leaving] == ["head"]
    sliced = slice_graph(network, graph, region, 5, 3)
    assert len(sliced.graph.find_nodes(op="call_method", target="reshape")) == 1  # of the scale, for all slices
    weights = torch.randn(5, 2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(sliced(x), network(x), rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad((one(x) * weights).sum(), network.parameters()) for one in (sliced, network))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x: x.permute(1, 0, 2, 3) + 1,
        lambda x: F.layer_norm(x, x.shape) + 1,
        lambda x: x.transpose(0, 1) + 1,
    ],
    ids=["permuted", "a norm of the batch", "transposed"],
)
def test_where_samples_change_places_or_meet_slices_end(mixing: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Meeting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mixing(self.first(x))

    network = Meeting()
    graph = traced(network, torch.randn(4, 3, 4, 4))
    assert [node.name for node in region_of(graph, network, 1.0).nodes] == ["first"]


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x, state: F.instance_norm(x, state, state, use_input_stats=True),
        lambda x, state: F.dropout(x, 0.1, True),
        lambda x, state: F.dropout3d(x),
        lambda x, state: F.alpha_dropout(x, 0.5, training=True),
    ],
    ids=["running statistics", "dropout", "dropout by default", "alpha dropout"],
)
def test_what_moves_statistics_or_draws_does_not(mixing: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv3d(1, 1, 1)
            self.register_buffer("state", torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mixing(self.first(x), self.state) + 1

    network = Drawing()
    graph = fx.Tracer().trace(network)
    assert [node.name for node in region_of(graph, network, 1.0).nodes] == ["first"]


@pytest.mark.parametrize("name", DRAWING)
def test_what_draws_runs_on_the_whole_batch(name: str) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.draw = nn.Conv2d(1, 4, 1), DRAWING[name]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.draw(self.first(x)) + 1

    network = Drawing()
    graph = traced(network, torch.randn(4, 1, 12, 12))
    assert [node.name for node in region_of(graph, network, 1.0).nodes] == ["first"]


def test_what_a_sample_does_not_have_alone_runs_on_the_whole_batch() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.scale = (
                nn.Conv1d(1, 1, 1),
                nn.Conv1d(1, 1, 1),
                nn.Parameter(torch.ones(4, 1, 1)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(F.dropout(x, 0.5)) + self.scale * x + torch.cat([x[:2], x[2:]])

    network = Mixing()
    graph = fx.Tracer().trace(network)
    assert [node.name for node in region_of(graph, network, 1.0).nodes] == ["first"]


LAYOUTS = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["", "relu", "elu 0.5", "leaky_relu 0.1"])
def test_batch_norm_of_slices_is_near_that_in_float64(layout: torch.memory_format, activation: str) -> None:
    torch.manual_seed(0)
    is_3d = layout is torch.channels_last_3d
    x = 3 * torch.randn(5, 8, *(4, 3, 3) if is_3d else (6, 6)) + 100
    x = x.contiguous(memory_format=layout).requires_grad_()
    layer: nn.BatchNorm2d | nn.BatchNorm3d = nn.BatchNorm3d(8) if is_3d else nn.BatchNorm2d(8)
    nn.init.uniform_(layer.weight, -1.0), nn.init.uniform_(layer.bias, -1.0)
    exact, reference = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    assert sliced_batch_norm([x], copy.deepcopy(layer), activation)[0].is_contiguous(memory_format=layout)
    y, expected = torch.cat(sliced_batch_norm(x.split([2, 2, 1]), layer, activation)), exact(reference)
    if activation:
        name, *number = activation.split()
        expected = getattr(F, name)(expected, *map(float, number))
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad.double())
    assert x.grad is not None and reference.grad is not None
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), reference.grad, rtol=0, atol=1e-6)
    for mine, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(layer.running_var.double(), exact.running_var, rtol=1e-6, atol=0)  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_slices_in_bfloat16_cancel_as_well_as_the_wholes(layout: torch.memory_format) -> None:
    """Summed over all pixels nothing is left of them in exact arithmetic, with x as a factor neither."""
    torch.manual_seed(0)
    x = (2 * torch.randn(8, 8, 64, 64) + 1).bfloat16().contiguous(memory_format=layout)
    grad = (
        torch.randn(8, 8, 1, 1).bfloat16().expand_as(x).contiguous(memory_format=layout)
    )  # as of a mean over the image
    layer = nn.BatchNorm2d(8)
    nn.init.normal_(layer.weight, 1.0, 0.2), nn.init.normal_(layer.bias, 0.0, 0.3)
    left = []
    for run in (lambda x: F.relu(layer(x)), lambda x: torch.cat(sliced_batch_norm(x.split(2), layer, "relu"))):
        leaf = x.clone().requires_grad_()
        run(leaf).backward(grad)
        assert leaf.grad is not None
        every = leaf.grad.double()
        left.append(torch.stack([(every * factor).sum((0, 2, 3)).abs().max() for factor in (1.0, x.double())]))
    assert bool((left[1] <= 1.2 * left[0]).all()), left


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_writing_over_an_operand_changes_no_bit(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x, grad = (torch.randn(3, 8, 5, 5).contiguous(memory_format=layout) for _ in range(2))
    mean, scale, shift, slope, constant = torch.randn(5, 8)
    for activation in ("", "relu", "elu 0.5", "leaky_relu 0.1"):
        expected = sliced_norm(x, mean, scale, shift, activation)
        assert torch.equal(sliced_norm_(x.clone(), mean, scale, shift, activation), expected)
        rest = (x, mean, scale, shift, slope, constant, activation)
        expected = sliced_norm_gradient(grad, *rest)
        assert torch.equal(sliced_norm_gradient_(grad.clone(), *rest), expected)


def test_one_element_a_channel_has_no_variance() -> None:
    with pytest.raises(InputError):
        sliced_batch_norm([torch.ones(1, 3)], nn.BatchNorm1d(3))
