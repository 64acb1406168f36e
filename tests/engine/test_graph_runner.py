"""What runs a graph takes its arguments in a list, empties it, and frees each as soon as the graph is done with it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx

from shoal.engine.graph_runner import run_kernels


def doubled_twice(watch: Any = torch.Tensor.clone) -> fx.GraphModule:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    doubled = graph.call_function(torch.add, (x, x))
    seen = graph.call_function(watch, (doubled,))
    graph.output((graph.call_function(torch.mul, (seen, y)), seen))
    return fx.GraphModule({}, graph)


def test_the_arguments_are_taken_out_of_the_list() -> None:
    run = run_kernels(doubled_twice(), ())
    x, y = torch.randn(3), torch.randn(3)
    arguments = [x, y]
    product, doubled = run(arguments)
    assert arguments == []
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(product, 2 * x * y)
    assert run._boxed_call


def test_an_argument_is_freed_after_its_last_reader() -> None:
    alive: list[bool] = []

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        alive.extend(reference() is not None for reference in references)
        return tensor

    run = run_kernels(doubled_twice(watch), ())
    arguments = [torch.randn(3), torch.randn(3)]
    references = [weakref.ref(argument) for argument in arguments]
    run(arguments)
    assert alive == [False, True]
