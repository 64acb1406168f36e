"""Results that PyTorch leaves in the memory of what they were computed from: in a planned step they hold no more."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.kernels.own_storage import OWN
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes

LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "soft_margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
}


class WithLosses(nn.Module):
    """Returns a loss of the results of two layers each, all of them summed at the end."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for layer in self.layers:
            y = layer(x).tanh()
            losses.append(self.loss(y, x.detach()))
            x = y
        return torch.stack(losses).sum()


class Folding(nn.Module):
    """The gradient of unfolded windows is folded: nine times what it leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = F.unfold(self.first(x).tanh(), 3, padding=1)
        return self.last(windows.transpose(1, 2)).square().mean()


@pytest.mark.filterwarnings("error:cannot time")
@pytest.mark.parametrize("name", [*LOSSES, "fold"])
def test_a_step_takes_the_bytes_that_were_predicted_and_has_plain_pytorchs_bits(name: str) -> None:
    torch.manual_seed(0)
    plain = Folding() if name == "fold" else WithLosses(LOSSES[name])
    x = torch.randn(4, 3, 24, 24) if name == "fold" else torch.randn(512, 32)
    planned = shoal.compile(copy.deepcopy(plain), budget="1GiB", allow="bitwise")
    for step in range(3):
        held_bytes = distinct_bytes([*planned.parameters(), x])
        plain(x).backward()
        _, changes = allocations.record(lambda: planned(x).backward())
        for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
        if step:
            assert 0 <= planned.shoal.predicted_peak_bytes - held_bytes - allocations.peak_bytes(changes) <= 1024
        for model in (plain, planned):
            model.zero_grad()
    assert not planned.shoal.repairs


@pytest.mark.parametrize("op", OWN, ids=str)
def test_each_op_computes_what_it_stands_for(op: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(2, 9, 16), torch.rand(2, 9, 16)
    arguments = (x, [4, 4], [3, 3], [1, 1], [1, 1], [1, 1]) if "col2im" in str(op) else (x, y)
    result = OWN[op](*arguments)
    assert torch.equal(result, op(*arguments)) and result.untyped_storage().nbytes() == result.nbytes


@pytest.mark.parametrize("shape", [(2, 18, 16), (18, 16)])
def test_what_is_folded_is_computed_in_a_tensor_of_its_size(shape: tuple[int, ...]) -> None:
    arguments = (torch.rand(shape), [4, 4], [3, 3], [1, 1], [1, 1], [1, 1])
    op = torch.ops.aten.col2im.default
    result, changes = allocations.record(lambda: OWN[op](*arguments))
    assert torch.equal(result, op(*arguments))
    assert allocations.peak_bytes(changes) == result.nbytes == arguments[0].nbytes // 9
