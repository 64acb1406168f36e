"""Gradients that autograd writes into zeros as a whole are views: eager PyTorch's bits, and no tensor of zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import shoal
from shoal.graph.joint import Joint
from shoal.rewrites.copies import view_what_is_written, whole_scatters


class Strided(nn.Module):
    """Rows of features read by an `as_strided` of its own, between two layers that need the gradient."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.read = nn.Linear(6, 8), read
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.read(self.first(x).sin()).reshape(-1, 4))  # type: ignore[no-any-return]


def pooled() -> nn.Module:
    """Pooled to a pixel, of a channels_last map, which PyTorch's own formula ends in an `as_strided`."""
    body = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*body).to(memory_format=torch.channels_last)


def ops_of_a_step(model: nn.Module, x: torch.Tensor) -> list[str]:
    """The ops of a planned step whose output and gradients have eager PyTorch's bits."""
    plain = copy.deepcopy(model)
    planned = shoal.compile(model, budget="1GiB", allow="bitwise", options=shoal.Options(kernels="eager"))
    for _ in range(2):
        outputs = []
        for one in (plain, planned):
            one.zero_grad()
            outputs.append(one(x))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
        for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    return [op.target for op in planned.shoal.plan.graph.ops]


def test_the_gradient_of_pooling_to_a_pixel_is_a_view() -> None:
    torch.manual_seed(0)
    ops = ops_of_a_step(pooled(), torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last))
    assert "aten.mean.dim" in ops  # PyTorch's own formula
    assert not {"aten.as_strided_scatter.default", "aten.new_zeros.default"} & set(ops)


@pytest.mark.parametrize(("dtype", "n_scatters"), [(torch.float64, 0), (torch.float32, 1)])
def test_what_is_written_in_another_dtype_is_not_what_lies_there(dtype: torch.dtype, n_scatters: int) -> None:
    def read_back(x: torch.Tensor) -> torch.Tensor:
        zeros = torch.ops.aten.new_zeros.default(x, [6])
        whole = torch.ops.aten.as_strided_scatter.default(zeros, x.to(dtype).sin(), [2, 3], [3, 1], 0)
        return torch.ops.aten.as_strided.default(whole, [3, 2], [2, 1], 0) * 2

    x = torch.randn(2, 3, dtype=torch.float64)
    module = make_fx(read_back, tracing_mode="fake")(x)
    joint = Joint(module, set())
    for site in whole_scatters(joint):
        view_what_is_written(joint, site)
    module.recompile()
    scatters = module.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default)
    assert len(scatters) == n_scatters
    assert torch.equal(module(x), read_back(x)) and module(x).dtype == torch.float64


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.as_strided((4, 8), (8, 1)),
        lambda y: y.as_strided((4, 2, 4), (8, 4, 1)),
        lambda y: y.as_strided((8, 4), (1, 8)),
        lambda y: y.as_strided((4, 4), (8, 1)),
        lambda y: y.as_strided((3, 8), (8, 1), 8),
        lambda y: y.as_strided((5, 8), (4, 1)),
        lambda y: y.transpose(0, 1).as_strided((4, 8), (8, 1)),
        lambda y: (y[1:] * 2).as_strided((2, 8), (8, 1)) + y.as_strided((2, 8), (16, 1)),
    ],
    ids=["all", "all, cut", "turned", "half of each row", "from the second row", "overlapping", "of a view", "summed"],
)
def test_any_as_strided_has_eager_pytorchs_gradient(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    ops_of_a_step(Strided(read), torch.randn(4, 6))
