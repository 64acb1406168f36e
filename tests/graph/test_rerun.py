"""The second run of an op gives what the first gave, moves nothing, and is refused where it could not."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from shoal.graph.op_counts import signature
from shoal.graph.rerun import can_run_again, is_of_the_batch, is_random, moves_statistics, second_call, second_node
from shoal.kernels import norm_again
from shoal.kernels.buffers import add_to
from shoal.kernels.norm_again import normalise, repeats_bits
from tests.engine.training_laws import same_bits
from tests.joint_graphs import captured_step, operands

aten = torch.ops.aten
CPU = torch.device("cpu")


class Frozen(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


BATCH_NORMS = {
    "plain": lambda: nn.BatchNorm2d(4),
    "no affine": lambda: nn.BatchNorm2d(4, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "frozen": lambda: Frozen(4).eval(),
    "channels last": lambda: nn.Sequential(nn.BatchNorm2d(4)).to(memory_format=torch.channels_last),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "two": lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Tanh(), nn.BatchNorm2d(4, eps=0.1)),
}


def nodes_of(layer: nn.Module) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """The joint graph of a step with this layer, and the real value of every node of it."""
    captured = captured_step(nn.Sequential(nn.Conv2d(3, 4, 1), layer))
    interpreter = fx.Interpreter(captured.joint, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*operands(captured.joint), enable_io_processing=False)
    return captured.joint, interpreter.env


def batch_norms(joint: fx.GraphModule) -> list[fx.Node]:
    return [node for node in joint.graph.nodes if "batch_norm" in str(node.target) and "backward" not in str(node)]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("layer", BATCH_NORMS)
def test_batch_norm_normalises_again_to_the_same_bits_and_moves_no_statistics(
    layer: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not quick:
        monkeypatch.setattr(norm_again, "repeats_bits", lambda *_: False)
    joint, values = nodes_of(BATCH_NORMS[layer]())
    found = batch_norms(joint)
    assert found
    for node in found:
        assert can_run_again(node)
        target, args = second_call(node)
        args = fx.node.map_arg(args, lambda operand: values[operand])
        kept = [arg.clone() for arg in args if isinstance(arg, torch.Tensor)]
        with torch.no_grad():
            again = target(*args)
        assert all(map(same_bits, kept, (arg for arg in args if isinstance(arg, torch.Tensor))))
        first = values[node]
        if target is normalise:
            assert same_bits(again, first[0])
            assert again.stride() == first[0].stride()
        else:
            assert all(map(same_bits, again[:3], first[:3]))
        assert (target is normalise) <= quick


def test_of_its_operands_the_second_run_reads_no_running_statistics() -> None:
    joint, _ = nodes_of(nn.BatchNorm2d(4))
    (node,) = batch_norms(joint)
    assert moves_statistics(node)
    moving = {node.args[3], node.args[4]}
    assert not moving.intersection(arg for arg in second_call(node)[1] if isinstance(arg, fx.Node))


def test_with_running_statistics_that_stay_a_batch_norm_runs_again_as_it_is() -> None:
    joint, _ = nodes_of(BATCH_NORMS["frozen"]())
    for node in batch_norms(joint):
        assert not moves_statistics(node) and not is_of_the_batch(node)
        assert second_call(node) == (node.target, node.args)
        assert second_node(node) is None


@pytest.mark.parametrize("layer", ["no statistics", "instance norm"])
def test_a_norm_without_running_statistics_takes_those_of_the_batch_once(layer: str) -> None:
    joint, _ = nodes_of(BATCH_NORMS[layer]())
    (node,) = batch_norms(joint)
    assert is_of_the_batch(node) and not moves_statistics(node)
    channels = node.args[0].meta["val"].shape[1]  # type: ignore[union-attr]
    assert (second_call(node)[0] is normalise) == repeats_bits(torch.float32, CPU, 4, channels, False, torch.float32)


def test_the_second_node_is_the_second_call_with_the_first_result_alone() -> None:
    joint, _ = nodes_of(nn.BatchNorm2d(4))
    (node,) = batch_norms(joint)
    if not repeats_bits(torch.float32, CPU, 4, 4, False, torch.float32):
        assert second_node(node) is None
        return
    second = second_node(node)
    assert second is not None
    assert second.target is normalise
    assert second.meta["val"].shape == (2, 4, 8, 8)
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    expected = [*node.args[:3], items[1], items[2]]
    assert [operand.name for operand in second.all_input_nodes] == [operand.name for operand in expected]
    assert signature(second).startswith("shoal.norm_again.normalise(f32[2,4,8,8]")


@pytest.mark.parametrize(
    ("shape", "weight", "layout"),
    [
        ((3, 4), torch.float32, torch.contiguous_format),  # of no dimension to lay out
        ((2, 4, 8, 8), torch.float64, torch.contiguous_format),  # of mixed dtypes
        ((2, 4, 8, 8), torch.float32, "transposed"),
    ],
)
def test_what_has_not_been_tried_is_left_to_pytorchs_kernel(
    shape: tuple[int, ...], weight: torch.dtype, layout: Any
) -> None:
    x = torch.randn(shape)
    x = x.transpose(2, 3) if layout == "transposed" else x
    if layout == "transposed":
        x = x.contiguous().as_strided(shape, (256, 64, 1, 8))
    graph = fx.Graph()
    tensors = [x, torch.randn(4, dtype=weight), torch.randn(4, dtype=weight), torch.zeros(4), torch.ones(4)]
    placeholders = [graph.placeholder(f"x{place}") for place in range(5)]
    for placeholder, tensor in zip(placeholders, tensors, strict=True):
        placeholder.meta["val"] = tensor
    node = graph.call_function(aten._native_batch_norm_legit_functional.default, (*placeholders, True, 0.1, 1e-5))
    for place in range(3):
        graph.call_function(operator.getitem, (node, place))
    assert second_call(node)[0] is aten._native_batch_norm_legit.no_stats


def node(target: Any, *args: Any) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"), *args))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.relu.default, True),
        (aten.convolution.default, True),
        (aten.native_dropout.default, True),
        (aten._native_batch_norm_legit_functional.default, True),
        (aten.relu_.default, False),
        (aten.add_.Tensor, False),
        (aten.native_batch_norm.default, False),  # moves the statistics of its owner in place
        (aten._native_batch_norm_legit.default, True),  # its second run takes no running statistics
        (aten.cudnn_batch_norm.default, True),
        (add_to, False),
    ],
)
def test_what_changes_something_besides_its_results_must_not_run_again(target: Any, expected: bool) -> None:
    graph = fx.Graph()
    assert can_run_again(graph.call_function(target, (graph.placeholder("x"),))) is expected


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(nn.Dropout(0.4), 1), (nn.Dropout2d(0.4), 1), (nn.RReLU(), 1), (nn.Tanh(), 0), (nn.Dropout(0), 0)],
)
def test_random_ops_are_known(layer: nn.Module, expected: int) -> None:
    captured = captured_step(nn.Sequential(nn.Conv2d(3, 4, 1), layer))
    forward = {op.name for op in captured.graph.ops if op.phase == "forward"}
    assert sum(is_random(captured.node_of[name]) for name in forward) == expected
    assert {op.name for op in captured.graph.ops if op.random} == {
        name for name, node in captured.node_of.items() if is_random(node)
    }


class Pair(nn.Module):
    """A norm and an activation, whose result only a convolution reads."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation, self.conv = norm, activation, nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.activation(self.norm(x)))


PAIRS = {
    "instance norm, leaky": lambda: Pair(nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True)),
    "instance norm, steeper": lambda: Pair(nn.InstanceNorm2d(4), nn.LeakyReLU(0.2)),
    "group norm, ReLU": lambda: Pair(nn.GroupNorm(2, 4), nn.ReLU()),
    "batch norm without running statistics": lambda: Pair(nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_an_activation_that_alone_reads_a_norm_runs_again_with_it_from_the_norms_input(pair: str) -> None:
    joint, values = nodes_of(PAIRS[pair]())
    (node,) = [node for node in joint.graph.nodes if node.target in (aten.relu.default, aten.leaky_relu.default)]
    target, args = second_call(node)
    assert target is norm_again.activated
    assert torch.equal(target(*fx.node.map_arg(args, values.__getitem__)), values[node])
    second = second_node(node)
    assert second is not None and second.meta["val"].shape == values[node].shape
    read = {operand.name for operand in second.all_input_nodes}
    assert not any(name.startswith(("getitem_0", "view_1")) for name in read) and signature(second) != signature(node)


def test_an_activation_whose_norm_has_other_readers_or_other_bits_runs_again_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Twice(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.norm(x)
            return self.conv(self.activation(z)) * torch.tanh(z)

    def second_target(layer: nn.Module) -> Any:
        joint, _ = nodes_of(layer)
        (node,) = [node for node in joint.graph.nodes if node.target is aten.relu.default]
        return second_call(node)[0]

    assert second_target(Twice(nn.GroupNorm(2, 4), nn.ReLU())) is aten.relu.default
    # Normalised again over its own input, a batch norm needs one tensor, not two.
    assert second_target(Pair(nn.BatchNorm2d(4), nn.ReLU())) is aten.relu.default
    monkeypatch.setattr(norm_again, "activated_repeats_bits", lambda *_: False)
    assert second_target(PAIRS["group norm, ReLU"]()) is aten.relu.default
