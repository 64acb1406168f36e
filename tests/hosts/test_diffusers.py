"""diffusers' training example inside a budget: a UNet2DModel, one loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hosts import page
from tests.hosts.laws import batch_bytes, holds_to, loader

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: make test-hosts")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-hosts")


def unet() -> nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def test_it_trains_inside_the_budget_as_plain_pytorch_does() -> None:
    batches = loader()

    def train(budget: int | None) -> nn.Module:
        model = unet()
        torch.manual_seed(1)
        page.run(
            page.block("diffusers.md"),
            budget,
            model=model,
            batches=batches,
            accelerator=accelerate.Accelerator(cpu=True),
            noise_scheduler=diffusers.DDPMScheduler(num_train_timesteps=100),
            torch=torch,
            nn=nn,
        )
        return model

    data = batches.dataset.tensors
    holds_to(0.7, train, 2 * batch_bytes(data))  # the next batch, and the clean images in addition to the noisy ones
