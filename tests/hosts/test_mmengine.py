"""mmengine's Runner inside a budget, by a model that is compiled before it and by a hook; its `compile=` is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import CaptureError
from tests.hosts import page
from tests.hosts.laws import holds_to, loader, network

pytest.importorskip("mmengine", reason="mmengine is not installed: make test-hosts")

from mmengine.model import BaseModel

from tests.raising import raising

BEFORE, HOOK = page.block("mmengine.md", 0), page.block("mmengine.md", 1)


class Classifier(BaseModel):
    """As models of mmengine are: losses come from their forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, mode: str = "loss") -> Any:
        return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}


def train_by(code: str, budget: int | None, batches: Any, folder: Path) -> nn.Module:
    model = Classifier()
    page.run(code, budget, model=model, batches=batches, folder=str(folder))
    return model


def test_a_model_compiled_before_trains_inside_the_budget_as_plain_pytorch_does(tmp_path: Path) -> None:
    batches = loader()
    holds_to(0.7, lambda budget: train_by(BEFORE, budget, batches, tmp_path))


def test_a_hook_trains_inside_the_budget_as_plain_pytorch_does(tmp_path: Path) -> None:
    batches = loader()

    def train(budget: int | None) -> nn.Module:
        return train_by(BEFORE if budget is None else HOOK, budget, batches, tmp_path)

    holds_to(0.7, train)


def test_its_own_compile_is_refused_with_the_line_that_breaks(tmp_path: Path) -> None:
    asked = """default_scope=None, cfg={"compile": {"backend": "shoal", "options": {"budget": "2GiB"}}},"""
    code = BEFORE.replace("default_scope=None,", asked).replace("model = shoal", "# shoal")
    with raising(CaptureError, "optimizer_wrapper.py", "loss.backward"):
        train_by(code, 2**31, loader(), tmp_path)
