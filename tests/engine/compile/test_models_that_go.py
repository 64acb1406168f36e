"""What a model was compiled to goes with the model: steps, plans and graphs, without torch._dynamo.reset()."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import torch
from torch import fx, nn

import shoal
from shoal.core.plan import Plan
from shoal.engine.backend import PlannedStep
from shoal.engine.session import Session

KINDS = (Session, PlannedStep, Plan, fx.GraphModule, fx.Node)


def train() -> weakref.ref[nn.Module]:
    model = shoal.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), budget="1MiB")
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    return weakref.ref(model)


def alive() -> Counter[type]:
    for _ in range(3):  # what a finalizer frees is found by the next one
        gc.collect()
    return Counter(kind for one in gc.get_objects() for kind in KINDS if type(one) is kind)


def test_a_model_that_is_deleted_leaves_nothing() -> None:
    train()
    before, model = alive(), train()
    after = alive()
    assert model() is None
    assert after - before == Counter()
