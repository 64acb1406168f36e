"""timm's train.py inside a budget: the backend by name, with the budget from the environment."""

from __future__ import annotations

import gc
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.hosts import page
from tests.hosts.image_folder import write_images
from tests.hosts.laws import batch_bytes, holds_to, images

timm = pytest.importorskip("timm", reason="timm is not installed: make test-hosts")
SCRIPT = Path(__file__).parent / "vendor" / "timm_train.py"


def test_it_trains_inside_the_budget_as_plain_pytorch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "images", ("train", "validation"))
    monkeypatch.chdir(tmp_path)
    environment, _, *arguments = shlex.split(page.block("timm.md", language="sh"))
    name, budget_text = environment.split("=")
    assert (name, budget_text) == ("SHOAL_BUDGET", "2GiB") and arguments[-2:] == ["--torchcompile", "shoal"]

    def train(budget: int | None) -> nn.Module:
        out = tmp_path / f"out-{budget}"
        chosen = [str(out) if argument == "out" else argument for argument in arguments]
        monkeypatch.setattr(sys, "argv", chosen if budget else chosen[:-2])
        if budget:
            monkeypatch.setenv(name, str(budget))
        runpy.run_path(str(SCRIPT), run_name="__main__")
        gc.collect()
        trained = timm.create_model("test_resnet", num_classes=4)
        trained.load_state_dict(torch.load(next(out.glob("*/last.pth.tar")), weights_only=False)["state_dict"])
        return trained

    assert "SHOAL_BUDGET" not in os.environ
    momentum_bytes = sum(p.nbytes for p in timm.create_model("test_resnet", num_classes=4).parameters())
    holds_to(0.8, train, beside_bytes=momentum_bytes + batch_bytes(images(side=64)))  # as the page says
