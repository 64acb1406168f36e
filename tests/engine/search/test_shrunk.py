"""Where the budget is tight a step is shrunk in the backward pass: it fits in less, with eager PyTorch's bits."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.plan import Plan
from shoal.core.variant import WHOLE, Variant
from shoal.errors import BudgetError


class UNet(nn.Module):
    """Of one level: the gradient of its skip waits for all of what is below, as that of its ReLUs' results do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.below = nn.Sequential(
            *[layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())],
        )
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        result: torch.Tensor = self.head(torch.cat([x, self.below(x)], 1))
        return result


IMAGES = (2, 3, 192, 192)


def planned(budget_bytes: int | None) -> Plan:
    model, images = UNet().to("meta"), torch.empty(IMAGES, device="meta")
    return shoal.plan(model, images, budget_bytes, hardware="p100-nvlink", allow=budget_bytes and "recompute")


def test_with_room_nothing_is_shrunk_and_where_it_is_tight_what_fits_in_less_or_is_faster() -> None:
    roomy = planned(planned(None).predicted_peak_bytes)
    assert roomy.variant == WHOLE and {row.variant for row in roomy.candidates} <= {WHOLE}
    with pytest.raises(BudgetError) as refused:
        planned(1 << 20)
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None
    tight = planned(least_bytes)
    assert tight.variant == Variant(shrunk=True)
    assert "unmodified, compact saved tensors" in tight.explain()
    needs = {row.variant: row.outcome for row in tight.candidates}
    assert needs[WHOLE].startswith("needs ") or "does not fit" in needs[WHOLE]


def test_a_shrunk_step_trains_with_the_bits_of_eager_pytorch_and_is_taken_from_a_saved_plan(tmp_path: Path) -> None:
    images = torch.randn(IMAGES, generator=torch.Generator().manual_seed(1))
    eager = UNet()
    with pytest.raises(BudgetError) as refused:
        shoal.plan(UNet(), images, 1 << 20, allow="recompute")
    budget = refused.value.least_feasible_bytes
    assert budget is not None
    model = shoal.compile(copy.deepcopy(eager), budget=budget, allow="recompute")
    for network in (eager, model):
        for _ in range(2):
            network.zero_grad()
            network(images).square().mean().backward()
    assert model.shoal.plan.variant == Variant(shrunk=True)
    assert model.shoal.repairs == 0
    assert model.shoal.measured_peak_bytes <= budget
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    saved = model.shoal.plan.save(tmp_path / "plan.json")
    assert json.loads(saved.read_text())["variant"]["shrunk"] is True
    again = shoal.compile(copy.deepcopy(eager), options=shoal.Options(plan=Plan.load(saved)))
    again(images).square().mean().backward()
    assert (again.shoal.plan.variant, again.shoal.plan.residences) == (
        model.shoal.plan.variant,
        model.shoal.plan.residences,
    )
