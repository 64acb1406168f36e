"""A step whose graph is captured again, unchanged, is neither compiled nor planned again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shoal

Update = Callable[["Grows"], float]


class Grows(nn.Module):
    """A layer whose own Python state is another one in every call."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.layer, self.update = nn.Linear(4, 4), update
        self.seen: list[int] = []
        self.by_call: dict[int, str] = {}
        self.path = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.update(self)


def appends(model: Grows) -> float:
    model.seen.append(1)
    return 1.0


def adds_a_key(model: Grows) -> float:
    model.by_call[len(model.by_call)] = "called"
    return 1.0


def changes_a_text(model: Grows) -> float:
    model.path += "/"
    return 1.0


def breaks_and_appends(model: Grows) -> float:
    torch._dynamo.graph_break()
    model.seen.append(1)
    return 1.0


def counts_with_it(model: Grows) -> float:
    model.seen.append(1)
    return float(len(model.seen))


def captures(model: Grows, steps: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[int]:
    """Train as plain PyTorch does, and count after each step."""
    plain, counts = copy.deepcopy(model), []
    shoal.compile(model, budget="1MiB")
    for step in range(steps):
        x, dtype = torch.randn(2, 4), dtypes[step % len(dtypes)]
        results = []
        for one in (plain, model):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
                results.append(one(x))
            results[-1].float().square().sum().backward()
        assert torch.equal(*results)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
        counts.append(model.shoal.captures)
    assert (model.seen, model.by_call, model.path) == (plain.seen, plain.by_call, plain.path)
    return counts


@pytest.mark.parametrize("update", [appends, adds_a_key, changes_a_text])
def test_state_that_the_graph_does_not_read_plans_once(update: Update) -> None:
    assert captures(Grows(update), 4) == [1, 1, 1, 1]


def test_the_graphs_of_a_model_that_breaks_are_planned_once() -> None:
    counts = captures(Grows(breaks_and_appends), 6)
    assert counts[-1] == counts[1]


def test_as_many_calls_as_there_may_be_captures_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.capture.dynamo.MOST_CAPTURES", 3)
    assert captures(Grows(appends), 8) == [1] * 8


def test_a_number_of_the_graph_or_a_setting_of_pytorch_is_another_step() -> None:
    assert captures(Grows(counts_with_it), 3) == [1, 2, 3]
    dtypes = torch.float32, torch.bfloat16
    assert captures(Grows(appends), 4, dtypes) == [1, 2, 2, 2]
