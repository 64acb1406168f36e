"""Dynamo's graph with layers computes what the model computes, and is called as Dynamo's graph is."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from shoal.capture.autocast_regions import Under
from shoal.capture.layered import Refused, as_dynamo_graph, layered
from shoal.transforms.live_graph import live_graph


class Functional(nn.Module):
    """Calls functions with parameters of its own; one convolution runs twice, one has another's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding="same")
        self.weight = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.frozen = nn.BatchNorm2d(4).eval()

    def train(self, mode: bool = True) -> Functional:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.conv(self.conv(x))
        y = F.conv2d(y, self.weight, stride=(2, 1), groups=2)
        y = y + F.conv2d(y, self.conv.weight, padding=1)
        y = self.frozen(self.norm(y)) * scale
        return F.batch_norm(y, None, None, training=True, eps=0.1)


class Counting(nn.Module):
    """Moves buffers without gradients, under an autocast of its own, and has a computed weight in its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 4, 3), parametrizations.spectral_norm(nn.Linear(6, 2))
        self.steps = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.steps.add_(1).mul_(2)
        return self.last(self.conv(x))


class UnderAutocast(nn.Module):
    """Computes a weight under one autocast and its scale under none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.low = parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), nn.Parameter(torch.randn(4, 4))
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.low @ self.low
        with torch.autocast("cpu", torch.bfloat16):
            y = F.conv2d(self.conv(x), self.last.weight + (scale @ self.low)[:, :, None, None])
        return y.float()


def trained(model: nn.Module, backend: Callable[..., Any] | None, *inputs: Any) -> list[torch.Tensor]:
    """The output, all gradients and buffers of one step."""
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    y = run(*inputs)
    y.square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *(b.clone() for b in model.buffers())]


def rebuilt(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend: the layers are read out, and called again."""
    source = layered(gm)
    again = as_dynamo_graph(gm, source, live_graph(source.root, source.graph, {}, "Again"))
    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))(again, inputs)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Functional(), (2, 4, 8, 8)),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, momentum=0.3), nn.ReLU(inplace=True)), (3, 2, 9)),
        (nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4)), (3, 2, 4)),
        (nn.Sequential(nn.Conv3d(2, 4, 2, dilation=2), nn.BatchNorm3d(4, momentum=0.5)), (2, 2, 5, 5, 5)),
        (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.MaxPool2d(2)), (2, 2, 8, 8)),
        (parametrizations.spectral_norm(nn.Conv2d(2, 4, 3)), (2, 2, 8, 8)),
        (UnderAutocast(), (2, 2, 8, 8)),
        (Counting(), (2, 2, 8, 8)),
    ],
)
def test_a_step_of_it_has_the_bits_of_the_model(model: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(shape), copy.deepcopy(model)
    ours, theirs = trained(copy.deepcopy(model), rebuilt, x), trained(plain, None, x)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def read(model: nn.Module, *inputs: Any) -> Any:
    """What is read of Dynamo's graph of a model."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        try:
            found.append(layered(gm))
        except Refused as reason:
            found.append(reason)
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return found[0]


def test_layers_have_the_names_that_they_have_in_the_model() -> None:
    inner = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    source = read(nn.Sequential(inner, nn.Conv2d(4, 4, 1)), torch.ones(2, 2, 8, 8))
    assert [node.target for node in source.graph.find_nodes(op="call_module")] == ["0.0", "0.1", "1"]


def test_a_layer_that_is_bound_to_no_tensors_has_those_that_its_shapes_are_of() -> None:
    norms = nn.BatchNorm2d(4).eval(), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False)
    norms[0].bias = None
    model = nn.Sequential(nn.Conv2d(2, 4, 3), *norms, nn.Conv2d(4, 3, 1, bias=False))
    source = read(model, torch.ones(2, 2, 8, 8))
    for name, layer in model.named_children():
        ours = source.root.get_submodule(name)
        assert ours.training == layer.training and not list(ours.parameters()) and not list(ours.buffers())
        for attribute in ("weight", "bias", "running_mean", "running_var"):
            theirs, bound = getattr(layer, attribute, None), getattr(ours, attribute, None)
            assert (bound is None) == (theirs is None)
            assert bound is None or (bound.shape, bound.dtype) == (theirs.shape, theirs.dtype)


def test_the_images_come_first() -> None:
    source = read(Functional(), torch.ones(2, 4, 8, 8))
    first = next(iter(source.graph.nodes))
    assert first.op == "placeholder" and first.meta["example_value"].shape == (2, 4, 8, 8)


def test_buffers_that_are_moved_without_gradients_are_no_obstacle() -> None:
    source = read(Counting(), torch.ones(2, 2, 8, 8))
    assert [node.target for node in source.graph.find_nodes(op="call_module")] == ["conv"]


def test_layers_with_computed_weights_are_read_under_their_names() -> None:
    inner = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), nn.BatchNorm2d(4))
    source = read(nn.Sequential(inner, parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))), torch.ones(2, 2, 8, 8))
    assert [node.target for node in source.graph.find_nodes(op="call_module")] == ["0.0", "0.1", "1"]
    assert source.root.get_submodule("1").weight.shape == (4, 4, 1, 1)
    n_results = len(source.weights.graph.find_nodes(op="output")[0].args[0])
    assert n_results == 4  # two weights and the two vectors of a spectral norm, which are results of Dynamo's graph


class ScaledResult(nn.Module):
    """A layer's scale, as in ConvNeXt, computed of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(4, 4, 1), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * (2 * self.scale).reshape(-1, 1, 1)


@pytest.mark.parametrize("model", [Functional(), ScaledResult()])
def test_what_else_is_computed_of_parameters_stays_where_it_is(model: nn.Module) -> None:
    assert read(model, torch.ones(2, 4, 8, 8)).weights is None


class Reordered(nn.Module):
    """A weight cannot be computed before the layers: running statistics, random numbers or buffers change meanwhile."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.conv = kind, nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.scale = nn.Buffer(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.conv.weight
        if self.kind == "statistics":
            x = self.norm(x)
            weight = weight * self.norm.running_var
        elif self.kind == "random":
            x, weight = F.dropout(x), F.dropout(weight)
        elif self.kind == "read before":
            x = x * self.scale.reshape(-1, 1, 1)
            weight = weight * self.scale.mul_(2).sum()
        else:
            self.scale.copy_(x.mean((0, 2, 3)))
            weight = weight * self.scale
        return F.conv2d(x, weight)


@pytest.mark.parametrize("kind", ["statistics", "random", "read before", "written of images"])
def test_a_weight_that_would_be_computed_of_other_values_leaves_its_layer_as_it_is(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Reordered(kind), torch.randn(2, 4, 8, 8)
    assert read(copy.deepcopy(model), x).layers(nn.Conv2d) == []
    torch._dynamo.reset()
    torch.manual_seed(1)
    ours = trained(copy.deepcopy(model), rebuilt, x)
    torch.manual_seed(1)
    theirs = trained(copy.deepcopy(model), None, x)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


class Autocast(nn.Module):
    """Enters autocast for all layers but one norm's, in which another autocast is off, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.exact, self.last = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.relu(self.norm(self.conv(x)), inplace=True)
            with torch.autocast("cpu", enabled=False):
                y = self.exact(y.float())
            y = self.last(y)
        assert y.dtype == torch.bfloat16
        return F.log_softmax(y.float() @ torch.ones(6, 6), 1)


@pytest.mark.parametrize("ambient", [False, True], ids=["alone", "inside another"])
def test_each_op_runs_under_the_autocast_that_the_model_enters_for_it(ambient: bool) -> None:
    torch.manual_seed(0)
    model, x = Autocast(), torch.randn(2, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
        theirs, ours = trained(copy.deepcopy(model), None, x), trained(copy.deepcopy(model), rebuilt, x)
    assert ours[0].dtype == (torch.bfloat16 if ambient else torch.float32)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_layers_under_the_autocast_of_most_are_read_and_others_enter_their_own() -> None:
    source = read(Autocast(), torch.ones(2, 2, 8, 8))
    assert [node.target for node in source.graph.find_nodes(op="call_module")] == ["conv", "norm", "last"]
    assert [dtype for _, dtype, *_ in source.autocasts] == [torch.bfloat16]
    own = [node.target for node in source.graph.nodes if isinstance(node.target, Under)]
    assert [one.target for one in own] == [torch.conv2d, torch.ones, operator.matmul, F.log_softmax]
    assert [len(one.autocasts) for one in own] == [2, 0, 0, 0]


class WritesUnderAnother(Autocast):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.conv(x)
        return y.exp_()


class NoGrad(Autocast):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.conv(x)
        return self.conv(x) + y


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (NoGrad(), "a part of it runs without gradients"),
        (WritesUnderAnother(), "exp_ writes in place under an autocast of its own"),
    ],
)
def test_what_changes_how_ops_run_is_left_as_it_is(model: nn.Module, why: str) -> None:
    assert str(read(model, torch.ones(2, 2, 8, 8))) == why
