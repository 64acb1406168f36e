"""Counts against hand counts, signatures against each other, and the laws of the roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.core import presets
from shoal.core.hardware import Hardware
from shoal.core.step import Op, StepGraph, Storage
from shoal.cost.roofline import roofline
from shoal.graph.op_counts import flops, moved_bytes, signature, target_name

aten = torch.ops.aten


def node_of(function: Callable[..., Any], *operands: torch.Tensor) -> fx.Node:
    """The last node that `function` leaves in a captured graph."""
    traced = make_fx(function, tracing_mode="fake")(*operands)
    return [node for node in traced.graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)][-1]


def convolution(
    x: torch.Tensor, w: torch.Tensor, stride: int = 1, groups: int = 1, transposed: bool = False
) -> fx.Node:
    dims = x.dim() - 2
    options = ([stride] * dims, [0] * dims, [1] * dims, transposed, [0] * dims, groups)
    return node_of(lambda a, b: aten.convolution(a, b, None, *options), x, w)


def backward_of_convolution(options, grad, x, w):
    return aten.convolution_backward(grad, x, w, *options)


def count_taps(x: torch.Tensor, w: torch.Tensor, **options: Any) -> int:
    """Multiply-adds of a convolution, found by running it on ones: each output is the number of its taps."""
    function = torch.nn.functional.conv_transpose2d if options.pop("transposed", False) else torch.nn.functional.conv2d
    return int(function(torch.ones_like(x), torch.ones_like(w), **options).double().sum())


@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((2, 3, 8, 9), (5, 3, 3, 3), {}),
        ((2, 4, 9, 9), (6, 2, 3, 1), {"groups": 2, "stride": 2}),
        ((1, 6, 7, 7), (6, 1, 3, 3), {"groups": 6}),
        ((2, 4, 5, 5), (4, 3, 2, 2), {"transposed": True, "stride": 2}),
        ((2, 4, 5, 5), (4, 3, 2, 2), {"transposed": True, "groups": 2}),
    ],
)
def test_a_convolution_counts_two_flops_a_tap_and_as_many_for_each_direction_back(x, w, options):
    x, w = torch.zeros(x), torch.zeros(w)
    forward = convolution(x, w, **options)
    taps = count_taps(x, w, **options)
    assert flops(forward) == 2 * taps

    grad = torch.zeros(forward.meta["val"].shape)
    out_channels = grad.shape[1]
    for mask, expected in (
        ([True, True, False], 4 * taps),
        ([False, True, False], 2 * taps),
        ([True, False, True], 2 * taps + grad.numel()),
    ):
        arguments = ([out_channels], *forward.args[3:], mask)
        backward = node_of(partial(backward_of_convolution, arguments), grad, x, w)
        assert flops(backward) == expected


def test_three_dimensional_convolutions_count_alike():
    node = convolution(torch.zeros(1, 2, 5, 5, 5), torch.zeros(4, 2, 3, 3, 3))
    assert flops(node) == 2 * (4 * 3 * 3 * 3) * (2 * 27)


def test_matrix_products_pointwise_ops_and_reductions():
    a, b = torch.zeros(4, 6), torch.zeros(6, 5)
    assert flops(node_of(torch.mm, a, b)) == 2 * 4 * 6 * 5
    assert flops(node_of(lambda x, y: aten.addmm(torch.zeros(5), x, y), a, b)) == 2 * 4 * 6 * 5
    assert flops(node_of(torch.relu, a)) == 24
    assert flops(node_of(lambda x: x.sum(), a)) == 24


def test_views_and_bare_allocations_cost_nothing():
    a = torch.zeros(4, 6)
    for view in (lambda x: x.view(24), torch.t, lambda x: x.expand(3, 4, 6), torch.detach, lambda x: x[1:]):
        node = node_of(view, a)
        assert (flops(node), moved_bytes(node)) == (0, 0)
    node = node_of(torch.empty_like, a)
    assert (flops(node), moved_bytes(node)) == (0, 0)


def test_moved_bytes_count_every_distinct_operand_and_every_output_once():
    a, b = torch.zeros(4, 6), torch.zeros(4, 6)
    assert moved_bytes(node_of(torch.add, a, b)) == 3 * 96
    assert moved_bytes(node_of(lambda x: x + x, a)) == 2 * 96
    assert moved_bytes(node_of(lambda x: x.to(torch.float64), a)) == 96 + 192
    assert moved_bytes(node_of(lambda x, y: x + y.expand(4, 6), a, torch.zeros(1, 6))) == 96 + 24 + 96
    pool = node_of(lambda x: aten.max_pool2d_with_indices(x, [2, 2]), torch.zeros(1, 2, 4, 4))
    assert moved_bytes(pool) == 4 * 32 + (4 + 8) * 8


def test_an_op_that_writes_its_operand_moves_bytes():
    with FakeTensorMode():
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.zeros(10)
        node = graph.call_function(aten.relu_.default, (x,))
        node.meta["val"] = x.meta["val"]
    assert moved_bytes(node) == 80


def test_signatures_read_well_and_hold_no_names():
    x = torch.zeros(2, 3, 8, 8)
    expected = "aten.convolution.default(f32[2,3,8,8], f32[5,3,3,3], None, [1,1], [0,0], [1,1], False, [0,0], 1)"
    assert signature(convolution(x, torch.zeros(5, 3, 3, 3))) == expected
    later = node_of(
        lambda a, w: aten.convolution(a.relu(), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        x,
        torch.zeros(5, 3, 3, 3),
    )
    assert signature(later) == expected


def test_signatures_differ_where_costs_do():
    x, w = torch.zeros(2, 4, 8, 8), torch.zeros(4, 4, 3, 3)
    different = [
        convolution(x, w),
        convolution(x, w, stride=2),
        convolution(x.to(memory_format=torch.channels_last), w),
        convolution(x.bfloat16(), w.bfloat16()),
        convolution(x[:1], w),
        convolution(x, w[:, :2], groups=2),
        node_of(torch.add, x, x.clone()),
        node_of(lambda a: a + a, x),
        node_of(lambda a: a + 1, x),
        node_of(lambda a: aten.relu(a), x),
        node_of(lambda a: aten.sigmoid(a), x),
    ]
    assert len({signature(node) for node in different}) == len(different)


def _encode(x: torch.Tensor, codec: object) -> torch.Tensor:
    return x


def test_python_functions_are_told_by_module_and_name_without_addresses():
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.zeros(3)
    one, other = graph.call_function(_encode, (x, object())), graph.call_function(_encode, (x, object()))
    assert signature(one) == signature(other)
    assert target_name(_encode) in signature(one)
    assert "0x" not in signature(one)


sizes = st.integers(0, 10**12)


def step(*ops: Op) -> StepGraph:
    storages = (
        Storage(0, "x", 4096, "input", "", (1024,), "float32"),
        Storage(1, "y", 4096, "activation", "", (1024,), "float32"),
    )
    return StepGraph("model", tuple(replace(op, id=i) for i, op in enumerate(ops)), storages)


def op(flop_count: int, nbytes: int, target: str = "aten.convolution.default") -> Op:
    return Op(0, "op", target, "forward", "", (0,), (1,), flops=flop_count, moved_bytes=nbytes, workspace_bytes=7)


def seconds(one: Op, hardware: Hardware) -> float:
    return roofline(step(one), hardware).ops[0].seconds


@given(st.sampled_from(presets.names()), sizes, sizes, sizes, sizes)
@settings(max_examples=60)
def test_more_work_never_takes_less_time_and_a_launch_is_the_least(name, flop_count, nbytes, more_flops, more_bytes):
    hardware = presets.get(name)
    base = seconds(op(flop_count, nbytes), hardware)
    assert base >= hardware.device.launch_seconds
    assert seconds(op(flop_count + more_flops, nbytes), hardware) >= base * (1 - 1e-12)
    assert seconds(op(flop_count, nbytes + more_bytes), hardware) >= base


@given(sizes, sizes, st.floats(1, 100), st.floats(1, 100))
@settings(max_examples=60)
def test_a_faster_device_never_takes_longer(flop_count, nbytes, compute, memory):
    slow = presets.get("titanx-pcie")
    device = slow.device
    fast = replace(
        slow,
        device=replace(
            device,
            flops_per_second=device.flops_per_second * compute,
            bytes_per_second=device.bytes_per_second * memory,
        ),
    )
    assert seconds(op(flop_count, nbytes), fast) <= seconds(op(flop_count, nbytes), slow) * (1 + 1e-12)


def test_the_roofline_is_the_slower_of_arithmetic_and_traffic():
    hardware = presets.get("p100-nvlink")
    device = hardware.device
    busy = seconds(op(10**12, 0), hardware)
    assert busy == pytest.approx(10**12 / device.flops_per_second + device.launch_seconds)
    moving = seconds(op(0, 10**9, "aten.relu.default"), hardware)
    assert moving == pytest.approx(10**9 / device.bytes_per_second + device.launch_seconds)


def test_short_inner_products_and_second_passes_cost_extra():
    hardware = presets.get("p100-nvlink")
    device = hardware.device
    depthwise = seconds(op(2 * 9 * 1024, 0), hardware) - device.launch_seconds
    assert depthwise == pytest.approx(2 * 64 * 1024 / device.flops_per_second)
    plain = seconds(op(0, 10**9, "aten.add.Tensor"), hardware)
    for target in (
        "aten._native_batch_norm_legit_functional.default",
        "aten.native_batch_norm_backward.default",
        "aten.max_pool2d_with_indices_backward.default",
    ):
        assert seconds(op(0, 10**9, target), hardware) > 1.4 * plain


def test_the_roofline_leaves_the_step_as_it_was():
    graph = step(op(10, 10))
    timed = roofline(graph, presets.get("h200"))
    assert graph.ops[0].seconds == 0.0
    assert timed.ops[0].workspace_bytes == 0
    assert timed.fingerprint == graph.fingerprint


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float32, 1e12), (torch.bfloat16, 4e12), (torch.float16, 4e12)])
def test_halves_run_at_their_own_rate_where_the_device_has_one(dtype: torch.dtype, rate: float) -> None:
    kind = str(dtype).removeprefix("torch.")
    storages = tuple(Storage(n, f"s{n}", 4, "activation", "", (64, 64), kind) for n in range(2))
    step = StepGraph("step", (Op(0, "mm", "aten.mm.default", "forward", "", (0,), (1,), flops=10**12),), storages)
    device = replace(presets.get("p100-nvlink").device, flops_per_second=1e12, launch_seconds=0.0)
    for halves, expected in ((4e12, rate), (0.0, 1e12)):
        hardware = replace(presets.get("p100-nvlink"), device=replace(device, half_flops_per_second=halves))
        assert roofline(step, hardware).ops[0].seconds == pytest.approx(10**12 / expected)
