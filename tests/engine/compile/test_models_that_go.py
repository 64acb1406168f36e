"""What a model was compiled to goes with the model: steps, plans and graphs, without torch._dynamo.reset()."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import shoal
from shoal.core.plan import Plan
from shoal.engine.backend import PlannedStep
from shoal.engine.session import Session

KINDS = (Session, PlannedStep, Plan, fx.GraphModule, fx.Node)


class Broken(nn.Module):
    """Two graphs, which Dynamo keeps with the code of this class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


def one_graph() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def train(network: Callable[[], nn.Module]) -> weakref.ref[nn.Module]:
    model = shoal.compile(network(), budget="1MiB")
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    return weakref.ref(model)


def alive() -> Counter[type]:
    for _ in range(3):  # what a finalizer frees is found by the next one
        gc.collect()
    return Counter(kind for one in gc.get_objects() for kind in KINDS if type(one) is kind)


@pytest.mark.parametrize("network", [one_graph, Broken])
def test_a_model_that_is_deleted_leaves_nothing(network: Callable[[], nn.Module]) -> None:
    train(network)
    before, model = alive(), train(network)
    after = alive()
    assert model() is None
    assert after - before == Counter()


def test_a_model_of_the_same_class_trains_on_as_planned() -> None:
    kept = shoal.compile(Broken(), budget="1MiB")
    for _ in range(3):
        kept(torch.randn(2, 4)).sum().backward()
    plans, first_bytes = kept.shoal.plans, kept.shoal.measured_peak_bytes
    deleted = train(Broken)
    alive()
    assert deleted() is None
    kept(torch.randn(2, 4)).sum().backward()
    assert kept.shoal.plans == plans
    assert kept.shoal.measured_peak_bytes == first_bytes
