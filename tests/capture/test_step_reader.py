"""A captured step is what really happens: its storages, what ops read and write, what is saved, what belongs where."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.capture.captured import Captured
from shoal.capture.step_reader import capture
from shoal.core.step import StepGraph
from shoal.errors import CaptureError
from shoal.graph.fx_nodes import is_view
from shoal.graph.op_counts import signature
from shoal.transforms.split.split import split
from tests.joint_graphs import NETWORKS, Residual, batch, captured_step, operands
from tests.raising import raising


class Calls(nn.Module):
    """A convolution, then any function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.conv(x))


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "views": lambda x: x.view(2, -1).t().reshape(4, -1, 2)[:, 3:].unsqueeze(0).sin(),
    "chunks": lambda x: [part * part for part in x.chunk(2, 1)],
    "split": lambda x: torch.cat([part.sigmoid() for part in x.split([1, 3], 1)], 1).tanh(),
    "unbind": lambda x: x.unbind(0)[0].exp() + x.unbind(1)[2].sum(),
    "expanded": lambda x: (x.mean((2, 3), keepdim=True).expand_as(x) * x).square(),
    "in place": lambda x: x.mul_(2).add_(1).relu_().square(),
    "in place through a view": lambda x: (x[:, 1:].mul_(3).sum() + x).square(),
    "view handed out": lambda x: (x.exp().flatten(1), x.exp()[:, 0]),
    "several outputs": lambda x: torch.max(x, 1).values * torch.var_mean(x, 1)[0],
    "copies": lambda x: x.transpose(1, 2).contiguous().view(-1).clone().cos(),
    "same twice": lambda x: (x * x, x + x),
    "sort": lambda x: x.sort(1)[0].cumsum(1).prod(1),
}
MODELS = {**NETWORKS, **{name: lambda f=function: Calls(f) for name, function in ALIASES.items()}}


@cache
def step_of(model: str) -> tuple[Captured, _Real]:
    captured = captured_step(MODELS[model]())
    return captured, _Real(captured)


@pytest.fixture(params=MODELS)
def captured(request: pytest.FixtureRequest) -> Captured:
    return step_of(request.param)[0]


@pytest.fixture
def real(request: pytest.FixtureRequest, captured: Captured) -> _Real:
    return step_of(request.node.callspec.params["captured"])[1]


class _Real(fx.Interpreter):
    """The joint graph on real tensors, all of them kept: `env` holds every node's value."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.joint, garbage_collect_values=False)
        with torch.no_grad():
            self.run(*operands(captured.joint), enable_io_processing=False)
        values = {node: value for node, value in self.env.items() if isinstance(value, torch.Tensor)}
        self.tensors: dict[fx.Node, torch.Tensor] = values
        self.blocks = {node: value.untyped_storage()._cdata for node, value in values.items()}


def test_two_tensors_share_a_storage_where_they_really_do(captured: Captured, real: _Real) -> None:
    assert set(real.tensors) <= set(captured.storage_of)
    block_of: dict[int, int] = {}
    for node, block in real.blocks.items():
        assert block_of.setdefault(captured.storage_of[node], block) == block
    assert len(set(block_of.values())) == len(block_of)


def test_storages_have_their_real_size_dtype_and_shape(captured: Captured, real: _Real) -> None:
    by_name = {node.name: tensor for node, tensor in real.tensors.items()}
    for storage in captured.graph.storages:
        tensors = [by_name[name] for name in storage.tensors if name in by_name]  # without lists of views
        assert {tensor.untyped_storage().nbytes() for tensor in tensors} <= {storage.nbytes}
        for first in tensors[:1]:
            assert (tuple(first.shape), str(first.dtype)) == (storage.shape, f"torch.{storage.dtype}")


def test_ops_read_the_blocks_of_their_operands_and_write_blocks_that_no_one_had(
    captured: Captured, real: _Real
) -> None:
    block_of = {storage: real.blocks[node] for node, storage in captured.storage_of.items() if node in real.blocks}
    seen = {real.blocks[node] for node in real.tensors if node.op in ("placeholder", "get_attr")}
    for op in captured.graph.ops:
        if op.phase == "loss":
            continue
        node = captured.node_of[op.name]
        assert [block_of[s] for s in op.reads] == list(
            dict.fromkeys(real.blocks[operand] for operand in node.all_input_nodes if operand in real.blocks)
        )
        made = real.env[node]
        made = [made] if isinstance(made, torch.Tensor) else [part for part in made or () if part is not None]
        known = [block_of[s] for s in op.writes if s in block_of]  # a result that no one takes has no node
        assert len(made) == len(op.writes)
        assert not set(known) & seen
        assert set(known) <= {part.untyped_storage()._cdata for part in made}
        seen.update(known)


def test_every_node_that_computes_is_an_op_in_its_order(captured: Captured) -> None:
    computing = [
        node.name
        for node in captured.joint.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem and not is_view(node)
    ]
    ops = captured.graph.ops
    assert sorted(op.name for op in ops if op.phase != "loss") == sorted(computing)
    assert [op.phase for op in ops] == sorted([op.phase for op in ops], key=["forward", "loss", "backward"].index)
    for phase in ("forward", "backward"):
        names = [op.name for op in ops if op.phase == phase]
        assert names == [name for name in computing if name in set(names)]
    assert [op.signature for op in ops if op.phase != "loss"] == [
        signature(captured.node_of[op.name]) for op in ops if op.phase != "loss"
    ]


def test_saved_storages_are_what_forward_ops_write_and_backward_ops_read(captured: Captured, real: _Real) -> None:
    written, read = set(), set()
    for op in captured.graph.ops:
        node = captured.node_of.get(op.name)
        if op.phase == "forward":
            results = [real.env[node]] if isinstance(real.env[node], torch.Tensor) else real.env[node] or ()
            written.update(part.untyped_storage()._cdata for part in results if part is not None)
        elif op.phase == "backward":
            read.update(real.blocks[operand] for operand in node.all_input_nodes if operand in real.blocks)
    block_of = {storage: real.blocks[node] for node, storage in captured.storage_of.items() if node in real.blocks}
    assert {block_of[s] for s in captured.graph.saved} == written & read


def test_the_forward_pass_is_all_that_its_outputs_need_and_nothing_that_needs_a_tangent(captured: Captured) -> None:
    needed = [node for node in captured.forward_outputs if isinstance(node, fx.Node)]
    for node in needed:
        needed += [operand for operand in node.all_input_nodes if operand not in needed]
    fed = {node for node in captured.joint.graph.find_nodes(op="placeholder") if node.name.startswith("tangents")}
    for node in captured.joint.graph.nodes:
        fed |= {node} if fed.intersection(node.all_input_nodes) else set()
    for op in captured.graph.ops:
        if op.phase == "forward":
            assert captured.node_of[op.name] not in fed
        elif op.phase == "backward":
            assert captured.node_of[op.name] not in needed


def test_what_either_graph_hands_back_is_never_an_activation_or_an_error(captured: Captured) -> None:
    storages = captured.graph.storages
    for node in captured.forward_outputs:
        if isinstance(node, fx.Node):
            assert storages[captured.storage_of[node]].kind not in ("activation", "activation_gradient")
    for node in captured.backward_outputs:
        if isinstance(node, fx.Node):
            assert storages[captured.storage_of[node]].kind not in ("activation", "activation_gradient")
    computed = {"output", "gradient"}
    handed = [n for n in (*captured.forward_outputs, *captured.backward_outputs) if isinstance(n, fx.Node)]
    assert {s.id for s in storages if s.kind in computed} <= {captured.storage_of[node] for node in handed}


def test_each_signature_has_a_node_to_time(captured: Captured) -> None:
    ops = [op for op in captured.graph.ops if op.phase != "loss"]
    signatures = {op.signature for op in ops} | {op.again.signature for op in ops if op.again}
    nodes = captured.distinct_nodes()
    assert set(nodes) == signatures
    assert all(signature(node) == key for key, node in nodes.items())


def _sizes(graph: StepGraph, kind: str) -> list[tuple[int, ...]]:
    return sorted(s.shape for s in graph.storages if s.kind == kind)


@pytest.mark.parametrize("network", NETWORKS)
def test_parameters_buffers_batch_and_gradients_are_told_apart(network: str) -> None:
    model = NETWORKS[network]()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    graph = captured_step(model).graph
    assert _sizes(graph, "parameter") == sorted(tuple(p.shape) for p in model.parameters())
    assert _sizes(graph, "buffer") == sorted(tuple(b.shape) for b in model.buffers())
    assert _sizes(graph, "input") == [(2, 3, 8, 8)]
    gradients = sorted(s.nbytes for s in graph.storages if s.kind == "gradient")
    assert gradients == sorted(p.nbytes for p in model.parameters() if p is not frozen)
    assert _sizes(graph, "tangent") == [tuple(model(batch()).shape)]


def test_a_layer_that_is_called_twice_has_one_weight_and_one_gradient() -> None:
    shared = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), shared, nn.Tanh(), shared)
    graph = captured_step(model).graph
    assert _sizes(graph, "parameter") == [(4, 3, 1, 1), (4, 4, 3, 3)]
    assert _sizes(graph, "gradient") == [(4, 3, 1, 1), (4, 4, 3, 3)]


def test_an_input_that_is_handed_back_stays_an_input() -> None:
    graph = captured_step(Calls(lambda x: x.sum()), batch()).graph
    assert [s.kind for s in graph.storages if s.shape == (2, 3, 8, 8)] == ["input"]


def test_the_gradient_of_the_batch_is_handed_back_too() -> None:
    x = batch().requires_grad_()
    graph = captured_step(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Tanh()), x).graph
    assert _sizes(graph, "gradient") == [(2, 3, 8, 8), (4, 3, 3, 3)]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.ModuleList([Residual(nn.Conv2d(4, 4, 1)), Residual(nn.Conv2d(4, 4, 1))])
        self.heads = nn.ModuleDict({"wide": nn.Conv2d(4, 2, 1), "0": nn.Conv2d(4, 1, 1)})

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return [head(x) for head in self.heads.values()]


def test_ops_belong_to_the_layer_that_called_them_forward_and_backward() -> None:
    model = Named()
    graph = captured_step(model).graph
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert [op.layer for op in graph.ops if op.target == "aten.convolution.default"] == convolutions
    backward = {op.layer for op in graph.ops if op.phase == "backward" and "convolution_backward" in op.target}
    assert backward == set(convolutions)
    assert {op.layer for op in graph.ops if "relu" in op.target} == {"blocks.0", "blocks.1"}
    assert {s.layer for s in graph.storages if s.kind == "gradient"} == set(convolutions)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("calls", torch.ones(4, 1, 1))
        self.register_buffer("factor", torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        moved, still = (x + self.calls).tanh(), (x + self.factor).tanh()
        self.calls += 1
        return moved * still


def test_what_reads_a_buffer_that_the_forward_pass_changes_must_not_run_twice() -> None:
    graph = captured_step(Counting()).graph
    calls, factor = [s.id for s in graph.storages if s.kind == "buffer"]
    of_calls = [op.recomputable for op in graph.ops if calls in op.reads and op.phase == "forward"]
    of_factor = [op.recomputable for op in graph.ops if factor in op.reads and op.phase == "forward"]
    assert of_calls == [False, False]  # what copies it, and what adds to it
    assert of_factor == [True]


def test_an_in_place_activation_is_the_same_step_as_one_that_is_not() -> None:
    def step(in_place: bool) -> list[tuple[Any, ...]]:
        layers = [nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(in_place), nn.Conv2d(4, 4, 1), nn.ReLU6(in_place)]
        graph = captured_step(nn.Sequential(*layers)).graph
        return [(op.target, op.reads, op.writes, op.overwrites) for op in graph.ops]

    assert step(True) == step(False)


def test_standing_bytes_and_the_name_are_carried_along() -> None:
    joint = make_fx(lambda x, tangents_1: [x.sin(), x.cos() * tangents_1], tracing_mode="fake")(*[torch.ones(4)] * 2)
    graph = capture(joint, 1, model="sine", parameters=[0], static_bytes=17).graph
    assert (graph.model, graph.static_bytes, graph.storages[0].kind) == ("sine", 17, "parameter")


def test_parameters_and_ops_on_padded_patches_have_their_layers() -> None:
    graph = captured_step(split(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)), 1.0)).graph
    assert {s.layer for s in graph.storages if s.kind == "parameter"} == {"0", "1"}
    assert all(op.layer for op in graph.ops if "convolution" in op.target)


def test_symbolic_sizes_are_refused_with_the_way_out() -> None:
    joint = make_fx(lambda x: [x * x.shape[0]], tracing_mode="symbolic")(torch.ones(5, 3))
    with raising(CaptureError, "dynamic=False"):
        capture(joint, 1)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x


def test_what_dynamo_cannot_capture_is_refused_in_one_line() -> None:
    with pytest.raises(CaptureError):
        captured_step(nn.Sequential(nn.Conv2d(3, 4, 1), Branching()))


VIEWS: dict[str, tuple[Callable[[torch.Tensor], Any], float]] = {
    "one view": (lambda x: x.exp().flatten(1), 0),
    "a part": (lambda x: x.exp()[:, 0], 0),
    "two views": (lambda x: (y := x.exp(), (y.flatten(1), y.transpose(1, 2)))[1], 1),
    "a result and parts of it": (lambda x: (y := x.exp(), y[:1], y[1:]), 1),
    "chunks, each with its own gradient": (lambda x: x.exp().chunk(2, 1), 0),
    "without a gradient": (lambda x: (x.exp(), (x > 0).flatten(1), (x + 1).detach()), 0),
}


@pytest.mark.parametrize("case", VIEWS)
def test_results_that_share_a_gradient_count_as_often_as_there_are(case: str) -> None:
    function, times = VIEWS[case]
    graph = captured_step(Calls(function)).graph
    (nbytes, *_) = (s.nbytes for s in graph.storages if s.kind == "output" and s.dtype == "float32")
    assert graph.shared_result_bytes == times * nbytes
