"""A call in eval mode that is sent back is outside of the budget, and that is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shoal

X = torch.randn(4, 8)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "eval mode" in record.message]


def compiled(budget: str | None = "1GiB") -> Any:
    return shoal.compile(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), budget)


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="shoal")


def test_it_is_said_once_where_it_is_sent_back_with_the_gradients_of_plain_pytorch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = compiled().eval()
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        for one in (model, plain):
            one(X).square().mean().backward()
    assert len(said(caplog)) == 1
    assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in plain.parameters())))


def test_no_other_call_in_eval_mode_says_anything(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled()
    model.eval()
    model(X)
    with torch.no_grad():
        model(X)
    model.train()[1].eval()
    model(X).mean().backward()
    without_budget = compiled(None).eval()
    without_budget(X).mean().backward()
    assert said(caplog) == []


def test_a_call_that_is_traced_or_transformed_is_let_alone() -> None:
    model = compiled().eval()
    assert torch.jit.trace(model, X)(X).shape == (4, 2)
    ours = torch.func.grad(lambda x: model(x).sum())(X)
    assert ours.shape == X.shape
    torch.compile(model, backend="eager")(X).sum().backward()
