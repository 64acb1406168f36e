"""What fused batch norms launch on CUDA in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shoal
from tests.cuda_standin.counts import device_counts
from tests.engine.training_laws import blocks


def launches_of_a_step(model: nn.Module, x: torch.Tensor) -> int:
    """Of the second one."""
    for _ in range(2):
        before = device_counts().launches
        model(x).sum().backward()
    return device_counts().launches - before


@pytest.mark.parametrize("pixels", [16, 1024], ids=["small", "large"])
def test_a_map_is_left_to_pytorchs_layers_where_nothing_says_that_its_launches_pay(pixels: int) -> None:
    """2^25 elements in the larger one."""
    net, x = nn.Sequential(*blocks(8, 8, 8, 8)).cuda(), torch.empty(4, 8, pixels, pixels, device="cuda")
    plain, pays, always = (
        launches_of_a_step(model, x)
        for model in (
            copy.deepcopy(net),
            shoal.fuse_batchnorm(copy.deepcopy(net)),
            shoal.fuse_batchnorm(copy.deepcopy(net), when="always"),
        )
    )
    assert pays == plain < always
