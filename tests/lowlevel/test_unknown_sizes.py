"""AOTAutograd traces what a mask selects in any graph of Dynamo's; one of several breaks where that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.aot_autograd import make_boxed_func

from shoal.lowlevel.unknown_sizes import unknown_sizes


class Refused(Exception):
    pass


class Counting:
    """A backend that traces the gradients of Dynamo's graphs and runs what it traced, or refuses to."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.traced, self.refused = refuses, 0, 0

    def __call__(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        masks = any("index_put" in str(node.target) or "setitem" in str(node.target) for node in gm.graph.nodes)
        with unknown_sizes(Refused):
            if self.refuses and masks:
                self.refused += 1
                raise Refused
            compiled: Callable[..., Any] = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))(
                gm, inputs
            )
        self.traced += 1
        return compiled


def masked(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    x = 2 * x
    x[mask] = value
    return x.cos()


def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x, value = torch.randn(6, 4, generator=generator), torch.randn(4, generator=generator, requires_grad=True)
    call(x, torch.arange(6) % 3 == 1, value).sum().backward()
    assert value.grad is not None
    return value.grad


def test_a_write_through_a_mask_is_part_of_its_graph() -> None:
    torch._dynamo.reset()
    backend = Counting()
    assert torch.equal(gradient(torch.compile(masked, backend=backend)), gradient(masked))
    assert backend.traced == 2  # one before the break and one after it


def test_what_is_refused_breaks_one_of_several_graphs_and_is_raised_in_a_single_one() -> None:
    torch._dynamo.reset()
    backend = Counting(refuses=True)
    assert torch.equal(gradient(torch.compile(masked, backend=backend)), gradient(masked))
    assert backend.refused >= 1 and backend.traced >= 1

    def in_one_graph(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x.index_put((mask,), value)

    with pytest.raises(BackendCompilerFailed, match="Refused"):
        gradient(torch.compile(in_one_graph, backend=backend, fullgraph=True))
