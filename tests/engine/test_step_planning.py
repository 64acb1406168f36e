"""What a plan leaves of the budget to those who run it, and what it does where it can leave nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shoal
from shoal.core.plan import Plan
from shoal.errors import BudgetError
from tests.engine.training_laws import blocks

X = torch.zeros(8, 3, 32, 32)


def planned(net: torch.nn.Module, budget: int) -> Plan:
    """The plan of a training step, in a loop that is known."""
    model: Any = shoal.compile(copy.deepcopy(net), budget=budget, allow="recompute")
    for _ in range(3):  # the first shows what the loop holds
        model(X).sum().backward()
        model.zero_grad()
    plan: Plan = model.shoal.plan
    return plan


@pytest.mark.slow
def test_a_plan_leaves_what_is_spare_where_there_is_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(*blocks(3, 16, 16, 16, 16))
    with pytest.raises(BudgetError) as refused:
        planned(net, 300_000)
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None
    spare_bytes = least_bytes // 10
    monkeypatch.setattr("shoal.engine.session.spare_bytes", lambda *_: spare_bytes)
    for budget_bytes in (least_bytes + spare_bytes // 2, least_bytes + 2 * spare_bytes, 2 * least_bytes):
        plan = planned(net, budget_bytes)
        assert plan.budget_bytes == budget_bytes
        left_bytes = budget_bytes - plan.predicted_peak_bytes
        assert left_bytes >= (0 if budget_bytes < least_bytes + spare_bytes else spare_bytes)
