"""Sparse and nested tensors: counted, trained around, or refused in a line that says what to type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.snapshot import Snapshot
from shoal.errors import CaptureError
from shoal.lowlevel.torch_state import dense_parts
from shoal.memory.storage_bytes import distinct_bytes
from tests.raising import raising

ADJACENCY = (torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) < 0.2).float()
LAYOUTS = {layout: ADJACENCY.to_sparse(layout=layout) for layout in (torch.sparse_coo, torch.sparse_csr)}


class Graph(nn.Module):
    """A graph convolution, whose adjacency is a sparse buffer, between linear layers."""

    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.first = nn.Linear(8, 8)
        self.last = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.neighbours(self.first(x).relu()))

    def neighbours(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.adjacency, x)


class ReadOutside(Graph):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def neighbours(self, x: torch.Tensor) -> torch.Tensor:
        return super().neighbours(x)


class Given(Graph):
    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.last(torch.sparse.mm(adjacency, self.first(x)))


class InOneFunction(Graph):
    """Of which nothing is left for a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.adjacency, self.first(x).relu())


class GivenToOneFunction(Graph):
    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.sparse.mm(adjacency, self.first(x).relu())


def arguments_of(kind: type[Graph], adjacency: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = torch.randn(32, 8)
    return (x, adjacency.clone()) if kind in (Given, GivenToOneFunction) else (x,)


@pytest.mark.parametrize(
    ("kind", "layout"), [(Graph, torch.sparse_coo), (ReadOutside, torch.sparse_csr), (Given, torch.sparse_coo)]
)
def test_a_model_with_graphs_around_sparse_products_trains_as_plain_pytorch(
    kind: type[Graph], layout: torch.layout
) -> None:
    torch.manual_seed(0)
    plain, ours = kind(LAYOUTS[layout]), kind(LAYOUTS[layout])
    ours.load_state_dict(plain.state_dict())
    compiled = shoal.compile(ours, budget="1MiB", optimizer="sgd", allow="exact")
    for _ in range(3):
        arguments = arguments_of(kind, LAYOUTS[layout])
        for model, run in ((plain, plain), (ours, compiled)):
            model.zero_grad()
            run(*arguments).square().mean().backward()
        trained = zip(plain.parameters(), ours.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in trained)  # type: ignore[arg-type]
    status: Any = compiled.shoal
    assert status.measured_peak_bytes is not None
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert status.measured_peak_bytes > distinct_bytes([*plain.parameters(), *plain.parameters(), *plain.buffers()])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_of_a_sparse_tensor_are_those_of_its_indices_and_values(layout: torch.layout) -> None:
    sparse = LAYOUTS[layout]
    parts = dense_parts(sparse)
    assert all(part.layout is torch.strided for part in parts)
    assert distinct_bytes([sparse, sparse]) == sum(part.untyped_storage().nbytes() for part in parts) > 0


def test_bytes_of_a_nested_tensor_are_those_of_its_values_at_least() -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    assert distinct_bytes([nested]) >= nested.values().nbytes


@pytest.mark.parametrize("kind", [InOneFunction, GivenToOneFunction])
def test_where_all_of_a_model_reads_sparse_tensors_one_line_says_what_to_type(kind: type[Graph]) -> None:
    adjacency = LAYOUTS[torch.sparse_coo]
    compiled = shoal.compile(kind(adjacency), budget="1MiB", optimizer="sgd")
    with raising(CaptureError, "@torch.compiler.disable") as caught:
        compiled(*arguments_of(kind, adjacency))
    assert len(str(caught.value).splitlines()[0]) <= 160


def test_a_nested_input_is_refused_in_a_line_that_says_what_to_type() -> None:
    compiled = shoal.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), budget="1MiB")
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    with raising(CaptureError, "to_padded_tensor") as caught:
        compiled(nested)
    assert len(str(caught.value).splitlines()[0]) <= 160
    with torch.no_grad():
        assert compiled.eval()(nested).values().shape == (8, 2)


def test_a_forward_pass_that_is_begun_again_finds_a_sparse_buffer_as_it_was() -> None:
    model = Graph(ADJACENCY.to_sparse())
    before = Snapshot(model)
    model.adjacency._values().mul_(2)  # type: ignore[operator]
    before.restore()
    assert torch.equal(model.adjacency.to_dense(), ADJACENCY)  # type: ignore[operator]
