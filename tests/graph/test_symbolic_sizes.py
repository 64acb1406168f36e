"""Symbolic sizes: how large a storage can be, by brute force over every draw; sizes as arguments of nodes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import fx, nn

from shoal.capture.captured import Captured
from shoal.graph.symbolic_sizes import is_size, largest_numbers, usual, usual_numbers, with_numbers
from shoal.transforms.split.split import split
from tests.joint_graphs import captured_step


@pytest.fixture(scope="module")
def drawn() -> Captured:
    layers = [nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Tanh()]
    return captured_step(split(nn.Sequential(*layers), 1.0, (3, 2), stochastic=0.2), torch.randn(2, 2, 32, 24))


def sizes(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.joint.graph.find_nodes(op="placeholder") if is_size(node)]


def held_bytes(captured: Captured, graph: fx.Graph) -> dict[int, int]:
    """Storage id → the most bytes of a tensor that lies in it."""
    of_name = {node.name: storage for node, storage in captured.storage_of.items()}
    found: dict[int, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.name in of_name and isinstance(value, torch.Tensor):
            storage = of_name[node.name]
            found[storage] = max(found.get(storage, 0), value.untyped_storage().nbytes())
    return found


@pytest.mark.slow
def test_every_storage_has_the_largest_size_of_all_draws(drawn: Captured) -> None:
    symbols = {node.meta["val"].node.expr: node.meta["val"] for node in sizes(drawn)}
    assert len(symbols) == 3
    spans = [(value.node.shape_env.var_to_range[symbol]) for symbol, value in symbols.items()]
    every = product(*(range(int(span.lower), int(span.upper) + 1) for span in spans))
    most: dict[int, int] = {}
    for numbers in every:
        held = held_bytes(drawn, with_numbers(drawn.joint, dict(zip(symbols, numbers, strict=True))))
        most = {storage: max(nbytes, most.get(storage, 0)) for storage, nbytes in held.items()}
    assert len(most) > 50
    for storage, nbytes in most.items():
        assert drawn.graph.storages[storage].nbytes == nbytes


def test_few_choices_of_numbers_cover_all_storages(drawn: Captured) -> None:
    assert len(largest_numbers(drawn.joint.graph)) <= 6  # of six patches, each largest in one of them


def test_costs_are_those_of_the_middle_and_workspaces_those_of_the_largest(drawn: Captured) -> None:
    middle = with_numbers(drawn.joint, usual_numbers(drawn.joint.graph))
    convolution = next(node for node in middle.nodes if "convolution" in str(node.target))
    op = next(op for op in drawn.graph.ops if op.name == convolution.name)
    shape = ",".join(map(str, convolution.args[0].meta["val"].shape))
    assert f"f32[{shape}]" in op.signature
    assert drawn.largest_nodes[op.name].args[0].meta["val"].numel() > convolution.args[0].meta["val"].numel()
    graph = drawn.with_costs({op.signature: 3.0}, dict.fromkeys(drawn.distinct_nodes(), 7))
    assert (graph.ops[op.id].seconds, graph.ops[op.id].workspace_bytes) == (3.0, 7)


def test_a_graph_with_numbers_has_no_symbol_left(drawn: Captured) -> None:
    graph = with_numbers(drawn.joint, usual_numbers(drawn.joint.graph))
    for node in graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                assert all(type(size) is int for size in (*tensor.shape, *tensor.stride()))
    assert {node.name for node in graph.nodes} <= {node.name for node in drawn.joint.graph.nodes}


def test_a_plain_size_is_what_it_is() -> None:
    assert usual(7) == 7
