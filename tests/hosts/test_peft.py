"""LoRA inside a budget: a small vision transformer with most of its parameters frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hosts import page
from tests.hosts.laws import CLASSES, holds_to, loader

pytest.importorskip("peft", reason="peft is not installed: make test-hosts")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-hosts")


def vit() -> nn.Module:
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=4,
            num_labels=CLASSES,
        )
    )


def test_it_trains_inside_the_budget_as_plain_pytorch_does() -> None:
    batches = loader()

    def train(budget: int | None) -> nn.Module:
        names = {"model": vit(), "batches": batches, "torch": torch, "nn": nn}
        model = page.run(page.block("peft.md"), budget, **names)["model"]
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert frozen and all(p.grad is None for p in frozen)
        return model

    holds_to(0.7, train)
