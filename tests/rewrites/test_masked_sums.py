"""Writing a learned value through a boolean mask or an index breaks no graph, as a masked autoencoder's tokens need."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.kernels.generator import state_bytes
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes
from tests.engine.training_laws import same_bits


class WithToken(nn.Module):
    def __init__(self, *token: int, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.token = nn.Parameter(torch.randn(token))
        self.before = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.behind = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.breaks:
            torch._dynamo.graph_break()
            x = x.tanh() + x
        x[mask] = self.token
        return self.behind(x).square().mean()


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("token", [(16,), (1,), ()])
def test_it_trains_with_plain_pytorchs_bits_in_the_bytes_that_were_predicted(
    token: tuple[int, ...], breaks: bool
) -> None:
    torch.manual_seed(0)
    plain = WithToken(*token, breaks=breaks)
    planned = WithToken(*token, breaks=breaks)
    planned.load_state_dict(plain.state_dict())
    budget_bytes = 170_000 + breaks * state_bytes(torch.device("cpu"))  # which goes with a call of several graphs
    shoal.compile(planned, budget=budget_bytes, allow="bitwise")
    for step, share in enumerate((0.5, 0.0, 1.0, 0.1)):
        x, mask = torch.randn(8, 24, 16), torch.rand(8, 24) < share
        held_bytes = distinct_bytes([*planned.parameters(), x, mask])
        plain(x, mask).backward()
        _, changes = allocations.record(lambda x=x, mask=mask: planned(x, mask).backward())
        for expected, got in zip(plain.parameters(), planned.parameters(), strict=True):
            assert expected.grad is not None and got.grad is not None
            assert same_bits(got.grad, expected.grad)
        if step:
            assert held_bytes + allocations.peak_bytes(changes) <= planned.shoal.predicted_peak_bytes <= budget_bytes
        for model in (plain, planned):
            model.zero_grad()
    assert len(planned.shoal.plan.breaks) == breaks and planned.shoal.captures == 1 + breaks
    assert planned.shoal.plan.added_seconds > 0
    assert 0 <= planned.shoal.predicted_peak_bytes - planned.shoal.measured_peak_bytes <= 512


class Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(16, 16), nn.Linear(16, 16)
        self.token = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.before(x).tanh().index_fill(1, places, self.token)
        return self.behind(x).square().mean()


def test_a_learned_value_at_an_index_trains_with_plain_pytorchs_bits() -> None:
    torch.manual_seed(0)
    plain, planned = Filling(), Filling()
    planned.load_state_dict(plain.state_dict())
    shoal.compile(planned, budget=200_000, allow="bitwise")
    for places in ([1, 3, 3], [0, 0, 0], [5, 2, 7]):
        x = torch.randn(8, 24, 16)
        for model in (plain, planned):
            model.zero_grad()
            model(x, torch.tensor(places)).backward()
        for expected, got in zip(plain.parameters(), planned.parameters(), strict=True):
            assert expected.grad is not None and got.grad is not None
            assert same_bits(got.grad, expected.grad)
    assert planned.shoal.plan.breaks == () and planned.shoal.captures == 1
    assert planned.shoal.measured_peak_bytes <= planned.shoal.predicted_peak_bytes
