"""An op writes over an operand that dies in it, with the same bits, and never over one that someone still needs."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping
from inspect import isfunction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import shoal
from shoal.capture.captured import Captured
from shoal.core.schedule import schedule
from shoal.graph import inplace
from shoal.graph.fx_nodes import is_view
from shoal.kernels import (
    batch_norm,
    direct_convolution,
    dropout,
    encoded_activation,
    group_norm,
    layer_norm,
    norm_again,
    norm_pieces,
    prelu,
    relu,
)
from shoal.lowlevel import allocations
from tests.engine.training_laws import needs_compiler
from tests.joint_graphs import NETWORKS, captured_step, operands, run_joint, run_lowered

aten = torch.ops.aten
inverted_batch_norm = torch.ops.shoal.inverted_batch_norm.default
norm_act_backward = torch.ops.shoal.norm_act_backward.default
sliced_norm = torch.ops.shoal.sliced_norm.default
sliced_norm_gradient = torch.ops.shoal.sliced_norm_gradient.default
norm_conv_backward = torch.ops.shoal.norm_conv_backward.default
inverted_norm = torch.ops.shoal.inverted_norm.default
inverted_norm_backward = torch.ops.shoal.inverted_norm_backward.default
inverted_batch_norm_backward = torch.ops.shoal.inverted_batch_norm_backward.default


def statistics(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.linspace(0.5, 2, x.shape[1], dtype=x.dtype) + place for place in range(4)]


def of_one_group(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.linspace(0.5, 2, x.shape[0], dtype=x.dtype).unsqueeze(1) + place for place in range(2)]


def of_rows(x: torch.Tensor) -> list[torch.Tensor]:
    rows, last = (*x.shape[:-1], 1), torch.linspace(0.5, 2, x.shape[-1], dtype=x.dtype)
    statistics = torch.linspace(0.5, 2, x[..., :1].numel(), dtype=x.dtype).view(rows)
    return [statistics, statistics + 1, last, last + 1]


def of_samples(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.linspace(0.5, 2, x.shape[0] * x.shape[1]).view(x.shape[:2])]


def wide_statistics(x: torch.Tensor) -> list[torch.Tensor]:
    return [vector.float() for vector in statistics(x)]


def convolved(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    channels, dims = x.shape[1], x.dim() - 2
    weight = torch.linspace(-1, 1, channels**2, dtype=x.dtype).view(channels, channels, *[1] * dims)
    around = [[1] * dims, [0] * dims, [1] * dims, 1]
    needs = [True, True, True, False]
    return (y.cos(), None, None, [y], None, None, *statistics(x)[:3], True, weight, *around, needs, None, x)


def by_channels(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    weight, mean, invstd = statistics(x)[:3]
    return (x, y, weight, None, None, mean, invstd, True, 1e-5, [True, True, True], 1, 2)


def by_groups(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    samples, channels, *pixels = x.shape
    sizes = samples, channels, math.prod(pixels), 1
    return (x, y, *of_one_group(x), statistics(x)[0], *sizes, [True, True, True], 1, 2)


def places(x: torch.Tensor) -> torch.Tensor:
    """Places along the first axis, some of them several times."""
    return torch.arange(x.numel()).view(x.shape) * 7 % max(1, x.shape[0] - 1)


# Targets, and what each is called with, given two tensors of one layout.
CALLS: list[tuple[Any, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]]] = [
    (aten.threshold_backward.default, lambda x, y: (x, y.relu(), 0)),
    (aten.hardtanh.default, lambda x, y: (x, -0.5, 0.7)),
    (aten.hardtanh_backward.default, lambda x, y: (x, y, -0.5, 0.7)),
    (aten.leaky_relu.default, lambda x, y: (x, 0.2)),
    (aten.leaky_relu_backward.default, lambda x, y: (x, y, 0.2, False)),
    (aten.elu.default, lambda x, y: (x, 1.5)),
    (aten.elu_backward.default, lambda x, y: (x, 1.5, 1, 1, False, y)),
    (aten.gelu.default, lambda x, y: (x,)),
    (aten.gelu_backward.default, lambda x, y: (x, y)),
    (aten.hardswish.default, lambda x, y: (x,)),
    (aten.hardsigmoid.default, lambda x, y: (x,)),
    (aten.hardsigmoid_backward.default, lambda x, y: (x, y)),
    (aten.softplus.default, lambda x, y: (x,)),
    (aten.softplus_backward.default, lambda x, y: (x, y, 1, 20)),
    (aten.mish.default, lambda x, y: (x,)),
    (aten.silu.default, lambda x, y: (x,)),
    (aten.silu_backward.default, lambda x, y: (x, y)),
    (aten.sigmoid.default, lambda x, y: (x,)),
    (aten.sigmoid_backward.default, lambda x, y: (x, y)),
    (aten.tanh.default, lambda x, y: (x,)),
    (aten.tanh_backward.default, lambda x, y: (x, y)),
    (aten.add.Tensor, lambda x, y: (x, y)),
    (aten.sub.Tensor, lambda x, y: (x, y)),
    (aten.mul.Tensor, lambda x, y: (x, y)),
    (aten.div.Tensor, lambda x, y: (x, y)),
    (aten.relu.default, lambda x, y: (x,)),
    (aten.div.Scalar, lambda x, y: (x, 3)),
    (aten.mul.Scalar, lambda x, y: (x, 0.3)),
    (aten.native_dropout_backward.default, lambda x, y: (x, y > 0, 1.25)),
    (dropout.dropout, lambda x, y: (x, 0.4)),
    (dropout.dropout_backward, lambda x, y: (x, y > 0, 0.4)),
    (relu.zeroed, lambda x, y: (x, y <= 0)),
    (relu.leaky_backward, lambda x, y: (x, y > 0, 0.2)),
    (layer_norm.backward, lambda x, y: (x, y, [x.shape[-1]], *of_rows(x))),
    (prelu.backward, lambda x, y: (x, y, statistics(x)[0].view(1, -1, 1, 1), [0, 2, 3], True)),
    (prelu.in_pieces, lambda x, y: (x, y, statistics(x)[0].view(1, -1, 1, 1), [0, 2, 3], True, 1, 2)),
    (aten._prelu_kernel.default, lambda x, y: (x, statistics(x)[0].view(1, -1, 1, 1))),
    (aten._prelu_kernel.default, lambda x, y: (x, statistics(x)[0][:1].view(1, 1, 1, 1))),
    (relu.backward, lambda x, y: (x, y > 0)),
    (
        encoded_activation.relu_backward,
        lambda x, y: (x, encoded_activation.encode(y.relu(), "linear", 8, None, math.inf), y.shape, y.stride(), 8),
    ),
    (norm_again.normalise, lambda x, y: (x, *statistics(x))),
    (batch_norm.backward, lambda x, y: (x, y, *statistics(x)[:3])),
    (norm_pieces.native_backward, by_channels),
    (norm_again.normalise, lambda x, y: (x, *statistics(x)[:2], *of_one_group(x))),
    (group_norm.backward, lambda x, y: (x, y, statistics(x)[0], *of_one_group(x))),
    (norm_pieces.group_backward, by_groups),
    (inverted_batch_norm, lambda x, y: (x, *wide_statistics(x)[:2], None, None, 1e-5, "leaky_relu", 0.2)),
    (inverted_batch_norm, lambda x, y: (x, None, None, *wide_statistics(x)[:2], 1e-5, "elu", 0.2)),
    (inverted_batch_norm_backward, lambda x, y: (x, y, *wide_statistics(x)[:3], False, 1e-5, "leaky_relu", 0.2)),
    (inverted_batch_norm_backward, lambda x, y: (x, y, *wide_statistics(x)[:3], True, 1e-5, "elu", 0.2)),
    (inverted_norm, lambda x, y: (x, *wide_statistics(x)[:2], x.shape[1], 1e-5, "leaky_relu", 0.2)),
    (inverted_norm, lambda x, y: (x, None, None, 1, 1e-5, "elu", 0.2)),
    (inverted_norm_backward, lambda x, y: (x, y, *wide_statistics(x)[:2], *of_samples(x), "leaky_relu", 0.2)),
    (norm_act_backward, lambda x, y: (x, [y], *statistics(x)[:3], None, True, [True, True, False])),
    (norm_act_backward, lambda x, y: (x, [y], *statistics(x)[:3], y.sin(), True, [False, True, True])),
    (norm_act_backward, lambda x, y: (x, [y], *statistics(x)[:3], None, False, [True, False, False])),
    (norm_conv_backward, convolved),
    (sliced_norm, lambda x, y: (x, *statistics(x)[:3], "relu")),
    (sliced_norm, lambda x, y: (x, *statistics(x)[:3], "elu 0.5")),
    (sliced_norm_gradient, lambda x, y: (x, y, *statistics(x), statistics(x)[0], "relu")),
    (sliced_norm_gradient, lambda x, y: (x, y, *statistics(x), statistics(x)[0], "elu 0.5")),
    (aten.hardshrink.default, lambda x, y: (x, 0.4)),
    (aten.hardshrink_backward.default, lambda x, y: (x, y, 0.4)),
    (aten.softshrink.default, lambda x, y: (x, 0.4)),
    (aten.softshrink_backward.default, lambda x, y: (x, y, 0.4)),
    (aten.copy.default, lambda x, y: (x, y)),
    (aten.scatter.src, lambda x, y: (x, 0, places(x), y)),
    (aten.scatter.value, lambda x, y: (x, 0, places(x), 0.3)),
    (aten.scatter_add.default, lambda x, y: (x, 0, places(x), y)),
    (aten.scatter_reduce.two, lambda x, y: (x, 0, places(x), y, "amax")),
    (aten.index_add.default, lambda x, y: (x, 0, places(x)[:, 0, 0, 0], y)),
    (aten.index_copy.default, lambda x, y: (x, 0, places(x)[:, 0, 0, 0], y)),
    (aten.index_fill.int_Scalar, lambda x, y: (x, 0, places(x)[:, 0, 0, 0], 0.3)),
    (aten.index_put.default, lambda x, y: (x, [places(x)[:, 0, 0, 0]], y, True)),
    (aten.index_put.default, lambda x, y: (x, [y > 0], y[y > 0])),
    (aten.put.default, lambda x, y: (x, places(x), y, True)),
    (aten.masked_fill.Scalar, lambda x, y: (x, y > 0, 0.3)),
    (aten.masked_fill.Tensor, lambda x, y: (x, y > 0, y.new_ones(()))),
    (aten.masked_scatter.default, lambda x, y: (x, y > 0, y)),
    (aten.slice_scatter.default, lambda x, y: (x, y[:, 1:], 1, 1, 9)),
    (aten.slice_scatter.default, lambda x, y: (x, y[..., ::2], -1, None, None, 2)),
    (aten.select_scatter.default, lambda x, y: (x, y[:, 0], 1, 0)),
    (aten.diagonal_scatter.default, lambda x, y: (x, y.diagonal(0, 2, 3), 0, 2, 3)),
    (aten.as_strided_scatter.default, lambda x, y: (x, y, x.shape, x.stride())),
    *((aten._softmax.default, lambda x, y, dim=dim: (x, dim, False)) for dim in (1, -1)),
    *(
        (aten._softmax_backward_data.default, lambda x, y, dim=dim: (x, y.softmax(dim), dim, x.dtype))
        for dim in (1, -1)
    ),
    (aten.add.Tensor, lambda x, y: (x, 0.3)),
    (aten.sub.Tensor, lambda x, y: (x, 0.3)),
    (aten.mul.Tensor, lambda x, y: (x, 0.3)),
    (aten.div.Tensor, lambda x, y: (x, 0.3)),
    (aten.mul.Tensor, lambda x, y: (x, x)),
]


def node_of(target: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[fx.Node, dict[fx.Node, torch.Tensor]]:
    """The call as a node, and the tensors after its operands."""
    graph = fx.Graph()
    tensors: dict[fx.Node, torch.Tensor] = {}
    arguments = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            known = [node for node, tensor in tensors.items() if tensor is arg]
            arguments.append(known[0] if known else graph.placeholder(f"x{len(tensors)}"))
            arguments[-1].meta["val"] = arg
            tensors[arguments[-1]] = arg
        else:
            arguments.append(arg)
    node = graph.call_function(target, tuple(arguments), kwargs)
    node.meta["val"] = target(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
    return node, tensors


def call(target: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], tensors: dict[fx.Node, torch.Tensor]) -> Any:
    torch.manual_seed(3)
    return target(*fx.node.map_arg(args, tensors.__getitem__), **fx.node.map_arg(dict(kwargs), tensors.__getitem__))


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def test_every_form_that_overwrites_is_tried() -> None:
    elsewhere = {norm_pieces.cudnn_backward}  # runs only on CUDA
    assert {target for target, _ in CALLS} == {*inplace._OUT, *inplace._CALLS} - elsewhere


def called(target: Any) -> str:
    """A name that is the same in every process."""
    return f"{target.__module__}.{target.__name__}" if isfunction(target) else str(target)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [pytest.param(*call, id=called(call[0])) for call in CALLS],
)
@settings(max_examples=settings().max_examples // 3)
@given(
    st.tuples(*[st.integers(1, 6)] * 4), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.booleans()
)
def test_written_over_an_operand_the_result_has_the_same_bits(
    target: Callable[..., Any],
    arguments: Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    channels_last: bool,
    odd_values: bool,
) -> None:
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    if odd_values:
        x[x > 1.2], y[y > 1] = float("nan"), float("inf")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, y = (tensor.to(dtype).contiguous(memory_format=layout) for tensor in (x, y))
    node, tensors = node_of(target, *arguments(x, y))
    expected = call(target, node.args, node.kwargs, {n: t.clone() for n, t in tensors.items()})
    found = inplace.operands(node)
    if first(expected).stride() == x.stride():  # PyTorch may lay out what has axes of one element in another way
        assert found
    for operand in found:
        mine = {n: t.clone() for n, t in tensors.items()}
        result = call(*_over(node, operand), mine)
        if target is not batch_norm.backward:  # which leaves small gradients to PyTorch
            assert first(result).data_ptr() == mine[operand].data_ptr()
        parts = [(result, expected)] if isinstance(result, torch.Tensor) else zip(result, expected, strict=True)
        for ours, theirs in parts:
            assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))
            assert torch.equal(ours.isnan(), theirs.isnan())
        others = [n for n in tensors if n is not operand]
        assert all(torch.equal(mine[n].nan_to_num(9), tensors[n].nan_to_num(9)) for n in others)


def _over(node: fx.Node, operand: fx.Node) -> tuple[Any, Any, Any]:
    target, kwargs = inplace.overwriting(node.target, node.kwargs, operand)
    return target, node.args, kwargs


def convolution_over(x: torch.Tensor, *, stride: int = 1, parts: int = 1) -> fx.Node:
    channels = x.shape[1]
    weight = torch.randn(channels, channels * parts, 3, 3, 3)
    options = ([stride] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    graph = fx.Graph()
    operands = [graph.placeholder(f"x{number}") for number in range(parts)]
    for operand in operands:
        operand.meta["val"] = x
    of_weight = graph.placeholder("weight")
    of_weight.meta["val"] = weight
    source = operands[0] if parts == 1 else operands
    node = graph.call_function(direct_convolution.forward, (source, of_weight, None, *options))
    node.meta["val"] = direct_convolution.forward([x] * parts, weight, None, *options)
    return node


def test_a_direct_convolution_may_go_over_large_operands_of_its_result_s_size() -> None:
    large, small = torch.randn(1, 8, 24, 80, 80), torch.randn(1, 8, 4, 8, 8)
    whole = convolution_over(large)
    assert [one.name for one in inplace.operands(whole)] == ["x0"]
    of_parts = convolution_over(large, parts=2)
    assert [one.name for one in inplace.operands(of_parts)] == ["x0", "x1"]
    target, kwargs = inplace.overwriting(of_parts.target, {}, inplace.operands(of_parts)[1])
    assert target is direct_convolution.forward and kwargs == {"over": inplace.operands(of_parts)[1]}
    assert inplace.operands(convolution_over(small)) == ()  # a copy of its planes would be all of it
    assert inplace.operands(convolution_over(large, stride=2)) == ()


def test_options_stay_when_the_result_goes_over_an_operand() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    node, tensors = node_of(aten.add.Tensor, x, y, alpha=2.5)
    result = call(*_over(node, inplace.operands(node)[1]), tensors)
    assert result is y
    assert torch.equal(result, node.meta["val"])


A, B = torch.randn(4, 6), torch.randn(4, 6)
COMPLEX = torch.complex(A, B)


@pytest.mark.parametrize(
    ("target", "args", "places"),
    [
        (aten.add.Tensor, (A, B), {0, 1}),
        (aten.add.Tensor, (A, A), {0}),
        (aten.add.Tensor, (A, torch.randn(6)), {0}),  # the second is broadcast
        (aten.add.Tensor, (torch.randn(4, 1), torch.randn(1, 6)), set()),
        (aten.mul.Tensor, (A, B.double()), {1}),  # the result is double
        (aten.div.Tensor, (torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)), set()),
        (aten.sub.Tensor, (torch.randn(6, 4).t(), B), {0}),  # the result has the layout of the first
        (aten.tanh.default, (torch.randn(5, 6)[1:],), set()),  # a part of a block
        (aten.tanh.default, (torch.randn(24)[:12],), set()),
        (aten.tanh.default, (torch.randn(1, 6).expand(4, 6),), set()),
        (aten.tanh_backward.default, (A, B), {0}),  # the second is what the forward pass saved
        (aten.exp.default, (A,), set()),  # no form of it is known
        (aten.add.Tensor, (COMPLEX, COMPLEX.conj_physical()), {0, 1}),
        (aten.add.Tensor, (COMPLEX, COMPLEX.conj()), {0}),  # the second says of its block that it is conjugated
        (aten.add.Tensor, (torch._neg_view(A), B), {1}),
        (aten.mul.Tensor, (COMPLEX, COMPLEX.conj_physical()), set()),  # it would be rounded in another way
        (aten.mul.Scalar, (COMPLEX, 3.3), set()),
        (aten.tanh.default, (COMPLEX,), set()),
        (aten.sum.default, (A,), set()),
    ],
)
def test_operands_qualify_whose_block_is_just_like_the_results(
    target: Callable[..., Any], args: tuple[torch.Tensor, ...], places: set[int]
) -> None:
    node, _ = node_of(target, *args)
    assert {node.args.index(operand) for operand in inplace.operands(node)} == places


@pytest.mark.parametrize("target", [aten.copy.default, aten.slice_scatter.default, aten.index_copy.default])
def test_complex_numbers_are_written_in_place(target: Callable[..., Any]) -> None:
    arguments = {
        aten.copy.default: (COMPLEX, COMPLEX.conj()),
        aten.slice_scatter.default: (COMPLEX, COMPLEX[1:].conj(), 0, 1),
        aten.index_copy.default: (COMPLEX, 0, torch.arange(4), COMPLEX.conj()),
    }[target]
    node, tensors = node_of(target, *arguments)
    expected = node.meta["val"].clone()
    assert torch.equal(
        call(*_over(node, inplace.operands(node)[0]), {n: t.clone() for n, t in tensors.items()}), expected
    )


@given(st.data())
def test_what_is_written_and_what_is_read_of_one_tensor_are_told_apart(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(shape))))
    base = torch.arange(torch.Size(shape).numel()).view([shape[axis] for axis in order])
    base = base.permute([order.index(axis) for axis in range(len(shape))])
    dim = data.draw(st.integers(0, len(shape) - 1))
    length = data.draw(st.integers(1, shape[dim]))
    starts = st.integers(0, shape[dim] - length)
    start, other = data.draw(starts), data.draw(starts)
    part = base.narrow(dim, other, length)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("base", "part")]
    for node, value in zip(nodes, (base, part), strict=True):
        node.meta["val"] = value
    write = graph.call_function(aten.slice_scatter.default, (*nodes, dim, start, start + length))
    apart = not set(base.narrow(dim, start, length).flatten().tolist()) & set(part.flatten().tolist())
    assert inplace.writes_elsewhere(write) == apart


def test_of_views_that_are_no_boxes_nothing_is_known() -> None:
    base = torch.randn(4, 6)
    for part in (base.diagonal()[:2], base.view(-1).as_strided((2,), (5,)), base.view(-1).unfold(0, 4, 2)[0, :2]):
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in ("base", "part")]
        for node, value in zip(nodes, (base, part), strict=True):
            node.meta["val"] = value
        write = graph.call_function(aten.as_strided_scatter.default, (*nodes, [2], [1], 22))
        apart = not set(range(22, 24)) & set(torch.arange(24).as_strided(part.shape, part.stride()).tolist())
        assert apart or not inplace.writes_elsewhere(write)


class Spectral(nn.Module):
    """Filters its input by a product of what `rfft2` returns, as GFNet and neural operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(16, 9, 24, dtype=torch.cfloat))
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.rfft2(self.first(x), dim=(1, 2)) * self.filter
        return self.last(torch.fft.irfft2(x, s=(16, 16), dim=(1, 2))).tanh()


def test_a_product_of_complex_numbers_has_the_bits_of_plain_pytorch() -> None:
    net, x = Spectral(), torch.randn(4, 16, 16, 24)
    planned = shoal.compile(copy.deepcopy(net), "1GiB", allow="bitwise")
    for model in (net, planned):
        model(x).square().mean().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), planned.parameters(), strict=True))


class Applies(nn.Module):
    """A convolution, then any function of its result and of the model."""

    def __init__(self, function: Callable[[torch.Tensor, nn.Parameter], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(2, 4, 8, 8))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.conv(x), self.weight), self.weight * 2


NEVER: dict[str, Callable[[torch.Tensor, nn.Parameter], Any]] = {
    "a parameter": lambda x, w: torch.tanh(w) * x,
    "what is read later": lambda x, w: (torch.sigmoid(x).sum() + x.exp()).square(),
    "what is handed out": lambda x, w: (x, torch.tanh(x).sin()),
    "what is handed out as a view": lambda x, w: (x.flatten(1), torch.tanh(x).sin()),
    "what is read in another layout too": lambda x, w: (x + x.transpose(2, 3)).sin(),
    "a part that is read in addition to the whole": lambda x, w: (x[:, :2] + x[:, 2:]).sin(),
    "what the backward pass reads": lambda x, w: torch.nn.functional.silu(x).sin(),
}


@pytest.mark.parametrize("never", NEVER)
def test_what_someone_still_needs_is_not_overwritten(never: str) -> None:
    captured = captured_step(Applies(NEVER[never]))
    tensors = operands(captured.joint)
    before = [tensor.clone() for tensor in tensors]
    ours, theirs = run_lowered(captured, {}, tensors), run_joint(captured.joint, tensors)
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    assert all(map(torch.equal, tensors, before))
    (read,) = [op.writes[0] for op in captured.graph.ops if op.target == "aten.convolution.default"]
    weight = next(s.id for s in captured.graph.storages if s.shape == (2, 4, 8, 8) and s.kind == "parameter")
    taken = {run.takes_over for run in schedule(captured.graph, {}) if run.op < captured.graph.n_forward}
    assert weight not in taken
    if never != "a parameter":
        assert read not in taken


@pytest.mark.parametrize("network", ["residual", "mobile"])
def test_the_block_of_a_dying_operand_is_the_results(network: str) -> None:
    captured = captured_step(NETWORKS[network]())
    expected = [
        run.takes_over >= 0 for run in schedule(captured.graph, {}) if captured.graph.ops[run.op].phase != "loss"
    ]
    assert sum(expected) >= 4
    assert _takeovers(captured, in_place=True) == expected
    assert not any(_takeovers(captured, in_place=False))


def _takeovers(captured: Captured, in_place: bool) -> list[bool]:
    """For each op that runs, whether its first result lies where one of its operands lay."""
    found = []

    def watch(target: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            there = {a.data_ptr() for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
            result = target(*args, **kwargs)
            parts = [result] if isinstance(result, torch.Tensor) or result is None else result
            made = [part for part in parts if part is not None]
            found.append(bool(made) and made[0].data_ptr() in there)
            return result

        return watched

    def prepare(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op == "call_function" and not is_view(node) and node.target is not operator.getitem:
                node.target = watch(node.target)

    run_lowered(captured, {}, operands(captured.joint), in_place=in_place, prepare=prepare)
    return found


def test_of_two_operands_the_one_that_dies_is_overwritten() -> None:
    for function in (lambda x, w: x + (x.sin() + w), lambda x, w: (x.sin() + w) + x):
        graph = captured_step(Applies(lambda x, w, f=function: f(x, w).exp())).graph
        inner, total = [op for op in graph.ops if op.target == "aten.add.Tensor" and op.phase == "forward"]
        assert total.overwrites == inner.writes[0]


def scratch_bytes(run: Callable[[], Any]) -> int:
    result, changes = allocations.record(run)
    del result  # held until here: results are no scratch
    return allocations.peak_bytes(changes) - max(0, sum(changes))


@needs_compiler
@pytest.mark.parametrize(
    ("target", "arguments"),
    [pytest.param(*call, id=called(call[0])) for call in CALLS],
)
def test_what_takes_more_scratch_to_overwrite_is_measured_so(
    target: Callable[..., Any], arguments: Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]
) -> None:
    x, y = (torch.randn(2, 8, 256, 256, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    node, tensors = node_of(target, *arguments(x, y))
    anew = scratch_bytes(lambda: call(target, node.args, node.kwargs, tensors))
    for operand in inplace.operands(node):
        over = scratch_bytes(lambda operand=operand: call(*_over(node, operand), tensors))  # type: ignore[misc]
        assert over <= anew or inplace.needs_scratch_to_overwrite(target)
