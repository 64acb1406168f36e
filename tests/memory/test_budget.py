"""Budgets as sizes, as shares of a device, and as what it has left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import InputError
from shoal.memory import budget
from tests.raising import raising

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1_000_000, total=4_000_000))
    monkeypatch.setattr(budget, "psutil", memory)
    monkeypatch.delenv("SHOAL_BUDGET", raising=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (7, 7), ("1KiB", 1024), ("auto", 950_000), ("80%", 3_200_000), ("12.5 %", 500_000)],
)
def test_what_a_budget_stands_for(given: Any, expected: int | None) -> None:
    assert budget.budget_bytes(given, CPU) == expected


def test_of_a_device_that_is_not_here_all_is_left() -> None:
    assert budget.budget_bytes("auto", 2_000_000) == 1_900_000


def test_the_environment_counts_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_BUDGET", "2MiB")
    assert budget.budget_bytes(None, CPU) == 2**21
    assert budget.budget_bytes("1KiB", CPU) == 1024
    assert budget.budget_bytes(None, CPU, of_environment=False) is None
    model = shoal.compile(nn.Linear(2, 2))
    assert model.shoal.budget_bytes == 2**21  # type: ignore[union-attr]


@pytest.mark.parametrize("given", ["0%", "101%", "-5%", "all", "%"])
def test_a_mistake_is_told(given: str) -> None:
    with raising(InputError, "budget="):
        budget.budget_bytes(given, CPU)
