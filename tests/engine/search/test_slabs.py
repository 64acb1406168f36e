"""Large layers on slabs under a budget: taken where it is tight, the same function, gradients and statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.variant import Variant
from shoal.engine.search import split_variants, variants
from shoal.errors import BudgetError
from tests.float32_rule import too_far

ALLOW = "recompute, exact_split"


class Network(nn.Module):
    """One level of a V-Net on one volume of two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Conv3d(*io, 3, padding=1) for io in ((2, 8), (8, 8), (8, 2)))
        self.norms = nn.ModuleList([nn.BatchNorm3d(8), nn.InstanceNorm3d(8, affine=True)])
        self.down, self.up = nn.Conv3d(8, 8, 2, 2), nn.ConvTranspose3d(8, 8, 2, 2)
        self.drop, self.slope = nn.Dropout3d(0.5), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.elu(self.norms[0](self.first(x)), inplace=True)
        y = self.drop(x) + self.slope(self.up(self.down(x).relu()))
        return self.head(nn.functional.leaky_relu(self.norms[1](self.second(y)), 0.1) + y).mean((2, 3, 4))


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Network().to(dtype), torch.randn(1, 2, 32, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def trained(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs, gradients and running statistics of a step."""
    torch.manual_seed(2)  # of the dropout
    y = model(x)
    y.square().sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"result": y.detach(), **gradients, **{f"buffer {name}": one for name, one in model.named_buffers()}}


@pytest.fixture(autouse=True)
def _small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_variants, "_WORTH_SLABS_BYTES", 1 << 10)
    monkeypatch.setattr(split_variants, "_SLABS", ((4, False), (4, True)))
    monkeypatch.setattr(split_variants, "_PARTS", ())  # patches take long to plan


def needed_bytes(allow: str) -> int:
    with pytest.raises(BudgetError) as refused:
        shoal.plan(*made(), 1, allow=allow)
    assert refused.value.least_feasible_bytes is not None
    return refused.value.least_feasible_bytes


@pytest.mark.slow
def test_a_step_trains_in_a_budget_that_recomputing_does_not_meet() -> None:
    tight_bytes = needed_bytes(ALLOW) + 4096
    assert tight_bytes < 0.9 * needed_bytes("recompute")
    model, x = made()
    model = shoal.compile(model, tight_bytes, allow=ALLOW)
    mine, theirs, exact = trained(model, x), trained(*made()), trained(*made(torch.float64))
    status: Any = model.shoal
    assert status.plan.variant.slabs and "slabs" in status.plan.explain()
    assert status.measured_peak_bytes <= tight_bytes and status.repairs == 0
    written, plan = shoal.plan(*made()), status.plan  # what it adds is held against the step without slabs
    assert plan.plain_peak_bytes == pytest.approx(written.plain_peak_bytes, rel=0.02)
    assert plan.plain_seconds == next(row.plain_seconds for row in plan.candidates if row.variant == Variant())
    assert not too_far(mine, theirs, exact)


def test_large_volumes_alone_have_such_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates: list[list[Variant]] = []

    def read(gm: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        candidates.append([one for one in variants.Variants(gm, frozenset({"exact_split"})).split() if one.slabs])
        return gm

    torch.compile(made()[0], backend=read)(made()[1])
    monkeypatch.setattr(split_variants, "_WORTH_SLABS_BYTES", 4 << 20)
    torch._dynamo.reset()
    torch.compile(made()[0], backend=read)(made()[1])
    assert candidates == [[Variant(slabs=4), Variant(slabs=4, twice=True)], []]
    assert [str(one) for one in candidates[0]] == ["large layers on 4 slabs", "large layers on 4 slabs, measured first"]
    assert {means for one in candidates[0] for means in one.means} == {"exact_split"}


class UnderAutocast(Network):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
        return y.float()


@pytest.mark.slow
def test_a_network_that_enters_autocast_needs_what_it_needs_when_called_under_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_variants, "_SLABS", ((4, True),))
    model, x = made()

    def needed_bytes(network: nn.Module, allow: str, budget_bytes: int = 1) -> int:
        with pytest.raises(BudgetError) as refused:
            shoal.plan(network, x, budget_bytes, allow=allow)
        persistent_bytes = refused.value.persistent_bytes  # a smaller budget is not searched
        assert persistent_bytes is not None
        if budget_bytes < persistent_bytes:
            return needed_bytes(network, allow, persistent_bytes)
        return refused.value.least_feasible_bytes or 0

    entering, whole = needed_bytes(UnderAutocast(), ALLOW), needed_bytes(UnderAutocast(), "recompute")
    with torch.autocast("cpu", torch.bfloat16):
        called = needed_bytes(model, ALLOW)
    assert entering - called in range(1024) and called < 0.9 * whole  # its result leaves in float32
