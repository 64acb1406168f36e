"""The Transformers Trainer inside a budget, with its own optimizer and with one that is declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hosts import page
from tests.hosts.laws import BATCH, CLASSES, EPOCHS, batch_bytes, holds_to, images

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-hosts")


def resnet() -> nn.Module:
    """A small convolutional network of theirs, which computes its loss in its forward pass."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config)


def arguments(folder: Path) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
    )


@pytest.mark.parametrize("block", [0, 1], ids=["its own optimizer", "declared optimizer"])
def test_it_trains_inside_the_budget_as_plain_pytorch_does(block: int, tmp_path: Path) -> None:
    pixels, labels = images(side=64)
    data = [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]

    def train(budget: int | None) -> nn.Module:
        model = resnet()
        names = {"model": model, "arguments": arguments(tmp_path), "data": data, "torch": torch}
        page.run(page.block("transformers.md", block), budget, **names)
        return model

    holds_to(0.8, train, batch_bytes((pixels, labels)))
